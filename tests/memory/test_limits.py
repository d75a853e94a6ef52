"""A process with a limit on its memory: eager dies of an allocation that fails, the same script with the one line and
no budget finishes with the numbers of an unlimited eager run.

The limit is RLIMIT_DATA, set once the program is there; no environment variable is needed. `./scripts/bench process`
does the same with six scripts, 20 steps each.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.process.run import BUDGET_SLACK, BUDGET_SLACK_BYTES, TOLERANCE
from benchmarks.process.watch import Watched, watch
from benchmarks.witness import HANG_SECONDS
from koila import _malloc

GPT = """
from tests.models import language
task = language(144, torch.float64, context=64, width=64, heads=4, vocabulary=512, dropout=0.0)
model, batch = task.model, task.batches[0]
def step(batch):
    task.loss(task.logits(batch), batch).backward()
"""
CNN = """
from tests.models import vision
task = vision(320, torch.float64, size=32, channels=16, dropout=0.0)
model, batch = task.model, task.batches[0]
def step(batch):
    task.loss(task.logits(batch), batch).backward()
"""
INFERENCE = """
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 8)).double()
batch = (torch.randn(24576, 64, dtype=torch.float64),)
def step(batch):
    with torch.no_grad():
        return model(batch[0]).square().sum(0).tolist()
"""
SCRIPT = """
import resource, sys
import torch
torch.set_num_threads(1)
{program}
room = int(sys.argv[1])
if room:
    used = int(open("/proc/self/statm").read().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + room, used + room))
{line}
results = step(batch) or [p.grad for p in model.parameters()]
buffers = [b.double() for b in model.buffers()]
torch.save([torch.as_tensor(each, dtype=torch.float64) for each in (*results, *buffers)], sys.argv[2])
"""
ONE_LINE = "import koila; batch = koila.lazy(*batch); batch = batch if isinstance(batch, tuple) else (batch,)"
PROGRAMS = {"gpt": (GPT, 256), "cnn": (CNN, 288), "inference": (INFERENCE, 256)}
"""Each with the MiB that it may have above what is there before the step; eager needs about 400."""


def start(program: str, line: str, room: int, into: Path) -> subprocess.Popen[str]:
    script = SCRIPT.format(program=program, line=line)
    command = [sys.executable, "-c", script, str(room << 20), str(into)]
    root = Path(__file__).parents[2]
    return subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mapped memory on Linux only")
@pytest.mark.parametrize("name", PROGRAMS)
def test_where_eager_dies_koila_finishes(name: str, tmp_path: Path) -> None:
    program, room = PROGRAMS[name]
    with start(program, "", room, tmp_path / "limited") as limited:
        errors = limited.communicate(timeout=HANG_SECONDS)[1]
    assert limited.returncode != 0 and "DefaultCPUAllocator: can't allocate memory" in errors, errors
    with start(program, ONE_LINE, room, tmp_path / "lazy") as lazy, start(program, "", 0, tmp_path / "eager") as eager:
        for process in (lazy, eager):
            errors = process.communicate(timeout=HANG_SECONDS)[1]
            assert process.returncode == 0, errors
    found, expected = (torch.load(tmp_path / each) for each in ("lazy", "eager"))
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine - theirs).norm() <= 1e-10 * theirs.norm()


def assert_losses(found: Watched, expected: Watched) -> None:
    assert found.code == 0, found.errors
    for mine, theirs in zip(found.losses, expected.losses, strict=True):
        assert abs(mine - theirs) <= TOLERANCE * abs(theirs)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mapped memory on Linux only")
def test_a_loop_whose_heap_would_be_too_large_finishes() -> None:
    eager = watch("clip", num_steps=3)
    assert_losses(watch("clip", lazy=True, room_bytes=eager.growth[0] // 2, num_steps=3), eager)


@pytest.mark.slow
@pytest.mark.skipif(_malloc._asking() is None, reason="glibc only")
def test_the_process_grows_by_little_more_than_its_budget() -> None:
    eager = watch("inference", num_steps=3)
    budget = eager.growth[0] // 3
    lazy = watch("inference", lazy=True, budget_bytes=budget, num_steps=3)
    assert_losses(lazy, eager)
    assert max(lazy.growth) <= budget * (1 + BUDGET_SLACK) + BUDGET_SLACK_BYTES
