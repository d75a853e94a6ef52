"""S3: views of views, mutation both ways, aliases, `out=`, and operators that change a shape in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import koila

pytestmark = pytest.mark.semantics("S3")
BATCH = 6
Program = Callable[[torch.Tensor, torch.Tensor], Any]
PROGRAMS: dict[str, Program] = {}
BUDGETS: list[dict[str, Any]] = [{}, {"chunk_size": 1}, {"chunk_size": 4}, {"allowed": "1MiB"}]


def program(function: Program) -> Program:
    """A program of an input [6, 6, 1, 4] and a weight [4]; it returns tensors, each of which the caller holds."""
    PROGRAMS[function.__name__] = function
    return function


def _reshaped(change: Callable[[torch.Tensor], Any]) -> Program:
    def function(x: torch.Tensor, w: torch.Tensor) -> Any:
        h = x * w
        before = h[:, 0]
        change(h)
        after = h[0]
        before.mul_(2.0)
        return h, before, after, (h * h).sum() + before.sum()

    return function


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "transpose_": lambda h: h.transpose_(0, 1),
    "transpose_ of other dims": lambda h: h.transpose_(1, 3),
    "swapdims_": lambda h: h.swapdims_(0, 3),
    "swapaxes_": lambda h: h.swapaxes_(1, 2),
    "squeeze_": lambda h: h.squeeze_(),
    "squeeze_ dim": lambda h: h.squeeze_(2),
    "unsqueeze_": lambda h: h.unsqueeze_(0),
    "unsqueeze_ last": lambda h: h.unsqueeze_(-1),
    "t_ of a view": lambda h: h[:, :, 0, 0].t_(),
    "as_strided_": lambda h: h.as_strided_((3, 4), (4, 1)),
}
PROGRAMS.update({name: _reshaped(change) for name, change in CHANGES.items()})


@program
def a_row_of_an_expanded_value(x: torch.Tensor, w: torch.Tensor) -> Any:
    rows = (x * w).expand(2, *x.shape)
    rows[0] = 0.1
    return rows - 0.1, rows.sum()


@program
def only_the_reshaped_value(x: torch.Tensor, w: torch.Tensor) -> Any:
    h = x * w
    h.transpose_(0, 1).squeeze_(2)
    return (h.cumsum(1) * 2,)


@program
def a_view_read_before_and_the_base_after(x: torch.Tensor, w: torch.Tensor) -> Any:
    h = x * w
    column = h[:, 0]
    h.transpose_(0, 1)
    return ((column.exp() * h[0]).sum(),)


@program
def written_after_it_was_reshaped(x: torch.Tensor, w: torch.Tensor) -> Any:
    h = x * w
    part = h[:, 1]
    h.transpose_(0, 1)
    h[1].mul_(5.0)
    part.add_(1.0)
    return h, part


@program
def views_of_views(x: torch.Tensor, w: torch.Tensor) -> Any:
    h = x * w
    a = h.transpose(0, 1)[1:]
    b = a.select(0, 2)[::2]
    b.mul_(3.0)
    h[0] = 1.0
    a[:, 3] = 2.0
    return h, a, b


@program
def expanded(x: torch.Tensor, w: torch.Tensor) -> Any:
    h = (x * w)[:, :1]
    wide = h.expand(-1, 5, -1, -1)
    h.add_(1.0)
    return h, wide, wide.sum()


@program
def strided_and_unfolded(x: torch.Tensor, w: torch.Tensor) -> Any:
    h = x * w
    windows = h.unfold(1, 3, 2)
    rows = torch.as_strided(h, (BATCH, 6), (24, 4))
    h.mul_(2.0)
    rows.add_(1.0)
    return h, windows, rows


@program
def parts(x: torch.Tensor, w: torch.Tensor) -> Any:
    h = x * w
    left, right = h.tensor_split(2, dim=1)
    rows = h.unbind(1)
    h.mul_(2.0)
    return left, right, rows[3], h.diagonal(dim1=0, dim2=1), h


@program
def viewed_as_another_type(x: torch.Tensor, w: torch.Tensor) -> Any:
    h = x * w
    pairs = torch.view_as_complex(h.view(BATCH, 6, 2, 2))
    h.mul_(2.0)
    return pairs, pairs.abs().sum(), h


@program
def out_of_lazy(x: torch.Tensor, w: torch.Tensor) -> Any:
    h = (x * w).detach()
    torch.mul(h, 2.0, out=h)
    out = torch.empty_like(h)
    torch.add(h, x, out=out)
    total = torch.zeros_like(h).sum(0)
    torch.sum(out, 0, out=total)
    return h, out, total


@program
def out_into_a_view(x: torch.Tensor, w: torch.Tensor) -> Any:
    h = (x * w).detach()
    torch.exp(x[:, :3], out=h[:, 3:])
    return h, h.sum()


@program
def out_of_several(x: torch.Tensor, w: torch.Tensor) -> Any:
    h = (x * w).detach().squeeze(2)
    values, places = h[..., 0] * 0, torch.zeros_like(h[..., 0], dtype=torch.int64)
    torch.max(h, 2, out=(values, places))
    return values, places


def outcome(function: Program, lazy: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, 6, 1, 4, generator=generator, dtype=torch.float64)
    w = torch.randn(4, generator=generator, dtype=torch.float64)
    found = function(koila.lazy(x) if lazy else x, w)
    return list(koila.run(found, detach=True))


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_equal_to_eager(name: str, budget: dict[str, Any]) -> None:
    expected = outcome(PROGRAMS[name], lazy=False)
    with koila.budget(**budget):
        found = outcome(PROGRAMS[name], lazy=True)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("budget", BUDGETS[:3])
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_that_are_read_one_by_one_still_share_memory(name: str, budget: dict[str, Any]) -> None:
    """A write after the run goes to all that eager's would go to."""

    def write_last(x: torch.Tensor, w: torch.Tensor) -> Any:
        found = PROGRAMS[name](x, w)
        float(found[-1].sum().real)
        with torch.no_grad():
            found[0].mul_(7.0 if found[0].is_floating_point() else 7)
        return found

    expected = outcome(write_last, lazy=False)
    with koila.budget(**budget):
        found = outcome(write_last, lazy=True)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("budget", BUDGETS[:3])
@pytest.mark.parametrize("change", ["transpose_", "squeeze_ dim", "unsqueeze_", "swapaxes_"])
def test_gradients_through_a_reshaped_value(change: str, budget: dict[str, Any]) -> None:
    def gradients(lazy: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        x = torch.randn(BATCH, 6, 1, 4, dtype=torch.float64, requires_grad=True)
        w = torch.randn(4, dtype=torch.float64, requires_grad=True)
        h = (koila.lazy(x) if lazy else x) * w
        column = h[:, 0]
        CHANGES[change](h)
        ((h * h).cumsum(0).sum() + column.exp().sum()).backward()
        assert x.grad is not None and w.grad is not None
        return [x.grad, w.grad]

    expected = gradients(lazy=False)
    with koila.budget(**budget):
        found = gradients(lazy=True)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("budget", BUDGETS[:3])
def test_memory_that_is_replaced_or_resized(budget: dict[str, Any]) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> Any:
        h, other = x * w, x + 1
        before, double = h[:, 0], h * 2
        h.set_(other)
        other.mul_(3.0)
        small = x * 5
        part = small[0]
        small.resize_(2, 3)
        grown = (x * 2)[0].clone()
        grown.resize_(grown.numel() // 2)
        return h, before, double, other, small, part, grown

    expected = outcome(function, lazy=False)
    with koila.budget(**budget):
        found = outcome(function, lazy=True)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.shape == theirs.shape
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=0)


@pytest.mark.parametrize("budget", BUDGETS[:3])
@pytest.mark.parametrize("change", ["transpose_", "squeeze_", "unsqueeze_", "as_strided_"])
def test_an_input_that_is_reshaped_is_reshaped(change: str, budget: dict[str, Any]) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> Any:
        before, view = x * w, x[:, 0]
        CHANGES[change](x)
        return before, view, x, x.sum(0)

    real = torch.randn(BATCH, 6, 1, 4, dtype=torch.float64)
    mine, theirs, w = real.clone(), real.clone(), torch.ones(4, dtype=torch.float64)
    expected = function(theirs, w)
    with koila.budget(**budget):
        found = koila.run(function(koila.lazy(mine), w))
    assert mine.shape == theirs.shape and mine.stride() == theirs.stride()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=0)


@pytest.mark.parametrize("budget", BUDGETS[:3])
def test_out_into_a_real_tensor(budget: dict[str, Any]) -> None:
    real = torch.randn(BATCH, 4, dtype=torch.float64)
    out, table = torch.zeros(BATCH, 4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    with koila.budget(**budget):
        x = koila.lazy(real)
        before = (x + out).sum()
        found = torch.mul(x, 2.0, out=out)
        scaled = x * table
        torch.sum(x, 0, out=table)
        assert found is out
        torch.testing.assert_close(out, real * 2, rtol=1e-10, atol=0)
        torch.testing.assert_close(table, real.sum(0), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(scaled.run(), real, rtol=1e-10, atol=0)
        assert before.item() == pytest.approx(real.sum().item(), rel=1e-10)
