"""Free memory and batch sizes, under the names that koila 0.1 had for them.

*Takes* a device, or bytes by sample. *Gives* what is free, and sizes of parts. koila itself plans with more than these
(`koila.plan`, `koila.budget`); they are thin functions for programs that decide by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from koila._free import free_bytes
from koila.errors import BudgetError
from koila.interfaces import BatchedPair

__all__ = ["BatchedPair", "free_memory", "maximum_batch", "nvidia_free_memory", "split_batch", "torch_free_memory"]


def free_memory(device: str | torch.device | None = None) -> int | None:
    """What could be allocated on a device now, in bytes.

    Args:
        device: The device; the current accelerator if it is not given.

    Returns:
        Bytes; None if no device is given and there is no accelerator, as in koila 0.1.

    Raises:
        BudgetError: The device is not here.

    >>> free_memory("cpu") > 0
    True
    """
    found = torch.accelerator.current_accelerator(check_available=True) if device is None else torch.device(device)
    return None if found is None else free_bytes(found)


def torch_free_memory(device: str | torch.device | None = None) -> int:
    """What PyTorch keeps of an accelerator's memory without using it, in bytes; 0 without an accelerator."""
    found = torch.accelerator.current_accelerator(check_available=True) if device is None else torch.device(device)
    if found is None or found.type == "cpu":
        return 0
    return torch.accelerator.memory_reserved(found) - torch.accelerator.memory_allocated(found)


def nvidia_free_memory(device: str | torch.device | None = None) -> int:
    """What is free on an accelerator and PyTorch does not keep, in bytes; 0 without an accelerator."""
    free = free_memory(device)
    return 0 if free is None else free - torch_free_memory(device)


def maximum_batch(memory: BatchedPair, total_memory: int | None = None) -> int | None:
    """How many samples fit.

    Args:
        memory: Bytes for each sample and bytes for all, as `value.buffer_memory()` gives them.
        total_memory: What there is, in bytes; what is free on the accelerator if it is not given.

    Returns:
        The number of samples; None if nothing is known about the memory there is.

    Raises:
        BudgetError: Not a single sample fits.

    >>> maximum_batch(BatchedPair(batch=100, no_batch=50), 1050)
    10
    """
    total = free_memory() if total_memory is None else total_memory
    if total is None:
        return None
    found = (total - memory.no_batch) // max(1, memory.batch)
    if found < 1:
        needed = memory.batch + memory.no_batch
        raise BudgetError(
            f"one sample needs {needed} bytes, and there are {total}", needed_bytes=needed, allowed_bytes=total,
            hint="koila.lazy(x, budget=...) cuts along other dimensions, too, and computes values again",
        )  # fmt: skip
    return found


def split_batch(memory: BatchedPair, current_batch: int, total_memory: int | None = None) -> Iterator[int]:
    """Sizes of parts of a batch that fit one by one: powers of two, the largest first.

    >>> list(split_batch(BatchedPair(batch=100, no_batch=0), 13, 500))
    [4, 4, 4, 1]
    """
    most = maximum_batch(memory, total_memory)
    if most is None:
        yield current_batch
        return
    left = current_batch
    while left > 0:
        size = 1 << (min(most, left).bit_length() - 1)
        yield size
        left -= size
