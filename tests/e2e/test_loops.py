"""What a loop costs over its steps: programs that repeat are traced once, and what is held at a step is bounded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila

NUMBERS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "add": lambda x, y, c: torch.add(x, y, alpha=c),
    "sub": lambda x, y, c: torch.sub(x, y, alpha=c),
    "add to a tensor": lambda x, y, c: torch.add(y, x, alpha=c),
    "sub from a tensor": lambda x, y, c: torch.sub(y, x, alpha=c),
    "add a number": lambda x, _, c: torch.add(x, 0.7, alpha=c),
    "sub a number": lambda x, _, c: torch.sub(x, 0.7, alpha=c),
    "mul": lambda x, _, c: x * c,
    "div": lambda x, _, c: x / c,
    "divided by": lambda x, _, c: c / x,
    "subtracted from": lambda x, _, c: c - x,
    "floor": lambda x, _, c: torch.div(x, c, rounding_mode="floor") * x,
    "add in place": lambda x, _, c: (x * 1).add_(c),
    "sub in place": lambda x, y, c: (x * 1).sub_(y, alpha=c),
    "div in place": lambda x, _, c: (x * 1).div_(c),
    "complex": lambda x, _, c: (torch.view_as_complex(torch.stack([x, x], -1)) * c).real,
    "half": lambda x, _, c: (x.half() * c).double(),
    "bfloat16": lambda x, _, c: (x.bfloat16() / c).double(),
    "batch norm": lambda x, _, c: F.batch_norm(x, None, None, training=True, eps=c),
    "statistics": lambda x, _, c: F.batch_norm(
        x, x.new_zeros(3), x.new_ones(3), training=True, momentum=c, eps=c + 1e-5
    ),
}
"""Calls with a number that changes from step to step."""


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_changes_is_never_a_constant_of_the_program(name: str) -> None:
    values, others = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    weight = torch.randn(4, 3, dtype=torch.float64)
    for number in (0.3, 0.45, 0.3, 1.7):
        expected, found = values.clone().requires_grad_(), values.clone().requires_grad_()
        (NUMBERS[name](expected, others, number) * weight).sum().backward()
        with koila.budget(chunk_size=2):
            lazy, beside, scale = koila.lazy((found, others, weight))
            (NUMBERS[name](lazy, beside, number) * scale).sum().backward()
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-10, atol=1e-12)


def test_a_step_that_repeats_is_traced_once() -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    koila.metrics.reset()
    for _ in range(3):
        with koila.budget(chunk_size=2):
            (koila.lazy(torch.randn(8, 4)) @ weight).sum().backward()
    assert koila.metrics.counter_value("traces") == 1


def test_an_index_that_comes_again_is_not_traced_again() -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    koila.metrics.reset()
    for number in range(4):
        with koila.budget(chunk_size=2):
            (koila.lazy(torch.randn(8, 4))[:, [number % 2, 1]] @ weight[:2]).sum().backward()
    assert koila.metrics.counter_value("traces") == 2


def test_what_is_held_at_an_optimizer_step_is_bounded_in_all() -> None:
    """A quarter of the budget, for all held values together: of six of 48 KiB, one fits into 64."""
    weight = torch.randn(64, 64, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.1)
    with koila.budget("256KiB"):
        held = [koila.lazy(torch.randn(192, 64)) @ weight + number for number in range(6)]
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        assert sum(value._value.real is not None for value in held) == 1
        left = next(value for value in held if value._value.real is None)
        with pytest.raises(koila.errors.StaleInputError):
            koila.run(left)


def test_cells_whose_gates_are_written_beside_each_other_are_built_at_new_sizes() -> None:
    torch.manual_seed(0)
    cell = nn.GRUCell(5, 6).double()
    koila.metrics.reset()
    for size in (4, 7, 9, 11, 6):
        x, state = torch.randn(size, 5).double(), torch.randn(size, 6).double()
        wanted = torch.autograd.grad(cell(x, state).square().mean(), list(cell.parameters()))
        with koila.budget(chunk_size=3):
            cell(*koila.lazy(x, state)).square().mean().backward()
        for parameter, gradient in zip(cell.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-12)
        cell.zero_grad()
    assert koila.metrics.counter_value("sizes::built") > 0
