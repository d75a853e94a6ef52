"""What memory is free, and what is alive.

*Takes* what the system says about this process: cgroups, resource limits, available memory; for an accelerator, what
torch says about it. *Gives* bytes, asked anew at every call (about 0.1 ms).

What is free is an upper bound of what can be had. glibc does not return all that is freed: a block of up to 32 MiB may
lie on a heap that only shrinks from its end, so a large tensor can need new pages while smaller holes stay unused. Such
holes count as used here, because RLIMIT_DATA and RLIMIT_AS count them. Under RLIMIT_DATA each thread that starts later
takes its stack (8 MiB as a rule), under RLIMIT_AS also an arena (64 MiB, 128 MiB while it is set up). The margin of
`default_bytes` is for these.
"""

from __future__ import annotations

import gc
import mmap
import os
import re
import sys
from collections.abc import Iterator

import torch

from koila._malloc import return_freed
from koila.errors import BudgetError

if sys.platform != "win32":
    import resource

PROC = "/proc"
CGROUPS = "/sys/fs/cgroup"
UNKNOWN_BYTES = 1 << 32
"""What is taken to be free where nothing says so."""
LEAST_MARGIN_BYTES = 64 << 20

# Per version: the folder, the limit, the usage, and the page cache within it that is given back when memory is short.
_VERSION_1 = ("/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", b"total_inactive_file")
_VERSION_2 = ("", "memory.max", "memory.current", b"inactive_file")
_NO_LIMIT_BYTES = 1 << 60


def free_bytes(device: torch.device | None = None) -> int:
    """Memory that could be allocated now.

    Args:
        device: An accelerator (untested on hardware), or the CPU, which is the default.

    Returns:
        On the CPU the smallest of what cgroups, RLIMIT_DATA, RLIMIT_AS and the available memory leave; on an
        accelerator what is free and what torch has cached.

    Raises:
        BudgetError: The device is not here.

    >>> free_bytes() > 0
    True
    """
    if device is not None and device.type != "cpu":
        return _free_on(device)
    rooms = [*_cgroup_rooms(), *_limit_rooms(), *_available()]
    return max(0, min(rooms)) if rooms else _physical_bytes()


def alive_bytes(device: torch.device | None = None) -> int:
    """Memory that this process holds now: on the CPU its resident set, libraries included; on an accelerator its
    tensors. Nothing is alive on a device that is not here.

    >>> alive_bytes() > 0
    True
    """
    if device is not None and device.type != "cpu":
        return torch.accelerator.memory_allocated(device) if is_here(device) else 0
    mapped = _mapped_bytes()
    if mapped is not None:
        return mapped[1]
    return _peak_bytes()


def default_bytes(reserved_bytes: int = 0, device: torch.device | None = None) -> int:
    """What a run may allocate where nobody named a budget: what is free, less a margin and what is reserved.

    The margin is a tenth of what is free and at least 64 MiB, but never more than a quarter.

    Args:
        reserved_bytes: Bytes to leave alone, besides the margin.
        device: Where the run allocates; the CPU is the default.

    Returns:
        Bytes, 0 if nothing is left.
    """
    return max(0, less_margin(free_bytes(device)) - reserved_bytes)


def less_margin(free: int) -> int:
    """What is left of free bytes without the margin."""
    return free - max(free // 10, min(LEAST_MARGIN_BYTES, free // 4))


def growth_bytes() -> int:
    """By how much this process may grow: what is free, less the pages of files that are resident beyond RLIMIT_DATA's
    own count. The kernel does not hold these against that limit, but they are memory that the process takes.
    """
    free, mapped = free_bytes(), _mapped_bytes()
    if sys.platform == "win32" or mapped is None:
        return free
    limit, resident = resource.getrlimit(resource.RLIMIT_DATA)[0], mapped[1]
    return free if limit == resource.RLIM_INFINITY else max(0, min(free, limit - resident))


def held_by_process() -> tuple[int, ...]:
    """Private writable memory and resident memory of this process; nothing where the kernel does not say.

    >>> all(size > 0 for size in held_by_process())
    True
    """
    mapped = _mapped_bytes()
    return () if mapped is None else (mapped[2], mapped[1])


def result_bytes() -> int:
    """How much a split run may keep of values that nobody asked for but the user still holds."""
    return free_bytes() // 4


def give_back() -> None:
    """Free what nobody uses; on accelerators also what their allocators have cached (untested on hardware)."""
    gc.collect()
    return_freed()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


# The CPU.


def _cgroup_rooms() -> Iterator[int]:
    """What each cgroup leaves that this process is in, up to the outermost that can be seen."""
    for line in _read(f"{PROC}/self/cgroup").decode().splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if not controllers:
            yield from _rooms_upwards(path.rstrip("/"), _VERSION_2)
        elif "memory" in controllers.split(","):
            yield from _rooms_upwards(path.rstrip("/"), _VERSION_1)


def _rooms_upwards(path: str, version: tuple[str, str, str, bytes]) -> Iterator[int]:
    # In a container the path may be the host's: the levels that are not there are passed over, its own is the root.
    mount, limit_name, usage_name, cache_name = version
    while True:
        group = f"{CGROUPS}{mount}{path}"
        limit = _number(f"{group}/{limit_name}")
        if limit is not None and limit < _NO_LIMIT_BYTES:
            usage = _number(f"{group}/{usage_name}")
            if usage is not None:
                cache = _field(_read(f"{group}/memory.stat"), rb"^%s (\d+)" % cache_name) or 0
                yield limit - max(0, usage - cache)
        if not path:
            return
        path = path.rpartition("/")[0]


def _limit_rooms() -> Iterator[int]:
    """What the resource limits leave; where the kernel does not say what is mapped, it does not enforce them either."""
    if sys.platform == "win32":
        return
    data_limit, size_limit = resource.getrlimit(resource.RLIMIT_DATA)[0], resource.getrlimit(resource.RLIMIT_AS)[0]
    if data_limit == size_limit == resource.RLIM_INFINITY:
        return
    mapped = _mapped_bytes()
    if mapped is None:
        return
    size, _, data = mapped
    if data_limit != resource.RLIM_INFINITY:
        yield data_limit - data
    if size_limit != resource.RLIM_INFINITY:
        yield size_limit - size


def _mapped_bytes() -> tuple[int, int, int] | None:
    """Mapped, resident, and private writable memory (VmSize, VmRSS, VmData with the stack of the main thread)."""
    fields = _read(f"{PROC}/self/statm").split()
    if len(fields) < 6:
        return None
    return int(fields[0]) * mmap.PAGESIZE, int(fields[1]) * mmap.PAGESIZE, int(fields[5]) * mmap.PAGESIZE


def _available() -> Iterator[int]:
    kibibytes = _field(_read(f"{PROC}/meminfo"), rb"^MemAvailable:\s+(\d+) kB")
    if kibibytes is not None:
        yield kibibytes * 1024


def _physical_bytes() -> int:
    """Without /proc: the pages that are free, or half of all there are."""
    for name, parts in (("SC_AVPHYS_PAGES", 1), ("SC_PHYS_PAGES", 2)):
        try:
            num_pages = os.sysconf(name)
        except (ValueError, OSError, AttributeError):
            continue
        if num_pages > 0:
            return num_pages * mmap.PAGESIZE // parts
    return UNKNOWN_BYTES


def _peak_bytes() -> int:
    """Without /proc: the largest resident set so far, which is no less than what is alive."""
    if sys.platform == "win32":
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _read(path: str) -> bytes:
    """A small file of the kernel, empty if it is not there."""
    try:
        # Half the time of `open`, which asks for more than the bytes.
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return b""
    try:
        return os.read(file, 1 << 16)
    except OSError:
        return b""
    finally:
        os.close(file)


def _number(path: str) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _field(text: bytes, pattern: bytes) -> int | None:
    found = re.search(pattern, text, re.MULTILINE)
    return int(found[1]) if found else None


# Accelerators.


def _free_on(device: torch.device) -> int:
    if not is_here(device):
        raise BudgetError(f"{device} is not here, so what is free on it is not known", hint='total="24GiB"')
    free, _ = torch.accelerator.get_memory_info(device)
    return free + torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)


def is_here(device: torch.device) -> bool:
    """Whether this machine has such a device."""
    if device.type == "cpu":
        return True
    found = torch.accelerator.current_accelerator(check_available=True)
    return found is not None and found.type == device.type
