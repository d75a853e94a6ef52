"""The process's own memory: `./scripts/bench process`.

*Takes* the scripts of `benchmarks.process.scripts`. *Gives* a table. For each script: by how much eager's process grows
(VmData and resident memory, seen from outside); whether eager dies under a limit of half of that; how koila gets on
under the same limit without a budget; and with a budget of 40 % of eager's growth and no limit. Times are CPU seconds
per step, from the second step on, over eager's without a limit.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.process.scripts import SCRIPTS
from benchmarks.process.watch import Watched, watch

MIB = 2**20
LIMIT_SHARE, BUDGET_SHARE = 0.5, 0.4
MOST_TIMES = 2.0
"""Slower than this, over eager without a limit, is not good enough."""
BUDGET_SLACK, BUDGET_SLACK_BYTES = 0.1, 40 * MIB
"""By this share and these bytes a process may grow more than its budget."""
TOLERANCE = 1e-4
"""How far a loss may be from eager's: float32, and twenty steps of training."""


@dataclass(frozen=True)
class Row:
    """One way of running a script."""

    way: str
    watched: Watched
    eager: Watched
    room_bytes: int
    """What each of VmData and resident memory may grow by."""
    limit_bytes: int | None = None
    """RLIMIT_DATA, where there was one."""

    @property
    def faults(self) -> list[str]:
        """What is not as it should be."""
        found = []
        if self.watched.code:
            return [f"ended with {self.watched.code}: {self.watched.errors.strip().splitlines()[-1:]}"]
        if self.difference > TOLERANCE:
            found.append("other losses")
        if max(self.watched.growth) > self.room_bytes:
            found.append("grew by too much")
        if self.limit_bytes is not None:
            found += ["resident memory above the limit"] if self.watched.most[1] > self.limit_bytes else []
            found += ["too slow"] if self.times > MOST_TIMES else []
        return found

    @property
    def difference(self) -> float:
        """The largest relative difference of a loss from eager's."""
        pairs = zip(self.watched.losses, self.eager.losses, strict=True)
        return max(abs(mine - theirs) / abs(theirs) for mine, theirs in pairs)

    @property
    def times(self) -> float:
        """Seconds of a step over eager's, without the first one."""
        return fmean(self.watched.seconds[1:]) / fmean(self.eager.seconds[1:])

    def __str__(self) -> str:
        sizes = " | ".join(f"{size / MIB:.0f}" for size in (*self.watched.growth, self.room_bytes))
        compared = "– | –" if self.watched.code else f"{self.times:.2f} | {self.difference:.0e}"
        return f"{self.way} | {sizes} | {compared} | {'; '.join(self.faults) or 'ok'}"


def rows_of(script: str, num_steps: int) -> list[Row]:
    """A script, in every way."""
    eager = watch(script, num_steps=num_steps)
    room, budget = int(LIMIT_SHARE * eager.growth[0]), int(BUDGET_SHARE * eager.growth[0])
    limited = watch(script, lazy=True, room_bytes=room, num_steps=num_steps)
    named = watch(script, lazy=True, budget_bytes=budget, num_steps=num_steps)
    within = int(budget * (1 + BUDGET_SLACK)) + BUDGET_SLACK_BYTES
    return [
        Row("eager", eager, eager, max(eager.growth)),
        Row("eager, limit", watch(script, room_bytes=room, num_steps=2), eager, room),
        Row("koila, limit", limited, eager, room, limited.start[0] + room),
        Row("koila, budget", named, eager, within),
    ]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench process", description=__doc__)
    parser.add_argument("--only", choices=list(SCRIPTS), nargs="*", default=list(SCRIPTS))
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args(arguments)
    print("MiB of growth after the start of the first step, from outside; times over eager's, CPU seconds per step\n")
    print("| script | way | VmData | RSS | may be | time | loss off by | |\n" + "|---" * 8 + "|")
    wrong = 0
    for script in given.only:
        for row in rows_of(script, given.steps):
            print(f"| {script} | {row} |", flush=True)
            wrong += bool(row.faults) and row.way.startswith("koila")
    if wrong:
        raise SystemExit(f"{wrong} rows are not as they should be")
