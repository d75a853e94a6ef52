"""The memory of a process, as the kernel tells it from outside.

*Takes* a process. *Gives* its private writable memory (VmData: what RLIMIT_DATA limits) and its resident memory, file
pages and shared pages included.
"""

from __future__ import annotations

import re
from pathlib import Path

_FIELDS = re.compile(r"^Vm(RSS|Data):\s+(\d+) kB", re.MULTILINE)


def memory_of(process: int | str) -> tuple[int, int]:
    """(VmData, VmRSS) in bytes; zeros once the process has ended."""
    try:
        text = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0, 0
    found = {name: int(kibibytes) << 10 for name, kibibytes in _FIELDS.findall(text)}
    return found.get("Data", 0), found.get("RSS", 0)
