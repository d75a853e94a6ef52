"""Numbers that a user's own code computes from sizes: nobody records them, so nothing is derived from them (Rule 1)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import koila
from koila.ir.cache import clear_all


class Shares(torch.autograd.Function):
    """Divides by an eighth of the length, rounded down."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.parts = x.shape[1] // 8
        return x / ctx.parts

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad / ctx.parts


class Window(torch.autograd.Function):
    """Shifts by sixteen, or by the length if that is shorter."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.shift = min(x.shape[1], 16)
        return x.roll(ctx.shift, 1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.roll(-ctx.shift, 1)


@torch.library.custom_op("koila_tests::halves", mutates_args=())
def halves(x: torch.Tensor) -> torch.Tensor:
    """Divides by half of the length."""
    return x / (x.shape[1] // 2)


@halves.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _halves_backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    return grad / ctx.parts


def _halves_context(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
    ctx.parts = inputs[0].shape[1] // 2


halves.register_autograd(_halves_backward, setup_context=_halves_context)
CALLS = {"an eighth": Shares.apply, "the smaller": Window.apply, "a library's": halves}
LENGTHS = (17, 18, 19, 20, 40, 13, 14, 9, 17)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("budget", [{"chunk_size": 2}, {"allowed": "24KiB"}])
def test_what_users_code_computes_from_sizes_is_right_at_every_size(name: str, budget: dict[str, Any]) -> None:
    clear_all()
    torch.manual_seed(0)
    call: Any = CALLS[name]
    weight = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    for length in LENGTHS:
        x = torch.randn(6, length, 3, dtype=torch.float64)
        positions = torch.arange(length, dtype=torch.float64).view(-1, 1)
        expected = (call(x @ weight) * positions).sum()
        (theirs,) = torch.autograd.grad(expected, weight)
        weight.grad = None
        with koila.budget(**budget):
            found = (call(koila.lazy(x) @ weight) * positions).sum()
            found.backward()
        assert weight.grad is not None
        assert torch.allclose(found.detach(), expected.detach(), rtol=1e-10), length
        assert (weight.grad - theirs).norm() <= 1e-10 * theirs.norm(), length


def test_a_known_length_is_not_traced_again() -> None:
    clear_all()
    weight = torch.randn(3, 3, requires_grad=True)
    for step, length in enumerate((17, 18, 17, 18, 17)):
        if step == 2:
            koila.metrics.reset()
        with koila.budget(chunk_size=2):
            Shares.apply(koila.lazy(torch.randn(6, length, 3)) @ weight).sum().backward()
    assert koila.metrics.counter_value("traces") == 0
