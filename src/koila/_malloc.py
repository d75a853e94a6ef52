"""The C library's allocator: what it holds back of freed memory, and how to make it hold back less.

*Takes* a `with` block. *Gives* an allocator that, inside of it, takes blocks of 1 MiB and more (or of another size)
from the system, one by one, and returns them as soon as they are freed: the process is then hardly larger than what is
alive. Each such block is made of new pages, which the kernel clears: convolutions take up to twice as long.

glibc only; elsewhere, and where the user has set glibc's thresholds by the environment, nothing is changed. The setting
is one of the whole process. glibc cannot be asked what it was, and from the first change on no longer adapts it by
itself: afterwards it is what glibc adapts to in a process that has freed a large tensor, so that code that runs later
is served as before.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any

LARGE_BLOCK_BYTES = 1 << 20
"""Blocks of this size come from the system, one by one, where nothing else is said."""
LARGEST_BLOCK_BYTES = 32 << 20
"""Blocks of this size always do."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of `mallopt`."""
_RETURNED_BYTES = 128 << 10
"""So much that is free at the heap's end is returned inside of the block."""
_ORDINARY = (LARGEST_BLOCK_BYTES, 64 << 20)
"""What glibc adapts both to by itself after a block of 32 MiB was freed, which is the most."""
_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
_TUNABLES = ("glibc.malloc.mmap_threshold", "glibc.malloc.trim_threshold")

_LARGE_PAGE = 2 << 20
_HUGEPAGE = 14
"""The advice MADV_HUGEPAGE of Linux."""

_lock = Lock()
_inside = [0]
"""How many blocks of code ask for it now, in all threads."""


@contextmanager
def large_blocks_from_system(block_bytes: int = LARGE_BLOCK_BYTES) -> Iterator[None]:
    """While this holds, blocks of this size come from the system and go back to it when they are freed.

    Where several ask for it at once, the first one's size holds.
    """
    _enter(1, block_bytes)
    try:
        yield
    finally:
        _enter(-1)


def _enter(change: int, block_bytes: int = LARGE_BLOCK_BYTES) -> None:
    library = _glibc()
    if library is None:
        return
    with _lock:
        was_inside = _inside[0] > 0
        _inside[0] += change
        if was_inside != (_inside[0] > 0):
            from_system, returned = _ORDINARY if was_inside else (block_bytes, _RETURNED_BYTES)
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


def ask_for_large_pages(address: int, num_bytes: int) -> None:
    """Ask for pages of 2 MiB where they lie wholly in some memory; Linux only, and only where the system allows it.

    The kernel clears and enters a large page at once instead of 512 small ones. No memory outside the block is taken.
    """
    first, last = -(-address // _LARGE_PAGE) * _LARGE_PAGE, (address + num_bytes) // _LARGE_PAGE * _LARGE_PAGE
    advise = _advising()
    if advise is not None and last > first:
        advise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _HUGEPAGE)


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


@cache
def _advising() -> Callable[..., Any] | None:
    """`madvise` of Linux; a kernel without large pages refuses the advice, and nothing changes."""
    if not sys.platform.startswith("linux"):
        return None
    function: Callable[..., Any] | None = getattr(ctypes.CDLL(None), "madvise", None)
    return function
