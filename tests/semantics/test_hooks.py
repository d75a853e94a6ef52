"""Hooks of every kind, registered before and after a value is used: called as in eager, with eager's gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook, save_on_cpu, saved_tensors_hooks
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

import koila
from koila import events
from tests.semantics.modes import MODES, Scope, assert_same, in_bytes, plain

pytestmark = pytest.mark.semantics("S12")

Log = list[Any]
Program = Callable[[Any, Log], Any]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    """A program that is given eager's or koila's way of making tensors lazy, and a log for its hooks."""
    PROGRAMS[function.__name__] = function
    return function


def _start(lazy: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A parameter, and a value that is made from it."""
    torch.manual_seed(0)
    w = torch.randn(4, requires_grad=True, dtype=torch.float64)
    return w, lazy(torch.randn(7, 4, dtype=torch.float64)) * w


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))
    return nn.Sequential(*layers).double()


def _train(net: nn.Module, lazy: Any) -> list[Any]:
    net(lazy(torch.randn(7, 4, dtype=torch.float64))).pow(2).sum().backward()
    return [*(parameter.grad for parameter in net.parameters()), *net.buffers()]


@program
def after_the_use(lazy: Any, log: Log) -> Any:
    w, h = _start(lazy)
    loss = (h**2).sum()
    h.retain_grad()
    h.register_hook(lambda gradient: gradient * 10)
    loss.backward()
    return w.grad, h.grad


@program
def before_the_use(lazy: Any, log: Log) -> Any:
    w, h = _start(lazy)
    h.retain_grad()
    h.register_hook(lambda gradient: gradient * 10)
    (h**2).sum().backward()
    return w.grad, h.grad


@program
def on_a_view_and_on_what_comes_between(lazy: Any, log: Log) -> Any:
    w, h = _start(lazy)
    part = h[:, 1:]
    top = part.exp()
    loss = top.sum() + h.sum()
    part.register_hook(lambda gradient: gradient + 1)
    top.register_hook(lambda gradient: gradient * 2)
    loss.register_hook(lambda gradient: log.append(gradient.item()))
    loss.backward()
    return w.grad


@program
def removed(lazy: Any, log: Log) -> Any:
    w, h = _start(lazy)
    loss = (h**2).sum()
    handle = h.register_hook(lambda gradient: gradient * 10)
    h.register_hook(lambda gradient: gradient + 1)
    handle.remove()
    loss.backward()
    return w.grad


@program
def that_read_data(lazy: Any, log: Log) -> Any:
    w, h = _start(lazy)
    h.register_hook(lambda gradient: log.append(round(gradient.norm().item(), 8)))
    h.register_hook(lambda gradient: log.append(type(gradient).__name__))
    (h**2).sum().backward()
    return w.grad


@program
def grad_cam(lazy: Any, log: Log) -> Any:
    torch.manual_seed(0)
    layers = (nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 4 * 4, 5))
    net = nn.Sequential(*layers).double()
    kept: dict[str, Any] = {}
    net[2].register_forward_hook(lambda module, args, result: kept.update(activation=result))
    scores = net(lazy(torch.randn(7, 2, 8, 8, dtype=torch.float64)))
    kept["activation"].register_hook(lambda gradient: kept.update(gradient=gradient))
    scores[:, 1].sum().backward()
    weights = kept["gradient"].mean((2, 3), keepdim=True)
    return (weights * kept["activation"].detach()).sum(1) + 0, [p.grad for p in net.parameters()]


@program
def full_backward_hooks(lazy: Any, log: Log) -> Any:
    net = _net()
    for module in net:
        module.register_full_backward_hook(lambda module, inputs, outputs: log.append([*inputs, *outputs]))
    net[3].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 3,))
    net[2].register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 2,))
    return _train(net, lazy)


@program
def forward_hooks(lazy: Any, log: Log) -> Any:
    net = _net()
    net[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    net[1].register_forward_hook(lambda module, args, result: result + 1)
    net[4].register_forward_hook(lambda module, args, result: log.append(result.detach() + 0))
    return _train(net, lazy)


@program
def parameters_in_order(lazy: Any, log: Log) -> Any:
    net = _net()
    for number, parameter in enumerate(net.parameters()):
        parameter.register_hook(lambda gradient, number=number: log.append(number) or gradient * 2)  # type: ignore[misc]
        parameter.register_post_accumulate_grad_hook(lambda p, number=number: log.append((number, p.grad.clone())))  # type: ignore[misc]
    return _train(net, lazy)


@program
def of_autograds_nodes(lazy: Any, log: Log) -> Any:
    w, h = _start(lazy)
    loss = (h**2).sum()
    h.grad_fn.register_hook(lambda inputs, outputs: log.append(outputs[0].clone()))  # type: ignore[union-attr]
    h.grad_fn.register_prehook(lambda outputs: (outputs[0] * 3,))  # type: ignore[union-attr]
    loss.backward()
    return w.grad


@program
def over_several_tensors(lazy: Any, log: Log) -> Any:
    w, h = _start(lazy)
    top = h.exp()
    register_multi_grad_hook((h, top), lambda gradients: log.extend(gradients))
    (top * h).sum().backward()
    return w.grad


@program
def on_a_lazy_input(lazy: Any, log: Log) -> Any:
    w, _ = _start(lazy)
    x = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    x.register_hook(lambda gradient: gradient * 5)
    (lazy(x) * w).exp().sum().backward()
    return w.grad, x.grad


@program
def parametrisations(lazy: Any, log: Log) -> Any:
    torch.manual_seed(0)
    wrapped = (parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal)
    layers = [wrap(nn.Linear(4, 4)) for wrap in wrapped]
    return _train(nn.Sequential(layers[0], nn.Tanh(), *layers[1:]).double(), lazy)


@program
def norms_made_of_hooks(lazy: Any, log: Log) -> Any:
    torch.manual_seed(0)
    return _train(nn.Sequential(weight_norm(nn.Linear(4, 4)), nn.Tanh(), spectral_norm(nn.Linear(4, 3))).double(), lazy)


@program
def on_saved_tensors(lazy: Any, log: Log) -> Any:
    w, h = _start(lazy)

    def pack(tensor: torch.Tensor) -> Any:
        log.append(("pack", tuple(tensor.shape)))
        return [tensor]

    def unpack(packed: Any) -> torch.Tensor:
        log.append("unpack")
        return packed[0] * 2

    with saved_tensors_hooks(pack, unpack):
        top = h.exp()
        log.append(top.detach().sum() + 0)
    log.append("after")
    (top * top).sum().backward()
    return w.grad


@program
def saved_on_the_host(lazy: Any, log: Log) -> Any:
    w, h = _start(lazy)
    with save_on_cpu():
        top = h.exp()
    (top * h).sum().backward()
    return w.grad


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
@MODES
@pytest.mark.parametrize("name", PROGRAMS)
def test_hooks(name: str, scope: Scope) -> None:
    run = PROGRAMS[name]
    wanted_log: Log = []
    wanted = run(plain, wanted_log)
    with scope():
        log: Log = []
        assert_same(run(koila.lazy, log), wanted)
        assert_same(log, wanted_log)


@pytest.mark.parametrize("after", [False, True])
def test_a_budget_that_hooks_exceed_is_refused_and_says_so(after: bool) -> None:
    """Hooks see whole gradients; a budget too small for them is refused before anything runs."""
    run = PROGRAMS["after_the_use" if after else "before_the_use"]
    with in_bytes("9KiB")(), pytest.raises(koila.BudgetError, match="hooks on lazy values see whole gradients"):
        run(koila.lazy, [])


def test_a_program_with_hooks_runs_whole_visibly() -> None:
    with koila.budget(chunk_size=2):
        after_the_use(koila.lazy, [])
    assert events.counters()["fallback::hooks on lazy values see whole gradients"] == 1


@pytest.mark.asks_laziness("the value was computed in chunks, after it was recorded")
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("method", ["retain_grad", "register_hook", "grad_fn"])
def test_a_hook_that_would_be_dropped_is_an_error(method: str, keeps: bool) -> None:
    """A loss that was computed in chunks does not pass through the values inside any more."""
    w, h = _start(koila.lazy)
    if keeps:
        koila.keep(h)
    loss = (h**2).sum()
    with koila.budget(chunk_size=2):
        loss.item()
        with pytest.raises(
            koila.CaptureError, match=r"computed in chunks already[\s\S]*test_hooks.py[\s\S]*before anything"
        ):
            h.grad_fn if method == "grad_fn" else getattr(h, method)(*[print] * (method == "register_hook"))
        loss.backward()
    wanted, other = _start(plain)
    (other**2).sum().backward()
    assert_same(w.grad, wanted.grad)
    for value in (h, other):  # Nothing can come from the loss any more, and the graph is freed, as eager's is.
        value.register_hook(lambda gradient: gradient * 2)
        with pytest.raises(RuntimeError, match="through the graph a second time"):
            value.sum().backward()


def test_hooks_on_saved_tensors_do_not_see_what_was_recorded_outside() -> None:
    _, h = _start(koila.lazy)
    seen: Log = []
    with koila.budget(chunk_size=2), saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        assert h.exp().sum().requires_grad
        seen.clear()
        outer = koila.lazy(torch.ones(7, 4, dtype=torch.float64)).exp().sum()
        assert outer.item() == pytest.approx(28 * torch.e)
    assert seen == []
    assert events.counters()["eager_because::hooks on saved tensors"] == 2
