"""The memory of the process around a run, where a limit of the process binds.

*Takes* a decision that is about to run. *Gives* an allocator that suits it, whether it is worth another try when memory
ran out, and what a run may have where nobody named a budget.

The first run of a decision leaves things behind that stay: primitives of oneDNN, code, counters. If they lay between
the large blocks of a heap, it could never shrink again; so in a first run large blocks come from the system. Later runs
use the heap, which is faster. If memory runs out then, because the heap has holes, the decision runs like the first
time from now on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from weakref import WeakSet

import torch

from koila._free import growth_bytes, less_margin
from koila._malloc import held_back_bytes, large_blocks_from_system
from koila.ir.cache import Cache
from koila.planning.decide import Decision

HEAP_SHARE = 4 / 3
"""How much larger a heap is than what is alive in it, in most programs."""
_AS_IT_IS = nullcontext()
_in_heap: WeakSet[Decision] = WeakSet()
"""Decisions whose next run uses the heap."""
_not_in_heap: WeakSet[Decision] = WeakSet()
"""Decisions for which the heap was once too small."""


def kept_small(decision: Decision, device: torch.device) -> AbstractContextManager[None]:
    """Run a decision inside of this: where a limit binds, the process grows by little more than what is alive."""
    budget = decision.budget
    if device.type != "cpu" or (budget.allowed_bytes is None and not budget.process) or decision in _in_heap:
        return _AS_IT_IS
    if not (budget.process or budget.is_default or decision in _not_in_heap or _is_near_limit(decision)):
        _in_heap.add(decision)
        return _AS_IT_IS
    return _from_system(decision)


def _is_near_limit(decision: Decision) -> bool:
    """Whether a heap with all that a decision needs could be more than the process may grow by."""
    return decision.projection is not None and decision.projection.peak_bytes * HEAP_SHARE > growth_bytes()


@contextmanager
def _from_system(decision: Decision) -> Iterator[None]:
    with large_blocks_from_system():
        yield
    if not decision.budget.process and decision not in _not_in_heap:
        _in_heap.add(decision)


def try_without_heap(decision: Decision) -> bool:
    """Memory ran out in a run: whether the same decision may run if large blocks come from the system."""
    if decision not in _in_heap:
        return False
    _in_heap.discard(decision)
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
