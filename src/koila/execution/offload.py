"""Offload: values that wait in a file (on a CPU), not in memory.

*Takes* tensors. *Gives* handles, and the tensors again. The file has no name and is gone with the handle; the system
writes it out while the run goes on. For an accelerator it is pinned host memory instead (untested: no device here).
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from koila._scopes import Scopes

_directories = Scopes[str | None]("directories")


def offload_in(directory: str | None) -> AbstractContextManager[str | None]:
    """A scope in which files are made in that directory."""
    return _directories.inside(directory)


def empty_in_file(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose memory is a file."""
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if 0 not in shape else 0
    length = extent * dtype.itemsize
    with tempfile.TemporaryFile(dir=_directories.innermost) as file:
        file.truncate(max(length, 1))
        memory = mmap.mmap(file.fileno(), max(length, 1))
    flat = torch.frombuffer(memory, dtype=dtype, count=extent) if extent else torch.empty(0, dtype=dtype)
    return flat.as_strided(tuple(shape), tuple(stride))


def offload(value: torch.Tensor) -> Any:
    """Copy a value to a file."""
    if value.device.type != "cpu":
        return value.to("cpu", non_blocking=True).pin_memory(), value.device
    place = empty_in_file(value.shape, value.stride(), value.dtype)
    place.copy_(value)
    return place, value.device


def fetch(handle: Any) -> torch.Tensor:
    """A copy in memory of a value that was offloaded."""
    place, device = handle
    if device.type != "cpu":
        return place.to(device, non_blocking=True)
    return torch.empty_strided(place.shape, place.stride(), dtype=place.dtype).copy_(place)
