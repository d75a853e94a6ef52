"""Offload: values that wait in a file (on a CPU) or in the host's memory (on an accelerator), not where they are used.

*Takes* tensors. *Gives* handles, and the tensors again. The file has no name and is gone with the handle; the system
writes it out while the run goes on. Copies from and to an accelerator are those of `koila.execution.copies`.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from koila._scopes import Scopes
from koila.execution.copies import Copies, HostCopy


class _Offloading:
    """Where the values of one run wait."""

    def __init__(self, directory: str | None = None, room_bytes: int = 0) -> None:
        self.directory, self._room_bytes = directory, room_bytes
        self._copies: dict[torch.device, Copies] = {}

    def copies(self, device: torch.device) -> Copies:
        if device not in self._copies:
            self._copies[device] = Copies(device, self._room_bytes)
        return self._copies[device]

    def finish(self) -> None:
        for copies in self._copies.values():
            copies.finish()


_runs = Scopes[_Offloading]("offloading")
_outside = _Offloading()
"""For runs that nobody opened a scope for: copies are waited for at once."""


def _current() -> _Offloading:
    return _runs.innermost or _outside


@contextmanager
def offload_in(directory: str | None, room_bytes: int = 0) -> Iterator[None]:
    """A scope in which files are made in that directory, and copies on their way hold so much of an accelerator."""
    run = _Offloading(directory, room_bytes)
    with _runs.inside(run):
        try:
            yield
        finally:
            run.finish()


def empty_in_file(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose memory is a file."""
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if 0 not in shape else 0
    length = extent * dtype.itemsize
    with tempfile.TemporaryFile(dir=_current().directory) as file:
        file.truncate(max(length, 1))
        memory = mmap.mmap(file.fileno(), max(length, 1))
    flat = torch.frombuffer(memory, dtype=dtype, count=extent) if extent else torch.empty(0, dtype=dtype)
    return flat.as_strided(tuple(shape), tuple(stride))


def offload(value: torch.Tensor) -> Any:
    """Copy a value to a file, or to the host."""
    if value.device.type != "cpu":
        return _current().copies(value.device).down(value), value.device
    place = empty_in_file(value.shape, value.stride(), value.dtype)
    place.copy_(value)
    return place, value.device


def fetch(handle: Any) -> torch.Tensor:
    """A copy in memory of a value that was offloaded."""
    place, device = handle
    if isinstance(place, HostCopy):
        return _current().copies(device).up(place)
    return torch.empty_strided(place.shape, place.stride(), dtype=place.dtype).copy_(place)


class Pieces:
    """A value of an accelerator that waits on the host, chunk by chunk."""

    def __init__(self) -> None:
        self._handles: dict[tuple[int, int], Any] = {}

    def store(self, start: int, stop: int, value: torch.Tensor) -> None:
        """Keep the chunk of these samples."""
        self._handles[start, stop] = offload(value)

    def fetch(self, start: int, stop: int) -> torch.Tensor:
        """The chunk of these samples; it can be fetched again. The chunk that follows is begun."""
        found = fetch(self._handles[start, stop])
        following = next((handle for (first, _), handle in self._handles.items() if first == stop), None)
        if following is not None:
            _current().copies(following[1]).begin_up(following[0])
        return found
