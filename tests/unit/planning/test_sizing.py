"""Chunk sizes of phases, on numbers alone."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from koila.planning.sizing import Need, all_alike, largest_fitting

SIZES = [8, 4, 2, 1]


def made(sizes: Sequence[int]) -> Any:
    """Two phases: each needs 10 bytes for a sample of a chunk, and the second what the first handed on to it."""
    first, second = sizes
    handed_on = 80 if first > second else 10 * (8 - second)
    peak = max(10 * first, 10 * second + handed_on)
    return SimpleNamespace(sizes=list(sizes)), SimpleNamespace(peak_bytes=peak)


@pytest.mark.parametrize(("allowed", "size"), [(160, 8), (80, 8), (79, None)])
def test_all_phases_have_the_largest_size_that_fits(allowed: int, size: int | None) -> None:
    found = all_alike([Need(0, 80), Need(0, 80)], allowed, SIZES, made)
    assert (found and found[0].sizes) == (size and [size, size])


def test_the_most_demanding_phase_says_where_to_begin() -> None:
    tried: list[Sequence[int]] = []

    def make(sizes: Sequence[int]) -> Any:
        tried.append(tuple(sizes))
        return made(sizes)

    all_alike([Need(0, 80), Need(60, 80)], 79, SIZES, make)
    assert tried == [(1, 1)]


def test_mixed_sizes_may_need_more_than_equal_ones() -> None:
    """Why it is tried at all."""
    assert made([8, 2])[1].peak_bytes == 100 > made([2, 2])[1].peak_bytes == 80


def test_a_kernel_with_memory_of_its_own_brings_its_phase_down_to_the_smallest_size() -> None:
    """The second phase needs 50 bytes beside its samples, however many, unless there is one only."""
    sizes = [64, 32, 16, 8, 4, 2, 1]

    def make(chosen: Sequence[int]) -> Any:
        peaks = [chosen[0], chosen[1] + (50 if chosen[1] > 1 else 0)]
        projection = SimpleNamespace(peak_bytes=max(peaks), resident=[0] * 4, peaks=[0, peaks[0], 0, peaks[1]])
        return SimpleNamespace(sizes=list(chosen), seconds=1.0, fresh_bytes=0), projection

    found = largest_fitting([Need(0, 64), Need(0, 64)], 45, sizes, make)
    assert found is not None
    assert found[0].sizes == [32, 1]  # type: ignore[attr-defined]
