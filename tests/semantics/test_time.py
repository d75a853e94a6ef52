"""Time: values that are held after `backward` and `step`, and `.item()` anywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import koila
from tests.semantics.modes import MODES, Scope, assert_same, plain

Program = Callable[[Any], list[Any]]


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 3))
    return nn.Sequential(*layers).double()


def _data(step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(7, 4, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 3, (7,), generator=generator)


def _parameters(net: nn.Module) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in net.state_dict().values()]


def values_held_over_a_step(lazy: Any) -> list[Any]:
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    kept: list[Any] = []
    for step in range(3):
        x, y = lazy(*_data(step))
        logits = net(x)
        loss = F.cross_entropy(logits, y)
        accuracy = (logits.argmax(1) == y).double().mean()
        penalty = sum(parameter.square().sum() for parameter in net.parameters())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        kept += [logits.detach(), loss.detach(), accuracy, penalty.detach(), logits.softmax(1).detach() + 0]  # type: ignore[union-attr]
    return [*(value + 0 for value in kept), *_parameters(net)]


def values_held_after_the_backward(lazy: Any) -> list[Any]:
    net = _net()
    x, y = lazy(*_data())
    hidden = net[2](net[1](net[0](x)))
    logits = net[4](hidden)
    loss = F.cross_entropy(logits, y)
    loss.backward(retain_graph=True)
    first = [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
    logits.sum().backward()
    return [hidden.detach() + 0, logits.detach() + 0, loss.detach() + 0, *first, *(p.grad for p in net.parameters())]


def a_running_total(lazy: Any) -> list[Any]:
    net, total, count = _net(), torch.zeros((), dtype=torch.float64), 0
    optimizer = torch.optim.Adam(net.parameters())
    losses = []
    for step in range(3):
        x, y = lazy(*_data(step))
        loss = F.cross_entropy(net(x), y, reduction="sum")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total, count = total + loss.detach(), count + len(y)
        losses.append(loss)
    return [total / count + 0, *(loss.detach() + 0 for loss in losses), *_parameters(net)]


def gradients_that_are_held(lazy: Any) -> list[Any]:
    net = _net()
    x, y = lazy(*_data())
    loss = F.cross_entropy(net(x), y)
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    norms = [gradient.norm() for gradient in gradients]
    with torch.no_grad():
        held = [norm + 0 for norm in norms]
        for parameter, gradient in zip(net.parameters(), gradients, strict=True):
            parameter.sub_(gradient + 0)
    return [*held, *_parameters(net)]


@pytest.mark.semantics("S16")
@MODES
@pytest.mark.parametrize(
    "program",
    [values_held_over_a_step, values_held_after_the_backward, a_running_total, gradients_that_are_held],
    ids=lambda program: program.__name__,
)
def test_values_that_are_held(program: Program, scope: Scope) -> None:
    wanted = program(plain)
    with scope():
        assert_same(program(koila.lazy), wanted)


def before_the_backward(lazy: Any) -> list[Any]:
    net = _net()
    x, y = lazy(*_data())
    loss = F.cross_entropy(net(x), y)
    seen = [loss.item()]
    loss.backward()
    return [torch.tensor(seen), *(p.grad for p in net.parameters()), *_parameters(net)]


def between_all_calls(lazy: Any) -> list[Any]:
    net, seen = _net(), []
    x, y = lazy(*_data())
    for layer in net:
        x = layer(x)
        seen.append(x.detach().square().sum().item())
    loss = F.cross_entropy(x, y)
    seen.append(loss.item())
    loss.backward()
    seen.append(loss.item())
    return [torch.tensor(seen), *(p.grad for p in net.parameters()), *_parameters(net)]


def that_decides(lazy: Any) -> list[Any]:
    net, taken = _net(), []
    x, y = lazy(*_data())
    for _ in range(4):
        logits = net(x)
        loss = F.cross_entropy(logits, y)
        if loss > 1.1:
            loss = loss * 2
        if bool((logits.detach().max() > 0.9).item()):
            x = x + 0.1
        taken.append(loss.item())
        loss.backward()
    return [torch.tensor(taken), *(p.grad for p in net.parameters()), *_parameters(net)]


def in_a_hook_and_in_a_module(lazy: Any) -> list[Any]:
    net, seen = _net(), []
    net[2].register_forward_hook(lambda module, args, result: seen.append(result.detach().mean().item()))
    net[4].weight.register_hook(lambda gradient: seen.append(gradient.norm().item()))
    x, y = lazy(*_data())
    F.cross_entropy(net(x), y).backward()
    return [torch.tensor(seen), *(p.grad for p in net.parameters()), *_parameters(net)]


def of_parts_after_the_step(lazy: Any) -> list[Any]:
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    x, y = lazy(*_data())
    logits = net(x)
    loss = F.cross_entropy(logits, y)
    largest = logits.detach().abs().max()
    loss.backward()
    optimizer.step()
    seen = [loss.item(), largest.item(), logits[0, 0].item(), *logits.detach().sum(0).tolist()]
    return [torch.tensor(seen), *_parameters(net)]


@pytest.mark.semantics("S17")
@MODES
@pytest.mark.parametrize(
    "program",
    [before_the_backward, between_all_calls, that_decides, in_a_hook_and_in_a_module, of_parts_after_the_step],
    ids=lambda program: program.__name__,
)
def test_item_anywhere(program: Program, scope: Scope) -> None:
    wanted = program(plain)
    for _ in range(2):  # The second time what followed a read is known.
        with scope():
            assert_same(program(koila.lazy), wanted)
