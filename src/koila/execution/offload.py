"""Offload: values that wait in a file (on a CPU) or in the host's memory (on an accelerator), not where they are used.

*Takes* tensors. *Gives* handles, and the tensors again. A file has no name; the system writes it out while the run goes
on. It serves the next value that fits into it, the next run and the next plan: new pages of a file cost eight times
as much as writing to pages that are there. The files are gone with the last plan. Copies from and to an accelerator
are those of `koila.execution.copies`.
"""

from __future__ import annotations

import mmap
import operator
import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from koila._scopes import Scopes
from koila.execution.copies import Copies, HostCopy


class Files:
    """The mapped files of all plans with values in one directory: those that nobody uses wait for the next value."""

    def __init__(self, directory: str | None = None) -> None:
        self._directory = directory
        self._free: list[tuple[int, int, mmap.mmap]] = []
        """(length, the run that used it last, memory)."""
        self._lock = threading.Lock()
        self._run = 0

    def take(self, length: int, is_first_run: bool = False) -> memoryview:
        """Memory for so many bytes, in a file; it is free again when nobody holds it any more.

        In the first run of a plan, a new file takes the place of files of the plans before it: a loop that tries plans
        does not hold the files of all of them.
        """
        with self._lock:
            fitting = [each for each in self._free if length <= each[0] <= 2 * length]
            if fitting:
                found = min(fitting, key=operator.itemgetter(0))
                self._free.remove(found)
                memory = found[2]
            else:
                if is_first_run:
                    self._drop(length)
                memory = _mapped(length, self._directory)
        view = memoryview(memory)
        # Appending needs no lock: whoever drops the last tensor may hold it.
        ended = weakref.finalize(view, self._free.append, (len(memory), self._run, memory))
        ended.atexit = False
        return view

    def _drop(self, num_bytes: int) -> None:
        """Let go of files that earlier runs used, of so many bytes in all or a little more."""
        for each in sorted(self._free, key=operator.itemgetter(1)):
            if num_bytes <= 0 or each[1] == self._run:
                break
            self._free.remove(each)
            num_bytes -= each[0]

    def end_run(self) -> None:
        """Let go of the files that neither this run nor the one before it used: two programs may take turns."""
        with self._lock:
            self._free[:] = [each for each in self._free if each[1] >= self._run - 1]
            self._run += 1


_pools: weakref.WeakValueDictionary[str | None, Files] = weakref.WeakValueDictionary()
"""By directory, the files there; plans hold them."""


def files_in(directory: str | None) -> Files:
    """The files of a directory, one pool for all plans."""
    return _pools.setdefault(directory, Files(directory))


def _mapped(length: int, directory: str | None) -> mmap.mmap:
    with tempfile.TemporaryFile(dir=directory) as file:
        file.truncate(length)
        return mmap.mmap(file.fileno(), length)


class _Offloading:
    """Where the values of one run wait."""

    def __init__(
        self, directory: str | None = None, room_bytes: int = 0, files: Files | None = None, is_first_run: bool = False
    ) -> None:
        self._directory, self._room_bytes, self._files, self._is_first_run = directory, room_bytes, files, is_first_run
        self._has_taken = False
        """Whether a value of this run waits, or waited, in one of the files."""
        self._copies: dict[torch.device, Copies] = {}

    def memory(self, length: int) -> mmap.mmap | memoryview:
        """So many bytes in a file."""
        if self._files is None:
            return _mapped(length, self._directory)
        self._has_taken = True
        return self._files.take(length, self._is_first_run)

    def copies(self, device: torch.device) -> Copies:
        if device not in self._copies:
            self._copies[device] = Copies(device, self._room_bytes)
        return self._copies[device]

    def finish(self) -> None:
        for copies in self._copies.values():
            copies.finish()
        if self._files is not None and self._has_taken:
            self._files.end_run()


_runs = Scopes[_Offloading]("offloading")
_outside = _Offloading()
"""For runs that nobody opened a scope for: copies are waited for at once."""


def _current() -> _Offloading:
    return _runs.innermost or _outside


@contextmanager
def offload_in(
    directory: str | None, room_bytes: int = 0, files: Files | None = None, is_first_run: bool = False
) -> Iterator[None]:
    """A scope in which files are made in that directory, and copies on their way hold so much of an accelerator.

    Args:
        directory: None is the system's own place for temporary files.
        room_bytes: What copies may hold.
        files: Those of earlier runs; without them, each value has a file of its own.
        is_first_run: Whether the plan runs for the first time, after others perhaps.
    """
    run = _Offloading(directory, room_bytes, files, is_first_run)
    with _runs.inside(run):
        try:
            yield
        finally:
            run.finish()


def empty_in_file(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose memory is a file."""
    if 0 in shape:
        return torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype)
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    memory = _current().memory(extent * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype, count=extent).as_strided(tuple(shape), tuple(stride))


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
