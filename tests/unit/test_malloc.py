"""The C library's allocator, in a process of its own: its settings are those of a whole process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from benchmarks.witness import HANG_SECONDS
from koila import _malloc

PRELUDE = """
import torch
from koila import _malloc
from koila._malloc import held_back_bytes, large_blocks_from_system, return_freed

MIB = 2**20

def from_system(mebibytes):
    before = _malloc._asking()().from_system_bytes
    held = torch.empty(mebibytes * MIB, dtype=torch.uint8)
    return _malloc._asking()().from_system_bytes - before >= mebibytes * MIB
"""
BLOCKS = """
with large_blocks_from_system():
    assert from_system(2) and from_system(20)
    with large_blocks_from_system():
        assert from_system(2)
    assert from_system(2)
assert not from_system(2) and not from_system(20) and from_system(40)
try:
    with large_blocks_from_system():
        raise KeyboardInterrupt
except KeyboardInterrupt:
    assert not from_system(2)
"""
HELD_BACK = """
with large_blocks_from_system():
    pass
blocks = [torch.empty(8 * MIB, dtype=torch.uint8) for _ in range(8)]
before = held_back_bytes()
kept = blocks.pop()
blocks.clear()
assert 56 * MIB <= held_back_bytes() - before < 57 * MIB
return_freed()
del kept
"""


@pytest.mark.skipif(_malloc._asking() is None, reason="only glibc, since 2.33, says what it does")
def test_large_blocks() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PRELUDE + BLOCKS + HELD_BACK], capture_output=True, text=True, timeout=HANG_SECONDS,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr


@pytest.fixture
def asked_anew() -> Iterator[None]:
    """What is known about the C library is found out again, and once more afterwards."""
    for known in (_malloc._glibc, _malloc._asking):
        known.cache_clear()
    yield
    for known in (_malloc._glibc, _malloc._asking):
        known.cache_clear()


@pytest.mark.usefixtures("asked_anew")
@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_MMAP_THRESHOLD_", "65536"), ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=65536")],
)
def test_thresholds_of_the_user_are_left_alone(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert _malloc._glibc() is None and _malloc.held_back_bytes() == 0
    with _malloc.large_blocks_from_system():
        assert _malloc._inside == [0]
    _malloc.return_freed()
