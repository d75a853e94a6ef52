"""Monoids on hand-made pieces: ownership, width of accumulators, ties, and numbers that are not finite."""

from __future__ import annotations

import pytest
import torch

from koila.analysis.monoids import Extreme, FirstExtreme, LogSumExp, Moments, Monoid, PowerNorm, Sum


def merged(monoid: Monoid, pieces: list, sizes: list[int]) -> object:
    state = monoid.start(pieces[0], sizes[0])
    for piece, size in zip(pieces[1:], sizes[1:], strict=True):
        state = monoid.add(state, piece, size)
    return monoid.finish(state)


@pytest.mark.parametrize(
    "view",
    [
        lambda base: base.expand(3, 4),
        lambda base: base.expand(3, 4).t(),
        lambda base: base[0],
        lambda base: base.t(),
        lambda base: base.view(-1),
    ],
)
def test_sum_does_not_write_into_a_view(view) -> None:
    base = torch.ones(1, 4)
    piece = view(base)
    total = merged(Sum(), [piece, torch.ones_like(piece), torch.ones_like(piece)], [1, 1, 1])
    assert torch.equal(total, torch.full(piece.shape, 3.0))
    assert torch.equal(base, torch.ones(1, 4))


def test_sum_owns_a_fresh_piece() -> None:
    piece = torch.ones(4)
    assert Sum().start(piece, 1) is piece


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_accumulates_in_float32(dtype: torch.dtype) -> None:
    pieces = [torch.ones(1, dtype=dtype) for _ in range(5000)]
    total = merged(Sum(dtype), pieces, [1] * 5000)
    assert total.dtype == dtype
    assert torch.equal(total, torch.tensor([5000.0]).to(dtype))


def test_moments_of_a_shifted_batch_keep_their_digits() -> None:
    values = torch.randn(9, 3, dtype=torch.float64) + 1e8
    sizes = [4, 4, 1]
    pieces = [torch.var_mean(part, 0, correction=0) for part in values.split(sizes)]
    variance, mean = merged(Moments(9, 9, correction=1), pieces, sizes)
    torch.testing.assert_close(variance, values.var(0), rtol=1e-7, atol=0)
    torch.testing.assert_close(mean, values.mean(0), rtol=1e-15, atol=0)


def test_moments_of_too_few_elements_are_not_a_number() -> None:
    piece = torch.var_mean(torch.ones(1, 3), 0, correction=0)
    assert merged(Moments(1, 1, correction=1, with_mean=False), [piece], [1]).isnan().all()


@pytest.mark.parametrize("largest", [True, False])
def test_first_extreme_takes_the_first_of_equals_and_nan_wins(largest: bool) -> None:
    values = torch.tensor([[1.0, 1, 2], [2, 1, torch.nan], [2, 1, torch.nan], [0, 1, 9]])
    operator = torch.max if largest else torch.min
    pieces = [tuple(operator(part, 0)) for part in values.split([1, 2, 1])]
    got = merged(FirstExtreme(4, 4, largest), pieces, [1, 2, 1])
    want = operator(values, 0)
    assert torch.equal(got[1], want.indices)
    assert torch.allclose(got[0], want.values, equal_nan=True)


def test_extreme_lets_nan_win() -> None:
    got = merged(Extreme(), [torch.tensor([1.0, 2]), torch.tensor([torch.nan, 1])], [1, 1])
    assert torch.allclose(got, torch.tensor([torch.nan, 2]), equal_nan=True)


def test_logsumexp_of_nothing_stays_minus_infinity() -> None:
    nothing = torch.tensor([-torch.inf])
    assert torch.equal(merged(LogSumExp(), [nothing, nothing.clone()], [1, 1]), nothing)


def test_norms_merge_without_overflow() -> None:
    got = merged(PowerNorm(2), [torch.tensor([3e300], dtype=torch.float64), torch.tensor([4e300]).double()], [1, 1])
    assert got.isinf() or torch.allclose(got, torch.tensor([5e300], dtype=torch.float64))
