"""What stays: steps of one program, many programs and many lengths leave little memory behind.

Each loop runs in a process of its own. What the allocator keeps for itself is given back before the resident memory is
read, where it can be. `KOILA_NIGHTLY=1` runs the long forms: 1,000 steps, 400 programs, 50 lengths of larger models.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

LONG = "KOILA_NIGHTLY" in os.environ
ROOT = Path(__file__).resolve().parents[2]

PREAMBLE = """
import ctypes, gc, torch, koila
from benchmarks.sizes import PROGRAMS

torch.set_num_threads(1)

def resident():
    gc.collect()
    if hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20

def once(model, step, batch, length, **budget):
    with koila.budget(**budget):
        step(model, batch, length, True).backward()
    model.zero_grad()
"""
LENGTHS = """
model, step = PROGRAMS[{name!r}]()
for length in (22, 25, 28, 31):  # These make the formulas; they are split, too.
    once(model, step, 8, length, {budget})
before = resident()
for length in range(34, 34 + {number}):
    once(model, step, 8, length, {budget})
print(resident() - before)
"""
STEPS = """
model, step = PROGRAMS["gpt"]()
for number in range({first}):
    once(model, step, 8, 16, chunk_size=3)
before = resident()
for number in range({first}, {last}):
    once(model, step, 8, 16, chunk_size=3)
print(resident() - before)
"""
MANY = """
functions = (torch.tanh, torch.relu, torch.sigmoid, torch.sin)

def program(number):
    value = koila.lazy(torch.randn(8, 8))
    for layer in range(2 + number % 7):
        value = functions[number // 4**layer % 4](value @ torch.randn(8, 8, requires_grad=True))
    with koila.budget(chunk_size=3):
        value.square().mean().backward()

for number in range({first}):
    program(number)
before = resident()
for number in range({first}, {last}):
    program(number)
print(resident() - before)
"""


def growth(script: str) -> float:
    """By how many MiB a process grows between two points of a script."""
    text = PREAMBLE + textwrap.dedent(script)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, env=environment, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return float(done.stdout.split()[-1])


needs_proc = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")


@needs_proc
@pytest.mark.parametrize(
    ("name", "budget"),
    [
        ("gpt", "chunk_size=3"),
        *[("gpt", "allowed='550KiB'"), ("gpt2", "chunk_size=3"), ("gpt2", "allowed='1500KiB'")] * LONG,
    ],
)
def test_lengths_leave_little_behind(name: str, budget: str) -> None:
    assert growth(LENGTHS.format(name=name, budget=budget, number=50 if LONG else 25)) < 20


@needs_proc
def test_steps_leave_nothing_behind() -> None:
    first, last = (100, 1_000) if LONG else (30, 130)
    assert growth(STEPS.format(first=first, last=last)) < 5


@needs_proc
def test_programs_leave_little_behind() -> None:
    # The caches are full by then: what comes is held instead of something older.
    first, last, limit = (200, 400, 20) if LONG else (140, 180, 5)
    assert growth(MANY.format(first=first, last=last)) < limit
