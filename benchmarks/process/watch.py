"""A process watched from outside while it trains.

*Takes* how a script is to be run. *Gives* a `Watched`: its losses, its times, and the most memory that it had.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from benchmarks.process.memory import memory_of

ROOT = Path(__file__).resolve().parents[2]
EVERY_SECONDS = 0.005
_NEVER_STARTED = '{"data": 0, "resident": 0}'


@dataclass(frozen=True)
class Watched:
    """What a process did."""

    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    """CPU time of each step."""
    start: tuple[int, int]
    """(VmData, VmRSS) before the first step."""
    most: tuple[int, int]
    """The most of each at any time after that."""
    errors: str
    """What it wrote to stderr."""
    code: int

    @property
    def growth(self) -> tuple[int, int]:
        """By how much each of them grew."""
        return self.most[0] - self.start[0], self.most[1] - self.start[1]


def watch(
    script: str, *, lazy: bool = False, room_bytes: int = 0, budget_bytes: int = 0, num_steps: int = 20
) -> Watched:  # fmt: skip
    """Run a script and look at its memory every few milliseconds."""
    command = [sys.executable, "-m", "benchmarks.process.child", script, "--steps", str(num_steps)]
    command += ["--room", str(room_bytes), "--budget", str(budget_bytes), *(["--lazy"] if lazy else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        with process:
            assert process.stdout is not None
            start, most, done = json.loads(process.stdout.readline() or _NEVER_STARTED), [0, 0], threading.Event()
            looker = threading.Thread(target=_look, args=(process.pid, most, done))
            looker.start()
            steps = [json.loads(line) for line in process.stdout]
            done.set()
            looker.join()
        errors.seek(0)
        said = errors.read()
    return Watched(
        tuple(step["loss"] for step in steps), tuple(step["seconds"] for step in steps),
        (start["data"], start["resident"]), (most[0], most[1]), said, process.returncode,
    )  # fmt: skip


def _look(process: int, most: list[int], done: threading.Event) -> None:
    while not done.wait(EVERY_SECONDS):
        most[:] = map(max, most, memory_of(process))
