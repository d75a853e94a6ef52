"""Hypotheses for a recorded call: every way in which its operands might hold a batch.

*Takes* a `Recorded` call. *Gives* pairs of (types by operand, batch size) for `harness.prove`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from koila.analysis.monoids import Sum, narrow_dtype
from koila.analysis.types import Merged, Sliced, SplitType
from tests.unit.analysis.harness import Place, Recorded

Hypothesis = tuple[dict[Place, SplitType], int]


def structures(size: int) -> Iterator[tuple[int, int, int, int]]:
    """(batch, outer, inner, granule) of a dimension of that size: plain, factored and granular forms."""
    yield size, 1, 1, 1
    factors = [factor for factor in range(2, size) if size % factor == 0]
    for factor in factors[:3]:
        yield size // factor, factor, 1, 1
        yield size // factor, 1, factor, 1
    for factor in factors[:1]:
        rest = size // factor
        for second in (second for second in range(2, rest) if rest % second == 0):
            yield rest // second, factor, second, 1
            break
    if size <= 12:
        yield 2 * size, 1, 1, 2


def sliced_alone(call: Recorded, *, plain: bool = False) -> Iterator[Hypothesis]:
    """Each operand, each dimension."""
    for place, value in call.places().items():
        for dim, size in enumerate(value.shape):
            if size < 2:
                continue
            for batch, outer, inner, granule in structures(size):
                if plain and (outer, inner, granule) != (1, 1, 1):
                    continue
                yield {place: Sliced(dim, outer, inner, granule)}, batch


def sliced_together(call: Recorded) -> Iterator[Hypothesis]:
    """Pairs and all operands with dimensions of equal size: from the right, from the left, and crosswise."""
    operands = call.places()
    for place, value in operands.items():
        for dim, size in enumerate(value.shape):
            if size < 2:
                continue
            for others in _partners(operands, place, dim, size):
                yield {place: Sliced(dim), **others}, size


def _partners(
    operands: dict[Place, torch.Tensor], place: Place, dim: int, size: int
) -> Iterator[dict[Place, SplitType]]:
    everybody: dict[Place, SplitType] = {}
    ndim = operands[place].ndim
    for other, value in operands.items():
        if other == place:
            continue
        found = [d for d, s in enumerate(value.shape) if s == size]
        for d in found[:3]:
            yield {other: Sliced(d)}
        aligned = dim - ndim + value.ndim
        if aligned in found:
            everybody[other] = Sliced(aligned)
        elif dim in found:
            everybody[other] = Sliced(dim)
    if len(everybody) > 1:
        yield everybody


def merged(call: Recorded) -> Iterator[Hypothesis]:
    """Each operand as a sum of three addends, all of an argument's list, all operands, and a sum beside a slice."""
    operands = call.places()
    sums = {
        place: Merged(Sum(narrow_dtype(value.dtype))) for place, value in operands.items() if value.dtype != torch.bool
    }
    for place, kind in sums.items():
        yield {place: kind}, 3
        for other, value in operands.items():
            if other != place:
                yield from (({place: kind, other: Sliced(d)}, s) for d, s in enumerate(value.shape) if s > 1)
    for first in sums:
        alike = {place: kind for place, kind in sums.items() if place[0] == first[0]}
        if len(alike) > 1 and min(alike, key=str) == first:
            yield dict(alike), 3
        for second in sums:
            if str(first) < str(second) and first[0] != second[0]:
                yield {first: sums[first], second: sums[second]}, 3


def hypotheses(call: Recorded) -> Iterator[Hypothesis]:
    """Everything above."""
    yield from sliced_alone(call)
    yield from sliced_together(call)
    yield from merged(call)
