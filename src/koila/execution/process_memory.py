"""The memory of the process around a run, where a limit of the process binds.

*Takes* a decision that is about to run. *Gives* an allocator that suits it, whether it is worth another try when memory
ran out, and what a run may have where nobody named a budget.

The heap of the C library is fast, but has holes: it may be half as large again as what is alive. A run uses it where
that fits, else large blocks come from the system. So they do in the first run under a limit: it leaves things behind
that stay (primitives of oneDNN, code, counters), and if they lay between the large blocks of a heap, it could never
shrink again. How large a block must be to come from the system depends on the room that the run leaves: new pages are
slow, and the holes of smaller blocks are smaller. If memory runs out in the heap all the same, the decision runs
without it from now on, unless the heap has what the system lacks: what lies free below a block that stays cannot be
returned, it can only be used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakSet

import torch

from koila._free import growth_bytes, less_margin
from koila._malloc import (
    LARGE_BLOCK_BYTES,
    LARGEST_BLOCK_BYTES,
    held_back_bytes,
    large_blocks_from_system,
    return_freed,
)
from koila.ir.cache import Cache
from koila.planning.decide import Decision

HEAP_SHARE = 4 / 3
"""How much larger a heap is than what is alive in it, in most programs: a default budget counts on it."""
LARGEST_HEAP_SHARE = 2.5
"""How much larger it may become: blocks of 16 MiB that change places made a heap of 250 MiB around 120 that are alive
in some runs of a loop of `./scripts/bench process`."""
NUM_HOLES = 24
"""The holes that a heap of equal blocks may have: six scripts left 10 to 14 times the largest block that it took."""
SMALL_BYTES = 8 << 20
"""Runs that need less than this are not looked at: no heap grows large by them."""
_have_run: WeakSet[Decision] = WeakSet()
"""Decisions whose primitives and code are there."""
_not_in_heap: WeakSet[Decision] = WeakSet()
"""Decisions for which the heap was once too small."""


def run_kept_small(decision: Decision, device: torch.device, run: Callable[[], None]) -> None:
    """Run a decision: where a limit binds, the process grows by little more than what is alive."""
    if device.type == "cpu" and (decision.budget.process or (_is_near_limit(decision) and _has_system_room(decision))):
        with _from_system(decision):
            run()
    else:
        run()  # Nothing follows it: an interrupt after a commit would find nothing to take back.


def _is_near_limit(decision: Decision) -> bool:
    """Whether a heap with all that a decision needs could be more than the process may grow by."""
    budget = decision.budget
    projection = None if budget.allowed_bytes is None else decision.projection
    if projection is None or projection.peak_bytes < SMALL_BYTES:
        return False
    if decision in _not_in_heap or (budget.is_default and decision not in _have_run):
        return True
    return projection.peak_bytes * LARGEST_HEAP_SHARE > growth_bytes() + held_back_bytes()


def _has_system_room(decision: Decision) -> bool:
    """Whether the system has what a decision needs, or more than the heap has, once what is free was returned to it."""
    return_freed()
    assert decision.projection is not None
    system, heap = growth_bytes(), held_back_bytes()
    return system >= min(decision.projection.peak_bytes, (system + heap) / LARGEST_HEAP_SHARE)


@contextmanager
def _from_system(decision: Decision) -> Iterator[None]:
    with large_blocks_from_system(_block_bytes(decision)):
        yield
    _have_run.add(decision)


def _block_bytes(decision: Decision) -> int:
    """From which size on blocks come from the system: the holes of smaller ones must fit beside what is alive."""
    if decision.budget.process or decision.projection is None or decision in _not_in_heap:
        return LARGE_BLOCK_BYTES
    left = growth_bytes() - decision.projection.peak_bytes
    return min(max(left // NUM_HOLES, LARGE_BLOCK_BYTES), LARGEST_BLOCK_BYTES)


def try_without_heap(decision: Decision) -> bool:
    """Memory ran out in a run: whether the same decision may run if large blocks come from the system."""
    if decision not in _have_run or decision in _not_in_heap:
        return False
    _not_in_heap.add(decision)
    return True


_left: Cache[int] = Cache("left_for_live_bytes", 1)


def left_for_live_bytes(reserved_bytes: int) -> int:
    """Of what the process may still grow by, the part that may be alive at a time; holes in the heap take the rest.

    What the heap holds back from an earlier run serves the next one, so it is free. The margin is for what is yet to
    come: an amount that was found before stays while it fits without a margin, unless a much larger one fits with it.
    """
    room = max(0, growth_bytes() + held_back_bytes() - reserved_bytes)
    found, earlier = int(less_margin(room) / HEAP_SHARE), _left.get(reserved_bytes)
    if earlier is not None and earlier * HEAP_SHARE <= room and found < earlier * 1.25:
        return earlier
    _left.add(reserved_bytes, found)
    return found
