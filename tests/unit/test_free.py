"""What is free: under the limits of a process of its own, and in trees of cgroups made by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.witness import HANG_SECONDS
from koila import _free
from koila._free import alive_bytes, default_bytes, free_bytes

MIB = 2**20
GIB = 2**30
NO_LIMIT = 9223372036854771712
LIMITED = """
import re, resource, sys
import torch
from koila._free import default_bytes, free_bytes

def field(name):
    return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

unlimited = free_bytes()
which, used = {"DATA": (resource.RLIMIT_DATA, "VmData"), "AS": (resource.RLIMIT_AS, "VmSize")}[sys.argv[1]]
room = 400 * 2**20
resource.setrlimit(which, (field(used) + room, resource.RLIM_INFINITY))
free = free_bytes()
assert room - 2**23 < free <= room + 2**20, free
assert free < unlimited
assert free - 64 * 2**20 - 2**20 < default_bytes() <= free - 64 * 2**20 + 2**20

held = torch.empty(100 * 2**20, dtype=torch.uint8)
assert 99 * 2**20 < free - free_bytes() < 110 * 2**20
usable = torch.empty(default_bytes(), dtype=torch.uint8)
try:
    torch.empty(free_bytes() + 2**24, dtype=torch.uint8)
except RuntimeError as error:
    assert "allocate memory" in str(error)
else:
    raise AssertionError("the limit did not hold")
del usable, held
print("done")
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="limits are not enforced here")
@pytest.mark.parametrize("which", ["DATA", "AS"])
def test_the_limits_of_a_process(which: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", LIMITED, which], capture_output=True, text=True, env=environment, timeout=HANG_SECONDS
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "done\n"


class System:
    """The files of a system, made by hand; without `MemAvailable` of 64 GiB nothing is known."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", f"MemTotal: {99 * MIB} kB\nMemAvailable:   {64 * MIB} kB\nBuffers: 1 kB\n")

    def write(self, path: str, text: object) -> None:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(f"{text}\n")

    def group(self, path: str, limit: object, usage: int, cache: int | None = 0) -> None:
        """A cgroup of version 2."""
        self.write(f"cgroup{path}/memory.max", limit)
        self.write(f"cgroup{path}/memory.current", usage)
        if cache is not None:
            self.write(f"cgroup{path}/memory.stat", f"anon 7\nfile 9\nactive_file 8\ninactive_file {cache}\nslab 5")

    def group_1(self, path: str, limit: int, usage: int, cache: int) -> None:
        """A cgroup of version 1."""
        self.write(f"cgroup/memory{path}/memory.limit_in_bytes", limit)
        self.write(f"cgroup/memory{path}/memory.usage_in_bytes", usage)
        self.write(f"cgroup/memory{path}/memory.stat", f"inactive_file 3\ntotal_inactive_file {cache}\nother 5")


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> System:
    monkeypatch.setattr(_free, "PROC", str(tmp_path / "proc"))
    monkeypatch.setattr(_free, "CGROUPS", str(tmp_path / "cgroup"))
    return System(tmp_path)


def test_available_memory(system: System) -> None:
    assert free_bytes() == 64 * GIB
    system.write("proc/self/cgroup", "0::/")
    assert free_bytes() == 64 * GIB


def test_a_cgroup(system: System) -> None:
    system.write("proc/self/cgroup", "0::/user/job")
    system.group("/user/job", 4 * GIB, 3 * GIB)
    assert free_bytes() == GIB
    system.group("/user/job", 100 * GIB, 3 * GIB)
    assert free_bytes() == 64 * GIB
    system.group("/user/job", "max", 3 * GIB)
    assert free_bytes() == 64 * GIB


def test_page_cache_is_free(system: System) -> None:
    system.write("proc/self/cgroup", "0::/job")
    system.group("/job", 4 * GIB, 3 * GIB, cache=2 * GIB)
    assert free_bytes() == 3 * GIB
    system.group("/job", 4 * GIB, 3 * GIB, cache=9 * GIB)
    assert free_bytes() == 4 * GIB
    (system.root / "cgroup/job/memory.stat").unlink()
    assert free_bytes() == GIB


def test_the_tightest_level_holds(system: System) -> None:
    system.write("proc/self/cgroup", "0::/a/b/c")
    system.group("/a/b/c", 8 * GIB, GIB)
    system.group("/a/b", "max", 2 * GIB)
    system.group("/a", 10 * GIB, 5 * GIB)
    assert free_bytes() == 5 * GIB
    system.group("/a/b/c", 3 * GIB, GIB)
    assert free_bytes() == 2 * GIB


def test_a_container_that_sees_only_its_own_group(system: System) -> None:
    for path in ("/docker/0123", "/../other", "/"):
        system.write("proc/self/cgroup", f"0::{path}")
        system.group("", 2 * GIB, GIB)
        assert free_bytes() == GIB


def test_version_1(system: System) -> None:
    system.write("proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/x/y:z\n3:cpuset:/x\n0::/")
    system.group_1("", NO_LIMIT, 50 * GIB, 0)
    system.group_1("/x", 6 * GIB, 5 * GIB, GIB)
    system.group_1("/x/y:z", NO_LIMIT, 5 * GIB, GIB)
    assert free_bytes() == 2 * GIB
    system.group_1("/x/y:z", 4 * GIB, 4 * GIB, MIB)
    assert free_bytes() == MIB


def test_a_group_that_is_over_its_limit_leaves_nothing(system: System) -> None:
    system.write("proc/self/cgroup", "0::/job")
    system.group("/job", GIB, 2 * GIB)
    assert free_bytes() == default_bytes() == 0


@pytest.mark.parametrize("text", ["", "nonsense", "0::", "::", "1:memory", "\x00"])
def test_files_that_say_nothing(system: System, text: str) -> None:
    system.write("proc/self/cgroup", text)
    system.write("cgroup/memory.max", text)
    system.write("cgroup/memory.current", text)
    system.write("proc/self/statm", text)
    assert free_bytes() == 64 * GIB
    assert alive_bytes() > 0


@pytest.mark.parametrize(
    ("pages", "expected"),
    [
        ({"SC_AVPHYS_PAGES": 10, "SC_PHYS_PAGES": 99}, 10 * _free.mmap.PAGESIZE),
        ({"SC_PHYS_PAGES": 100}, 50 * _free.mmap.PAGESIZE),
        ({"SC_AVPHYS_PAGES": -1}, _free.UNKNOWN_BYTES),
        ({}, _free.UNKNOWN_BYTES),
    ],
)
def test_without_proc(system: System, pages: dict[str, int], expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def sysconf(name: str) -> int:
        if name not in pages:
            raise ValueError("unrecognized configuration name")
        return pages[name]

    (system.root / "proc/meminfo").unlink()
    monkeypatch.setattr(os, "sysconf", sysconf)
    assert free_bytes() == expected


@pytest.mark.parametrize(
    ("free", "margin"),
    [(100 * GIB, 10 * GIB), (500 * MIB, 64 * MIB), (256 * MIB, 64 * MIB), (40 * MIB, 10 * MIB), (0, 0)],
)
def test_the_margin(system: System, free: int, margin: int) -> None:
    system.write("proc/meminfo", f"MemAvailable: {free // 1024} kB")
    assert default_bytes() == free - margin
    assert default_bytes(reserved_bytes=10 * MIB) == max(0, free - margin - 10 * MIB)


def test_what_is_alive_grows_with_what_is_held() -> None:
    before = alive_bytes()
    held = bytearray(os.urandom(1)) * (64 * MIB)
    assert 60 * MIB < alive_bytes() - before < 80 * MIB
    assert len(held) == 64 * MIB
