"""`torch.func`, forward-mode AD, `autograd.grad` in its rarer forms, `gradcheck` (S11, S13)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fw
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import koila
from koila.delegates import to_backend
from koila.errors import CaptureError

BUDGETS = [{}, {"chunk_size": 2}, {"allowed": 1 << 20}]
Program = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(params=BUDGETS, ids=["whole", "chunks", "bytes"])
def budget(request: pytest.FixtureRequest) -> Any:
    return request.param


def data() -> torch.Tensor:
    return torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def weight() -> torch.Tensor:
    return torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3).double()


def counters(*prefixes: str) -> list[str]:
    return [name for name in koila.metrics.counter_names() if name.startswith(prefixes)]


def check_equal(program: Program, budget: Any) -> None:
    expected = program(data())
    koila.metrics.reset()
    with koila.budget(**budget):
        found = koila.run(program(koila.lazy(data())))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


# Transforms.


def _dual(x: torch.Tensor) -> torch.Tensor:
    with fw.dual_level():
        tangent = fw.unpack_dual(fw.make_dual(x, torch.ones_like(data())).sin()).tangent
    assert tangent is not None
    return tangent


def _dual_weight(x: torch.Tensor) -> torch.Tensor:
    """The lazy tensor was recorded before the level, and meets a tangent inside of it."""
    hidden = x * 2
    with fw.dual_level():
        dual = fw.make_dual(weight(), torch.ones(4, dtype=torch.float64))
        tangent = fw.unpack_dual((hidden * dual).exp().sum()).tangent
    assert tangent is not None
    return tangent


def _dual_in_place(x: torch.Tensor) -> torch.Tensor:
    hidden = x * 2
    before = hidden + 1
    with fw.dual_level():
        dual = fw.make_dual(weight(), torch.ones(4, dtype=torch.float64))
        hidden += 1
        tangent = fw.unpack_dual(hidden * dual).tangent
    assert tangent is not None
    return tangent + before + hidden


def _functional(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return torch.func.functional_call(NET, parameters, (x,)).square().mean()


NET = linear()


def _parameters() -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in NET.named_parameters()}


def _made_inside(x: torch.Tensor) -> torch.Tensor:
    return torch.func.grad(lambda w: (koila.lazy(x) * w).sin().sum())(weight())


TRANSFORMS: dict[str, Program] = {
    "make_dual": _dual,
    "a dual weight": _dual_weight,
    "in place under a dual level": _dual_in_place,
    "jvp": lambda x: torch.func.jvp(torch.sin, (x,), (torch.ones_like(data()),))[1],
    "jvp, lazy tangent": lambda x: torch.func.jvp(torch.sin, (data(),), (x,))[1],
    "grad": lambda x: torch.func.grad(lambda w: (x * w).sin().sum())(weight()),
    "grad of a lazy argument": lambda x: torch.func.grad(lambda y: (y * weight()).sin().sum())(x * 2),
    "vmap": lambda x: torch.func.vmap(torch.sin)(x * 2),
    "vmap, lazy closure": lambda x: torch.func.vmap(lambda w: (x * w).sum())(weight()),
    "vmap of random numbers": lambda x: torch.func.vmap(
        lambda w: nn.functional.dropout(x, 0.5) * w, randomness="different"
    )(weight()),
    "vmap of grad": lambda x: torch.func.vmap(
        torch.func.grad(lambda y, w: (y * w).sin().sum(), argnums=1), in_dims=(0, None)
    )(x, weight()),
    "per-sample gradients": lambda x: torch.func.vmap(torch.func.grad(_functional), in_dims=(None, 0))(
        _parameters(), x
    )["weight"],
    "functional_call under grad": lambda x: torch.func.grad(_functional)(_parameters(), x)["bias"],
    "jacrev": lambda x: torch.func.jacrev(lambda w: (x * w).sin().sum(0))(weight()),
    "jacfwd": lambda x: torch.func.jacfwd(lambda w: (x * w).sin().sum(0))(weight()),
    "hessian": lambda x: torch.func.hessian(lambda w: (x * w).sin().sum())(weight()),
    "vjp, lazy seed": lambda x: torch.func.vjp(lambda w: (x * w).sin(), weight())[1](x)[0],
    "lazy inside": _made_inside,
    "functional.jacobian, forward mode": lambda x: torch.autograd.functional.jacobian(
        lambda w: (x * w).sin().sum(0), weight(), vectorize=True, strategy="forward-mode"
    ),
}


@pytest.mark.semantics("S13")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_exact_and_counted(name: str, budget: Any) -> None:
    torch.manual_seed(2)
    expected = TRANSFORMS[name](data())
    torch.manual_seed(2)
    koila.metrics.reset()
    with koila.budget(**budget):
        found = koila.run(TRANSFORMS[name](koila.lazy(data())))
    assert counters("eager_because::a transform", "eager_because::forward-mode AD") != []
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.semantics("S5", "S13")
def test_functional_call_alone_is_recorded(budget: Any) -> None:
    check_equal(lambda x: _functional(_parameters(), x), budget)
    assert counters("eager::", "eager_because::") == []


@pytest.mark.semantics("S13")
def test_after_a_transform_things_are_recorded_again() -> None:
    x = koila.lazy(data())
    torch.func.grad(lambda w: (x * w).sin().sum())(weight())
    _dual(x)
    koila.metrics.reset()
    assert isinstance(x * 2, koila.LazyTensor) and counters("eager::") == []


@pytest.mark.semantics("S13")
def test_a_tangent_goes_through_a_delegate() -> None:
    x = torch.arange(3.0)
    lowered = to_backend("eager", make_fx(torch.exp)(x), (x,))
    koila.metrics.reset()
    with fw.dual_level():
        tangent = fw.unpack_dual(lowered(fw.make_dual(x, x))).tangent
    assert tangent is not None and torch.equal(tangent, x.exp() * x)
    assert counters("eager_because::") == ["eager_because::forward-mode AD"]


# The rarer forms of autograd.grad.


def _batched(x: torch.Tensor) -> torch.Tensor:
    w = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3).requires_grad_()
    seeds = torch.eye(3, dtype=torch.float64)
    return torch.autograd.grad((x @ w).tanh().sum(0), w, seeds, is_grads_batched=True)[0]


def _batched_after_a_run(x: torch.Tensor) -> torch.Tensor:
    w = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3).requires_grad_()
    out = koila.run((x @ w).tanh().sum(0))
    return torch.autograd.grad(out, w, torch.eye(3, dtype=torch.float64), is_grads_batched=True)[0]


GRADS: dict[str, Program] = {
    "is_grads_batched": _batched,
    "is_grads_batched after a run": _batched_after_a_run,
    "jacobian": lambda x: torch.autograd.functional.jacobian(lambda w: (x * w).sin().sum(0), weight()),
    "jacobian, vectorised": lambda x: torch.autograd.functional.jacobian(
        lambda w: (x * w).sin().sum(0), weight(), vectorize=True
    ),
    "jacobian of a lazy argument": lambda x: torch.autograd.functional.jacobian(
        lambda y: (y * weight()).sin().sum(0), x
    ),
    "hessian": lambda x: torch.autograd.functional.hessian(lambda w: (x * w).sin().sum(), weight()),
    "hvp": lambda x: torch.autograd.functional.hvp(lambda w: (x * w).sin().sum(), weight(), weight())[1],
    "vhp": lambda x: torch.autograd.functional.vhp(lambda w: (x * w).sin().sum(), weight(), weight())[1],
    "functional.jvp": lambda x: torch.autograd.functional.jvp(lambda w: (x * w).sin().sum(0), weight(), weight())[1],
}


@pytest.mark.semantics("S11")
@pytest.mark.parametrize("name", GRADS)
def test_forms_of_grad(name: str, budget: Any) -> None:
    check_equal(GRADS[name], budget)


@pytest.mark.semantics("S11")
@pytest.mark.parametrize("fast_mode", [False, True])
def test_gradcheck_and_gradgradcheck(fast_mode: bool, budget: Any) -> None:
    def program(w: torch.Tensor) -> torch.Tensor:
        return (koila.lazy(data()[:3, :2]) * w).tanh().sum()

    w = weight()[:2].requires_grad_()
    with koila.budget(**budget):
        assert torch.autograd.gradcheck(
            program, (w,), fast_mode=fast_mode, check_forward_ad=True, check_batched_grad=True
        )
        assert torch.autograd.gradgradcheck(program, (w,), fast_mode=fast_mode)


@pytest.mark.semantics("S11")
def test_gradcheck_finds_a_wrong_gradient(budget: Any) -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 3

    def program(w: torch.Tensor) -> torch.Tensor:
        return Wrong.apply(koila.lazy(data()) * w).sum()

    with koila.budget(**budget):
        assert not torch.autograd.gradcheck(program, (weight().requires_grad_(),), raise_exception=False)


# Gradients of inner values.


def _after_a_gradient(net: Any, x: torch.Tensor) -> Any:
    hidden = net(x)
    loss = hidden.square().mean()
    torch.autograd.grad(loss, [net.weight], allow_unused=True, retain_graph=True)
    return torch.autograd.grad(loss, hidden)


def _after_item(net: Any, x: torch.Tensor) -> Any:
    hidden = net(x)
    loss = hidden.square().mean()
    loss.item()
    return torch.autograd.grad(loss, [hidden, net.weight])


def _pending(net: Any, x: torch.Tensor) -> Any:
    hidden = net(x)
    return torch.autograd.grad(hidden.square().mean(), hidden)


def _through_eager_code(net: Any, x: torch.Tensor) -> Any:
    hidden = net(x)
    real = koila.run(hidden.tanh())
    return torch.autograd.grad((real * 2).sum(), hidden)


def _by_two_ways(net: Any, x: torch.Tensor) -> Any:
    hidden = net(x)
    squashed = hidden.tanh()
    koila.run(squashed)
    return torch.autograd.grad((squashed * 2).sum() + hidden.exp().sum(), [hidden, squashed])


def _run_before(net: Any, x: torch.Tensor) -> Any:
    hidden = net(x)
    doubled = hidden * 2
    koila.run(hidden)
    loss = doubled.square().mean()
    loss.item()
    return torch.autograd.grad(loss, [hidden, doubled, net.bias])


def _unused(net: Any, x: torch.Tensor) -> Any:
    hidden, other = net(x), torch.ones(2, dtype=torch.float64, requires_grad=True)
    loss = hidden.square().mean()
    loss.item()
    first, second = torch.autograd.grad(loss, [hidden, other], allow_unused=True)
    assert second is None
    return first, *torch.autograd.grad(loss, [other], materialize_grads=True)


def _backward_inputs(net: Any, x: torch.Tensor) -> Any:
    hidden = net(x)
    loss = hidden.square().mean()
    loss.backward(inputs=[hidden], retain_graph=True)
    loss.item()
    loss.backward(inputs=[hidden])
    assert net.weight.grad is None
    return hidden.grad


def _second_derivative(net: Any, x: torch.Tensor) -> Any:
    hidden = net(x)
    loss = hidden.pow(3).mean()
    (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
    (loss + gradient.square().sum()).backward()
    return net.weight.grad


INNER = [
    _after_a_gradient, _after_item, _pending, _through_eager_code, _by_two_ways, _run_before, _unused, _backward_inputs,
    _second_derivative,
]  # fmt: skip


@pytest.mark.semantics("S11")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("program", INNER, ids=lambda program: program.__name__)
def test_gradients_of_inner_values(program: Any, budget: Any) -> None:
    expected = program(linear(), data())
    with koila.budget(**budget):
        found = koila.run(program(linear(), koila.lazy(data())))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.semantics("S11")
def test_the_fallback_for_an_inner_value_is_counted() -> None:
    with koila.budget(chunk_size=2):
        koila.run(_after_item(linear(), koila.lazy(data())))
    assert counters("fallback::") == ["fallback::the gradient of an inner value needs the graph of the whole run"]


@pytest.mark.semantics("S11")
def test_a_second_pass_to_an_inner_value_is_eagers_error(budget: Any) -> None:
    with koila.budget(**budget):
        hidden = linear()(koila.lazy(data()))
        loss = hidden.square().mean()
        loss.backward()
        with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
            koila.run(torch.autograd.grad(loss, hidden))


@pytest.mark.semantics("S11")
def test_a_second_derivative_through_an_inner_value_after_a_run_is_refused_with_a_way_out() -> None:
    with koila.budget(chunk_size=2):
        hidden = linear()(koila.lazy(data()))
        loss = hidden.pow(3).mean()
        loss.item()
        with pytest.raises(CaptureError, match="cannot be differentiated again"):
            torch.autograd.grad(loss, hidden, create_graph=True)
