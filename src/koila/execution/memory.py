"""When memory runs out in the middle of a run: how it shows, and giving back what can be given back."""

from __future__ import annotations

import gc

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that an allocation failed: an accelerator's own error, or the CPU allocator's."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


_SIGNS = (
    "DefaultCPUAllocator",
    "not enough memory",
    "could not create a memory",
    "could not create a primitive",
    "out of memory",
)


def give_back() -> None:
    """Free what nobody uses; on an accelerator also what its allocator has cached (untested: no device here)."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
