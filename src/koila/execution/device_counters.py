"""What accelerators count while a step runs.

*Takes* nothing. *Gives* the bytes by which their peaks were above what was allocated before. Their own counters are
asked, which see what kernels allocate inside; the statistics of their peaks begin anew.
"""

from __future__ import annotations

import gc

import torch

_after_collection: dict[int, int] = {}
"""By accelerator, the bytes that were allocated when garbage had been collected last."""


class DeviceCounters:
    """The counters of all accelerators, from the moment at which it is made.

    Garbage is collected first, unless nothing was allocated or freed since it was collected last: what would be freed
    in the middle of a step would hide what the step allocates.
    """

    def __init__(self) -> None:
        self._before = _allocated()
        if self._before != _after_collection:
            gc.collect()
            self._before = _allocated()
            _after_collection.update(self._before)
        for index in self._before:
            torch.accelerator.reset_peak_memory_stats(index)

    def peak_bytes(self) -> int:
        """The largest growth of any of them; 0 if nothing was allocated on any."""
        grown = (torch.accelerator.max_memory_allocated(index) - before for index, before in self._before.items())
        return max(grown, default=0)


def _allocated() -> dict[int, int]:
    """By accelerator, the bytes that are allocated now."""
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    return {index: torch.accelerator.memory_allocated(index) for index in range(count)}
