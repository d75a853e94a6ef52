"""S3 and S16: values that share memory, of which some are held and some are not, read in any order and at any time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import koila
from tests.semantics.compare import chunked

pytestmark = pytest.mark.semantics("S3", "S16")

Made = tuple[torch.Tensor, ...]


def _view_of_a_base_that_is_gone(x: torch.Tensor, w: torch.Tensor) -> Made:
    other = x * 1
    base = other - 1
    view = base.view(-1)
    base.fill_(9.0)
    return other, view


def _sum_before_a_write_to_the_base(x: torch.Tensor, w: torch.Tensor) -> Made:
    base = x * w
    view = base.view(-1)
    total = view.sum()
    base.mul_(2)
    return total, view


def _sum_before_a_write_to_the_view(x: torch.Tensor, w: torch.Tensor) -> Made:
    base = x * w
    view = base.view(-1)
    total = view.sum()
    view.mul_(2)
    return total, base


def _two_views(x: torch.Tensor, w: torch.Tensor) -> Made:
    base = x * 1
    rows, columns = base.view(-1), base.t()
    total = rows.sum()
    rows.mul_(2)
    columns.add_(1)
    return total, rows, base


def _a_copy_between_two_writes(x: torch.Tensor, w: torch.Tensor) -> Made:
    base = x * 1
    view = base.view(-1)
    total = view.sum()
    base.mul_(2)
    del base
    between = view * 1
    view.add_(1)
    return total, between, view


def _a_transposed_view(x: torch.Tensor, w: torch.Tensor) -> Made:
    base = x * w
    view = base.t()
    total = base.sum()
    base.mul_(2)
    return total, view


def _detached(x: torch.Tensor, w: torch.Tensor) -> Made:
    base = x * w
    alias = base.detach()
    total = (base * 2).sum()
    alias.add_(1)
    return total, alias


def _chain(x: torch.Tensor, w: torch.Tensor) -> Made:
    base = x * w
    first = base[1:].sum() * 2
    base[1:].mul_(3)
    second = base.sum()
    base.zero_()
    return first, second, base, base[0]


PROGRAMS = (
    _view_of_a_base_that_is_gone, _sum_before_a_write_to_the_base, _sum_before_a_write_to_the_view, _two_views,
    _a_copy_between_two_writes, _a_transposed_view, _detached, _chain,
)  # fmt: skip


@pytest.mark.parametrize("chunk_size", [None, 1, 2])
@pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__.strip("_"))
def test_read_in_any_order(make: Callable[..., Made], chunk_size: int | None) -> None:
    x, w = torch.arange(6.0, dtype=torch.float64).view(3, 2), torch.tensor([2.0, 3.0]).double().requires_grad_()
    expected = [value.detach() for value in make(x, w)]
    for order in (1, -1):
        with chunked(chunk_size):
            values = make(koila.lazy(x), w)
            found = [koila.run(value, detach=True) for value in values[::order]][::order]
        assert [each.tolist() for each in found] == [each.tolist() for each in expected], f"order {order}"


@pytest.mark.parametrize("chunk_size", [None, 1, 2])
@pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__.strip("_"))
def test_read_after_the_backward_pass(make: Callable[..., Made], chunk_size: int | None) -> None:
    x, w = torch.arange(6.0, dtype=torch.float64).view(3, 2), torch.tensor([2.0, 3.0]).double().requires_grad_()
    expected = make(x, w)
    loss = (expected[0] * w.sum()).sum()
    (gradient,) = torch.autograd.grad(loss, w)
    with chunked(chunk_size):
        values: Any = make(koila.lazy(x), w)
        (values[0] * w.sum()).sum().backward()
        found = [koila.run(value, detach=True).tolist() for value in values]
    assert found == [each.tolist() for each in expected]
    assert torch.allclose(w.grad, gradient)  # type: ignore[arg-type]


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_a_write_with_a_gradient_through_a_view_reaches_the_base(chunk_size: int | None) -> None:
    w = torch.ones(2, dtype=torch.float64, requires_grad=True)
    with chunked(chunk_size):
        base = torch.zeros_like(koila.lazy(torch.ones(3, 2, dtype=torch.float64)))
        apart, view = base.detach(), base.view(-1)
        assert not base.requires_grad and not view.requires_grad
        base[:, 0].add_(w[0])
        assert base.requires_grad and view.requires_grad and not apart.requires_grad
        (base * 2).sum().backward()
    assert torch.equal(w.grad, torch.tensor([6.0, 0.0], dtype=torch.float64))  # type: ignore[arg-type]
