"""S10 and S11: `backward` and `autograd.grad` in all their forms, once, twice and three times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import koila
from tests.semantics.compare import Lazy, same_as_eager

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def parts(lazy: Lazy, grad: bool = False) -> Parts:
    """(lazy input, weight, bias, output)."""
    x = torch.randn(5, 3, dtype=torch.float64).requires_grad_(grad)
    weight, bias = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 2), (2,)))
    lazied = lazy(x)
    return x, weight, bias, (lazied @ weight + bias).tanh()


def _twice(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Any:
    loss = out.square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def _two_losses(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Any:
    out.sum().backward(retain_graph=True)
    out.square().mean().backward()


def _inputs(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Any:
    out.square().sum().backward(inputs=[w])


def _input_itself(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Any:
    out.square().sum().backward(inputs=x)


def _into_other_gradients(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Any:
    w.grad, b.grad = torch.ones_like(w), None
    out.square().sum().backward()


def _scalar_of_one_element(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Any:
    out.square().sum().view(1, 1).backward()


def _after_reading(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Any:
    loss = out.square().sum()
    value = loss.item()
    loss.backward()
    return value


def _of_a_real_sum(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Any:
    (koila.run(out.square().sum()) + w.sum()).backward()


def _of_part_of_the_results(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Any:
    first, second = out.split(1, dim=1)
    first.sum().backward(retain_graph=True)
    return second.detach()


def _in_a_loop(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Any:
    for row in out:
        row.square().sum().backward(retain_graph=True)


FORMS: dict[str, Callable[..., Any]] = {
    "plain": lambda x, w, b, out: out.square().sum().backward(),
    "with a gradient": lambda x, w, b, out: out.backward(torch.arange(10.0, dtype=torch.float64).view(5, 2)),
    "with a lazy gradient": lambda x, w, b, out: out.backward(out.detach() * 2),
    "with a gradient of one": lambda x, w, b, out: out.sum().backward(torch.tensor(3.0, dtype=torch.float64)),
    "with an expanded gradient": lambda x, w, b, out: out.backward(torch.ones(1, dtype=out.dtype).expand(5, 2)),
    "function": lambda x, w, b, out: torch.autograd.backward(out.square().sum()),
    "function with two roots": lambda x, w, b, out: torch.autograd.backward([out.sum(), out.square().mean()]),
    "function with gradients": lambda x, w, b, out: torch.autograd.backward(
        [out, out.sum()], [torch.ones_like(out.detach()), torch.tensor(2.0, dtype=out.dtype)]
    ),
    "function with real and lazy roots": lambda x, w, b, out: torch.autograd.backward([out.sum(), w.square().sum()]),
    "twice": _twice,
    "two losses": _two_losses,
    "inputs": _inputs,
    "the input itself": _input_itself,
    "into other gradients": _into_other_gradients,
    "one element": _scalar_of_one_element,
    "after reading": _after_reading,
    "of a real sum": _of_a_real_sum,
    "of part of the results": _of_part_of_the_results,
    "in a loop": _in_a_loop,
}


@pytest.mark.semantics("S10")
@pytest.mark.parametrize("name", FORMS)
def test_a_form_of_backward(name: str) -> None:
    def program(lazy: Lazy) -> Any:
        x, weight, bias, out = parts(lazy, grad=True)
        more = FORMS[name](x, weight, bias, out)
        return out.detach(), x.grad, weight.grad, bias.grad, more

    same_as_eager(program, (1, 2), in_bytes=name in ("plain", "with a gradient", "two losses"))


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "no scalar": (lambda out: out.backward(), "grad can be implicitly created only for scalar outputs"),
    "no gradient": (lambda out: out.detach().sum().backward(), "does not require grad"),
    "a wrong shape": (lambda out: out.backward(torch.ones(3, dtype=out.dtype)), "Mismatch in shape"),
    "a shape that broadcasts": (lambda out: out.backward(torch.ones(2, dtype=out.dtype)), "Mismatch in shape"),
    "a second time": (lambda out: [loss.backward() for loss in [out.square().sum()] * 2], "a second time"),
    "under no_grad": (lambda out: torch.no_grad()(lambda: (out * 2).sum())().backward(), "does not require grad"),
}


@pytest.mark.semantics("S10")
@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("name", REFUSED)
def test_what_eager_refuses_is_refused(name: str, chunk_size: int | None) -> None:
    ask, text = REFUSED[name]
    with pytest.raises(RuntimeError, match=text):
        ask(parts(lambda x: x)[3])
    with koila.budget(chunk_size=chunk_size), pytest.raises(RuntimeError, match=text):
        ask(parts(koila.lazy)[3])


def _grad(outputs: Any, inputs: Any, **more: Any) -> Any:
    return torch.autograd.grad(outputs, inputs, **more)


def _hessian_vector(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Any:
    (first,) = _grad(out.square().sum(), w, create_graph=True)
    return _grad((first * torch.ones_like(w)).sum(), w)


def _third(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Any:
    (first,) = _grad(out.pow(3).sum(), w, create_graph=True)
    (second,) = _grad(first.pow(2).sum(), w, create_graph=True)
    return (first.detach(), second.detach(), *_grad(second.sum(), (w, b)))


def _penalty(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Any:
    (slope,) = _grad(out.sum(), x, create_graph=True)
    ((slope.norm(dim=1) - 1).square().mean() + out.sum()).backward()
    return w.grad, b.grad


def _backward_of_a_gradient(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Any:
    first, second = _grad(out.square().mean(), (w, b), create_graph=True)
    (first.square().sum() + second.square().sum()).backward()
    return w.grad, b.grad


def _unused(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Any:
    other = torch.ones(2, dtype=w.dtype, requires_grad=True)
    return [g is None for g in _grad(out.sum(), (w, other), allow_unused=True, retain_graph=True)], _grad(
        out.sum(), (w, other), materialize_grads=True
    )


def _retained(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Any:
    loss = out.square().sum()
    first = _grad(loss, w, retain_graph=True)
    loss.backward()
    return first, w.grad, b.grad


def _steps_inside(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Any:
    """An inner loop that is differentiated (MAML)."""
    fast = w
    for _ in range(2):
        (slope,) = _grad((x @ fast + b).square().mean(), fast, create_graph=True)
        fast = fast - 0.1 * slope
    (x @ fast).square().mean().backward()
    return w.grad, b.grad


GRADS: dict[str, Callable[..., Any]] = {
    "one input": lambda x, w, b, out: _grad(out.square().sum(), w),
    "several inputs": lambda x, w, b, out: _grad(out.square().sum(), (x, w, b)),
    "a list": lambda x, w, b, out: list(_grad([out.square().sum()], [b, w])),
    "several outputs": lambda x, w, b, out: _grad((out.sum(), out.square().sum()), (w, b)),
    "with gradients": lambda x, w, b, out: _grad(out, (w, x), grad_outputs=torch.ones_like(out.detach()) * 2),
    "with a lazy gradient": lambda x, w, b, out: _grad(out, w, grad_outputs=out.detach()),
    "unused": _unused,
    "retained": _retained,
    "Hessian times vector": _hessian_vector,
    "three times": _third,
    "gradient penalty": _penalty,
    "backward of a gradient": _backward_of_a_gradient,
    "an inner loop": _steps_inside,
}


@pytest.mark.semantics("S11")
@pytest.mark.parametrize("name", GRADS)
def test_a_form_of_grad(name: str) -> None:
    def program(lazy: Lazy) -> Any:
        return GRADS[name](*parts(lazy, grad=True))

    same_as_eager(program, (1, 2))


@pytest.mark.semantics("S11")
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_unused_inputs_are_refused_as_in_eager(chunk_size: int | None) -> None:
    other = torch.ones(2, requires_grad=True)
    with koila.budget(chunk_size=chunk_size), pytest.raises(RuntimeError, match="appears to not have been used"):
        out = parts(koila.lazy)[3]
        koila.run(torch.autograd.grad(out.sum(), other))


def _net(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    lazied = koila.lazy(x)
    return koila.run(F.softplus(lazied @ w + b).square().sum(0))


@pytest.mark.semantics("S11")
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_gradcheck_and_gradgradcheck(chunk_size: int | None) -> None:
    x, w, b = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 3), (3, 2), (2,)))
    with koila.budget(chunk_size=chunk_size):
        assert torch.autograd.gradcheck(_net, (x, w, b))
        assert torch.autograd.gradgradcheck(_net, (x, w, b))


@pytest.mark.semantics("S10")
def test_a_backward_in_the_middle_of_a_program() -> None:
    def program(lazy: Lazy) -> Any:
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        x = lazy(torch.randn(5, 3, dtype=torch.float64))
        hidden = net[1](net[0](x))
        hidden.square().mean().backward(retain_graph=True)
        early = net[0].weight.grad.clone()
        loss = net[2](hidden).square().mean()
        loss.backward()
        return early, loss.detach(), [p.grad for p in net.parameters()]

    same_as_eager(program, (1, 2, 3), in_bytes=True)


@pytest.mark.semantics("S10")
def test_a_gradient_of_another_dtype_is_converted() -> None:
    def program(lazy: Lazy) -> Any:
        weight = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
        (lazy(torch.randn(5, 3, dtype=torch.float64)) @ weight).backward(torch.ones(5, 2))
        return weight.grad

    same_as_eager(program, (1, 2))
