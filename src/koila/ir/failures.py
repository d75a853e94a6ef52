"""How it shows that memory has run out.

*Takes* an exception. *Gives* whether an allocation failed.
"""

from __future__ import annotations

import torch

from koila.errors import BudgetError


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that an allocation failed: an accelerator's own error, or the CPU allocator's."""
    if isinstance(error, BudgetError):
        return False
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
