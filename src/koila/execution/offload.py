"""Offload: values that wait in a file (on a CPU) or in the host's memory (on an accelerator), not where they are used.

*Takes* tensors. *Gives* handles, and the tensors again. The file has no name and is gone with the handle; the system
writes it out while the run goes on. Copies from and to an accelerator are queued on the current stream, behind what
made the value and before what reads it; the host never reads what it holds, so it need not wait. (Shown on the
simulated device of the tests, with late copies; untested on hardware.)
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from koila import events
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
    """Copy a value to a file, or to the host."""
    if value.device.type != "cpu":
        return _on_host(value), value.device
    place = empty_in_file(value.shape, value.stride(), value.dtype)
    place.copy_(value)
    return place, value.device


def _on_host(value: torch.Tensor) -> torch.Tensor:
    """A copy in pinned memory, or in ordinary memory if so much cannot be pinned."""
    try:
        place = torch.empty_like(value, device="cpu", pin_memory=True)
    except RuntimeError:
        events.count("offload::not pinned")
        place = torch.empty_like(value, device="cpu")
    return place.copy_(value, non_blocking=place.is_pinned())


def fetch(handle: Any) -> torch.Tensor:
    """A copy in memory of a value that was offloaded."""
    place, device = handle
    if device.type != "cpu":
        return place.to(device, non_blocking=True)
    return torch.empty_strided(place.shape, place.stride(), dtype=place.dtype).copy_(place)


class Pieces:
    """A value of an accelerator that waits on the host, chunk by chunk."""

    def __init__(self) -> None:
        self._handles: dict[tuple[int, int], Any] = {}

    def store(self, start: int, stop: int, value: torch.Tensor) -> None:
        """Keep the chunk of these samples."""
        self._handles[start, stop] = offload(value)

    def fetch(self, start: int, stop: int) -> torch.Tensor:
        """The chunk of these samples; it can be fetched again."""
        return fetch(self._handles[start, stop])
