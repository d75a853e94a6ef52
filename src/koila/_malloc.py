"""The C library's allocator: what it holds back of freed memory, and how to make it hold back less.

*Takes* a `with` block. *Gives* an allocator that, inside of it, takes blocks of 1 MiB and more from the system, one by
one, and returns them as soon as they are freed: the process is then hardly larger than what is alive. Each such block
is made of new pages, which the kernel clears: convolutions take up to twice as long.

glibc only; elsewhere, and where the user has set glibc's thresholds by the environment, nothing is changed. The setting
is one of the whole process. glibc cannot be asked what it was, and from the first change on no longer adapts it by
itself: afterwards it is what glibc adapts to in a process that has freed a large tensor, so that code that runs later
is served as before.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any

LARGE_BLOCK_BYTES = 1 << 20
"""Blocks of this size come from the system, one by one."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of `mallopt`."""
_TIGHT = (LARGE_BLOCK_BYTES, 128 << 10)
"""From this size on a block comes from the system; so much that is free at the heap's end is returned."""
_ORDINARY = (32 << 20, 64 << 20)
"""What glibc adapts these to by itself after a block of 32 MiB was freed, which is the most."""
_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
_TUNABLES = ("glibc.malloc.mmap_threshold", "glibc.malloc.trim_threshold")

_lock = Lock()
_inside = [0]
"""How many blocks of code ask for it now, in all threads."""


@contextmanager
def large_blocks_from_system() -> Iterator[None]:
    """While this holds, large blocks come from the system and go back to it when they are freed."""
    _enter(1)
    try:
        yield
    finally:
        _enter(-1)


def _enter(change: int) -> None:
    library = _glibc()
    if library is None:
        return
    with _lock:
        was_inside = _inside[0] > 0
        _inside[0] += change
        if was_inside != (_inside[0] > 0):
            from_system, returned = _ORDINARY if was_inside else _TIGHT
            library.mallopt(_MMAP_THRESHOLD, from_system)
            library.mallopt(_TRIM_THRESHOLD, returned)


def held_back_bytes() -> int:
    """Freed memory that the allocator keeps for what is allocated next; 0 where it cannot be asked."""
    ask = _asking()
    return 0 if ask is None else int(ask().free_bytes)


def return_freed() -> None:
    """Return to the system what is free in the heap, as far as that can be done."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


class _Facts(ctypes.Structure):
    """What `mallinfo2` tells."""

    _fields_ = (
        ("heap_bytes", ctypes.c_size_t),
        ("num_free", ctypes.c_size_t),
        ("num_small_free", ctypes.c_size_t),
        ("num_from_system", ctypes.c_size_t),
        ("from_system_bytes", ctypes.c_size_t),
        ("unused", ctypes.c_size_t),
        ("small_free_bytes", ctypes.c_size_t),
        ("used_bytes", ctypes.c_size_t),
        ("free_bytes", ctypes.c_size_t),
        ("returnable_bytes", ctypes.c_size_t),
    )


@cache
def _glibc() -> Any:
    """The C library, if it is glibc and nobody has set its thresholds; else None."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if any(name in os.environ for name in _VARIABLES) or any(name in tunables for name in _TUNABLES):
        return None
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows has no such library.
        return None
    return library if hasattr(library, "gnu_get_libc_version") else None


@cache
def _asking() -> Callable[[], Any] | None:
    """`mallinfo2`, which glibc has since 2.33."""
    function: Any = getattr(_glibc(), "mallinfo2", None)
    if function is not None:
        function.restype = _Facts
    return function
