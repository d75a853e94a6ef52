"""What accelerators count while a step runs.

*Takes* nothing. *Gives* the bytes by which their peaks were above what was allocated before. Their own counters are
asked, which see what kernels allocate inside; the statistics of their peaks begin anew.
"""

from __future__ import annotations

import gc

import torch


class DeviceCounters:
    """The counters of all accelerators, from the moment at which it is made.

    Garbage is collected first: what would be freed in the middle of a step would hide what the step allocates.
    """

    def __init__(self) -> None:
        self._before: dict[int, int] = {}
        if not torch.accelerator.is_available():
            return
        gc.collect()
        for index in range(torch.accelerator.device_count()):
            torch.accelerator.reset_peak_memory_stats(index)
            self._before[index] = torch.accelerator.memory_allocated(index)

    def peak_bytes(self) -> int:
        """The largest growth of any of them; 0 if nothing was allocated on any."""
        grown = (torch.accelerator.max_memory_allocated(index) - before for index, before in self._before.items())
        return max(grown, default=0)
