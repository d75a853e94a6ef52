"""Many steps of a small program leave nothing behind; `scripts/nightly record` shows the same over 10,000 steps."""

from __future__ import annotations

import gc

from benchmarks.record import cpu_seconds, resident_bytes, tiny_mlp

MIB = 2**20


def test_resident_memory_is_flat() -> None:
    lazy, *_ = tiny_mlp()
    cpu_seconds(lazy, 300)
    gc.collect()
    before = resident_bytes()
    cpu_seconds(lazy, 1200)
    gc.collect()
    assert resident_bytes() - before < 4 * MIB
