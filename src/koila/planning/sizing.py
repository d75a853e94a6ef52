"""Sizing: how many samples each phase takes at a time.

*Takes* a layout, what its phases are expected to need, and a byte limit. *Gives* the plan with the largest chunks that
fit, phase by phase. Chunk sizes are nested, so that a phase with smaller chunks than an earlier one reads parts of its
pieces; where a phase has larger ones, what it reads is held whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from koila.planning.peak import Projection
from koila.planning.plan import Plan
from koila.planning.rates import heap_seconds

Found = tuple[Plan, Projection]
"""A plan and its bytes."""
_ROUNDS, _MOST_ROUNDS = 4, 7
"""So many times sizes are corrected; the second, as long as nothing fits: kernels whose own memory does not fall with
the size of a chunk bring a phase down to the smallest one step by step."""
_ROUNDS_ALIKE = 2
"""So many sizes are tried for all phases."""


def paging_seconds(found: Found) -> float:
    """The part of a plan's expected time in which the heap grows to its peak."""
    return heap_seconds(found[1].peak_bytes, found[0].fresh_bytes)


def expected_seconds(found: Found) -> float:
    """The expected time of a plan."""
    return found[0].seconds + paging_seconds(found)


def nested_sizes(num_samples: int, granule: int) -> list[int]:
    """Candidates, largest first: all samples, and powers of two times the granule.

    >>> nested_sizes(11, 1), nested_sizes(48, 6)
    ([11, 8, 4, 2, 1], [48, 24, 12, 6])
    """
    found, size = [max(num_samples, 1)], granule
    while size < num_samples:
        found.insert(1, size)
        size *= 2
    return found


@dataclass(frozen=True, slots=True)
class Need:
    """What a phase is expected to need."""

    resident_bytes: int
    """Whatever the size of its chunks."""
    transient_bytes: int
    """For the values of a chunk, if it were all of the batch."""


def all_alike(
    needs: Sequence[Need], allowed: int, sizes: Sequence[int], make: Callable[[Sequence[int]], Found]
) -> Found | None:
    """The plan with the largest chunks that fit if all phases have the same, as far as a few tries find them.

    Where phases differ in size, what one reads from larger pieces than its own is there until the last of it is read.
    """
    place = max(_guess(need, allowed, sizes) for need in needs)
    for size in sizes[place : place + _ROUNDS_ALIKE]:
        found = make([size] * len(needs))
        if found[1].peak_bytes <= allowed:
            return found
    return None


def largest_fitting(
    needs: Sequence[Need], allowed: int, sizes: Sequence[int], make: Callable[[Sequence[int]], Found]
) -> Found | None:
    """The plan with the largest chunks that fit, as far as a few corrections find them."""
    found: Found | None = None
    chosen = [_guess(need, allowed, sizes) for need in needs]
    shrunk = [False] * len(needs)
    tried = set[tuple[int, ...]]()
    for number_tried in range(_MOST_ROUNDS):
        if tuple(chosen) in tried or (found is not None and number_tried >= _ROUNDS):
            break
        tried.add(tuple(chosen))
        made = make([sizes[place] for place in chosen])
        projection = made[1]
        if projection.peak_bytes <= allowed and (found is None or expected_seconds(made) < expected_seconds(found)):
            found = made
        for number in range(len(needs)):
            there = projection.resident[2 * number + 1]
            place = _corrected(chosen[number], projection.peaks[2 * number + 1] - there, allowed - there, sizes)
            shrunk[number] = shrunk[number] or place > chosen[number]
            chosen[number] = place if place > chosen[number] or not shrunk[number] else chosen[number]
    return found


def _guess(need: Need, allowed: int, sizes: Sequence[int]) -> int:
    most = sizes[0] * (allowed - need.resident_bytes) / max(1, need.transient_bytes)
    return next((place for place, size in enumerate(sizes) if size <= most), len(sizes) - 1)


def _corrected(place: int, needed: int, room: int, sizes: Sequence[int]) -> int:
    """The place of the size with which a phase would fit into some room, if its bytes grow with the size."""
    most = sizes[place] * room / max(1, needed)
    if needed > room:
        return next((lower for lower in range(place + 1, len(sizes)) if sizes[lower] <= most), len(sizes) - 1)
    return next((higher for higher in range(place + 1) if sizes[higher] <= most), place)
