"""S21: every optimizer, two of them, one inside the backward pass, closures, SAM, EMA and SWA."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import swa_utils

import koila
from tests.semantics.compare import Lazy, same_as_eager

pytestmark = pytest.mark.semantics("S21")

STEPS = 3


def net() -> nn.Sequential:
    """A bias before the normalisation would have a gradient of nothing but rounding, which Adam blows up."""
    return nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()


def batch(lazy: Lazy) -> Any:
    return lazy(torch.randn(5, 3, dtype=torch.float64), torch.randint(0, 2, (5,)))


def state(*modules: nn.Module) -> list[torch.Tensor]:
    return [tensor.detach().clone() for module in modules for tensor in module.state_dict().values()]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01),
    "AdamW, one by one": lambda p: torch.optim.AdamW(p, 0.01, foreach=False),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, 0.01),
    "Adamax": lambda p: torch.optim.Adamax(p, 0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, 1.0),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, 0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, 0.05),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 0.05),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_of_an_optimizer(name: str) -> None:
    def program(lazy: Lazy) -> Any:
        model, seen = net(), []
        optimizer = OPTIMIZERS[name](model.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        for _ in range(STEPS):
            x, y = batch(lazy)
            out = model(x)
            loss = F.cross_entropy(out, y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            seen += [loss.item(), (out.argmax(1) == y).sum().item()]
        return seen, state(model)

    same_as_eager(program, (2,), in_bytes=name == "AdamW")


def _lbfgs(model: nn.Module, lazy: Lazy) -> Any:
    optimizer = torch.optim.LBFGS(model.parameters(), 0.5, max_iter=3, line_search_fn="strong_wolfe")
    x, y = batch(lazy)
    calls = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        calls.append(1)
        return loss

    return [optimizer.step(closure).item() for _ in range(2)], len(calls)


def _closure(model: nn.Module, lazy: Lazy) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = batch(lazy)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return [optimizer.step(closure).item() for _ in range(STEPS)]


def _two(model: nn.Sequential, lazy: Lazy) -> Any:
    """Two optimizers on two parts, one of which steps every other time."""
    first = torch.optim.SGD(model[0].parameters(), 0.1, momentum=0.9)
    second = torch.optim.Adam([*model[1].parameters(), *model[3].parameters()], 0.01)
    for step in range(STEPS):
        x, y = batch(lazy)
        F.cross_entropy(model(x), y).backward()
        first.step()
        first.zero_grad()
        if step % 2:
            second.step()
            second.zero_grad()
    return [p.grad for p in model.parameters()]


def _alternating(model: nn.Module, lazy: Lazy) -> Any:
    """A generator and a critic that look at each other."""
    critic = net()
    ours, theirs = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(critic.parameters(), 0.1, momentum=0.9)
    for _ in range(2):
        x, _ = batch(lazy)
        fake = torch.cat([model(x), model(x)[:, :1]], 1)
        loss = (critic(x)[:, 0] - 1).square().mean() + critic(fake.detach())[:, 0].square().mean()
        theirs.zero_grad()
        loss.backward()
        theirs.step()
        ours.zero_grad()
        (critic(fake)[:, 0] - 1).square().mean().backward()
        ours.step()
    return state(critic)


def _in_backward(model: nn.Module, lazy: Lazy) -> Any:
    """Each parameter is stepped, and its gradient freed, by a hook inside the backward pass."""
    optimizers = {p: torch.optim.Adam([p], 0.01) for p in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    losses = []
    for _ in range(STEPS):
        x, y = batch(lazy)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        losses.append(loss.detach())
    return losses, [p.grad for p in model.parameters()]


def _sam(model: nn.Module, lazy: Lazy) -> Any:
    """Sharpness-aware minimisation: up along the gradient, a second gradient, back, a step."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        x, y = batch(lazy)
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            moves = [p.grad * (0.05 / norm) for p in model.parameters()]
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        optimizer.step()
        optimizer.zero_grad()


def _ema(model: nn.Module, lazy: Lazy) -> Any:
    """A slow copy by `lerp_` and one by `AveragedModel`; both are asked after each step."""
    slow, optimizer = copy.deepcopy(model), torch.optim.SGD(model.parameters(), 0.1)
    averaged = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True)
    seen = []
    for _ in range(STEPS):
        x, y = batch(lazy)
        with torch.no_grad():
            goal = slow(x).softmax(-1)
        loss = F.cross_entropy(model(x), y) + F.cross_entropy(model(x), goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for kept, new in zip(slow.parameters(), model.parameters(), strict=True):
                kept.lerp_(new, 0.1)
        averaged.update_parameters(model)
        seen.append(averaged(x).detach())
    return seen, state(slow, averaged)


def _swa(model: nn.Module, lazy: Lazy) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    averaged, schedule = swa_utils.AveragedModel(model), swa_utils.SWALR(optimizer, 0.05, anneal_epochs=2)
    batches = [batch(lazy) for _ in range(STEPS)]
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        averaged.update_parameters(model)
        schedule.step()
    swa_utils.update_bn(batches, averaged)
    return averaged.eval()(batches[0][0]).detach(), state(averaged)


def _accumulated(model: nn.Module, lazy: Lazy) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for step in range(4):
        x, y = batch(lazy)
        (F.cross_entropy(model(x), y) / 2).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 1)
    return [p.grad for p in model.parameters()]


def _saved_and_loaded(model: nn.Module, lazy: Lazy) -> Any:
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for step in range(STEPS):
        x, y = batch(lazy)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if step == 0:
            kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    x, y = batch(lazy)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def _by_hand(model: nn.Module, lazy: Lazy) -> Any:
    for _ in range(STEPS):
        x, y = batch(lazy)
        loss = F.cross_entropy(model(x), y)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for p, gradient in zip(model.parameters(), gradients, strict=True):
                p -= 0.1 * gradient
    return loss.detach()


LOOPS = (
    _lbfgs, _closure, _two, _alternating, _in_backward, _sam, _ema, _swa, _accumulated, _saved_and_loaded, _by_hand,
)  # fmt: skip


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__.strip("_"))
def test_a_loop(loop: Callable[..., Any]) -> None:
    def program(lazy: Lazy) -> Any:
        model = net()
        more = loop(model, lazy)
        return more, state(model)

    same_as_eager(program, (2,), in_bytes=loop in (_in_backward, _sam))


@pytest.mark.asks_laziness("a budget refuses what is pending")
def test_a_step_is_not_refused_for_a_value_that_nobody_has_read() -> None:
    """What is pending on the parameters and fits no budget: the step is made, and the read is refused."""
    torch.manual_seed(0)
    model, x = net(), torch.randn(32, 3, dtype=torch.float64)
    before = state(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(koila.lazy(x)).sum().backward()
    pending = model(koila.lazy(x)).exp().sum()
    with koila.budget("64B"):
        optimizer.step()
    assert any(not torch.equal(old, new) for old, new in zip(before, state(model), strict=True))
    with pytest.raises(koila.KoilaError, match="allowed 64"):
        pending.item()
