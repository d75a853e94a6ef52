"""The factorisation behind `view`, on random shapes: a reshaped chunk is a chunk of the reshaped value."""

from __future__ import annotations

from math import prod

import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from koila.analysis.rules.view import factored
from koila.analysis.types import Sliced, chunk_of

aten = torch.ops.aten


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], Sliced, tuple[int, ...], int]:
    """A shape, a batch somewhere in it, and another shape of as many elements."""
    outer, inner, granule = (draw(st.sampled_from([1, 1, 2, 3])) for _ in range(3))
    num_samples = granule * draw(st.integers(2, 5))
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    kind = Sliced(dim, outer, inner, granule)
    shape[dim] = kind.extent(num_samples)
    rest, into = prod(shape), []
    while rest > 1 and len(into) < 4:
        into.append(draw(st.sampled_from(divisors(rest))))
        rest //= into[-1]
    return tuple(shape), kind, (*into, rest), num_samples


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(cuts())
def test_reshaping_commutes_with_cutting(cut: tuple[tuple[int, ...], Sliced, tuple[int, ...], int]) -> None:
    shape, kind, into, num_samples = cut
    found = factored(shape, kind, into, num_samples)
    assume(found is not None)
    step = max(kind.granule, found.granule) if kind.granule % found.granule == 0 else kind.granule * found.granule
    assume(num_samples % step == 0)
    value = torch.arange(prod(shape)).view(shape)
    for start in range(0, num_samples, step):
        got = chunk_of(value, kind, start, start + step, num_samples).reshape(found.shape(into, step))
        want = chunk_of(value.view(into), found, start, start + step, num_samples)
        assert torch.equal(got, want)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(cuts())
def test_there_and_back(cut: tuple[tuple[int, ...], Sliced, tuple[int, ...], int]) -> None:
    shape, kind, into, num_samples = cut
    found = factored(shape, kind, into, num_samples)
    assume(found is not None and kind.granule == 1)
    assert factored(into, found, shape, num_samples) == kind


def test_named_cases() -> None:
    assert factored((8, 5), Sliced(0), (4, 2, 5), 8) == Sliced(0, granule=2)
    assert factored((4, 2, 5), Sliced(0, granule=2), (8, 5), 8) == Sliced(0)
    assert factored((3, 4, 5), Sliced(0), (12, 5), 3) == Sliced(0, inner=4)
    assert factored((4, 3, 5), Sliced(1), (12, 5), 3) == Sliced(0, outer=4)
    assert factored((12, 5), Sliced(0, outer=4), (4, 3, 5), 3) == Sliced(1)
    assert factored((4, 4), Sliced(0), (16,), 4) == Sliced(0, inner=4)
    assert factored((4, 4), Sliced(1), (16,), 4) == Sliced(0, outer=4)
    assert factored((3, 1), Sliced(0), (1, 3, 1), 3) == Sliced(1)
    assert factored((6, 4), Sliced(0), (4, 6), 6) is None
    assert factored((3, 0), Sliced(0), (0,), 3) is None
    assert factored((4,), Sliced(0), (1, 4), 4) == Sliced(1)
    assert factored((4,), Sliced(0), (2, 2), 4) == Sliced(0, granule=2)
