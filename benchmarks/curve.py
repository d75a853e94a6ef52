"""Time over a falling budget: `./scripts/bench curve`.

*Takes* the programs of `benchmarks.programs`. *Gives*, for each of them, the time of a step at twelve budgets from
eager's peak down to the smallest, and beside it the time of the same search if all that it may do is compute again:
the batch is then not cut. Times are ratios to eager's step, interleaved with it in one process; by default the CPU time
of the process, which work beside it disturbs least. With `--tuned`, a loop has tried its plans before it is timed.
Below a quarter, values of networks that normalise across samples may go into files: it cannot be done fast without.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from torch.nn.modules.batchnorm import _BatchNorm

import koila
from benchmarks.memory import MIB, RESULTS, machine, progress
from benchmarks.programs import PROGRAMS
from benchmarks.ways import OFFLOAD, Subject, Way, live, step_of, trying
from benchmarks.witness import WitnessError, call_outside
from koila.ir.cache import clear_all
from koila.planning import cut
from koila.planning.in_force import forget_decisions
from koila.planning.search import ALL, RECOMPUTING
from koila.planning.tracker import StorageTracker

NUM_BUDGETS = 12
SLOWER, STEP, SMALLEST, BY_HAND = 1.05, 1.5, 2.5, 1.1
"""A larger budget takes at most this many times as long as a smaller one; a smaller one, than the next larger one, down
to a quarter; any, than eager, or than micro-batches of one where these are slow by themselves."""
QUARTER = 0.25


@dataclass(frozen=True)
class Point:
    """A program at a budget."""

    program: str
    share: float
    """Of eager's peak."""
    allowed_bytes: int
    ratio: float | None
    """None: refused."""
    recomputing: float | None
    """If all that is done is to compute again."""
    files: bool
    """Whether values may go into files."""
    by_hand: float | None = None
    """The time of micro-batches of one, where no plan at the smallest budget is fast."""


@contextmanager
def _levers(chosen: frozenset[str]) -> Iterator[None]:
    """Searches have these levers only."""
    clear_all()
    cut.ALL = chosen
    try:
        yield
    finally:
        cut.ALL = ALL
        clear_all()


def _smallest(subject: Subject) -> int:
    """The least budget that is accepted for a whole step."""
    allowed = 1
    while True:
        try:
            subject.reset()
            step_of(subject.program, Way("koila", allowed))()
            return allowed
        except koila.BudgetError as error:
            assert error.needed_bytes > allowed
            allowed = error.needed_bytes


def _peak(subject: Subject) -> int:
    step = step_of(subject.program, Way("eager"))
    step()
    subject.reset()
    with StorageTracker() as tracker:
        kept = step()
    del kept
    return tracker.peak_bytes


def _is_normalised(subject: Subject) -> bool:
    """Whether a program has layers that normalise across samples."""
    return any(isinstance(module, _BatchNorm) for module in subject.program.model.modules())


def _ratios(subject: Subject, ways: list[Way], rounds: int, clock: Callable[[], float]) -> list[float | None]:
    """The time of a step by each way, over that of eager's steps before and after it."""
    eager, found = step_of(subject.program, Way("eager")), list[float | None]()
    for way in ways:
        step = step_of(subject.program, way)
        try:
            live(lambda: subject.seconds(step, clock))  # noqa: B023
        except koila.BudgetError:
            found.append(None)
            continue
        pairs = ((subject.seconds(step, clock), subject.seconds(eager, clock)) for _ in range(rounds))
        found.append(median(own / theirs for own, theirs in pairs))
    return found


def measure(name: str, rounds: int, num_threads: int, by_cpu: bool, tuned: bool) -> list[list[Any]]:
    """The fields of a `Point` for each budget; runs in a subprocess."""
    clock = time.process_time if by_cpu else time.perf_counter
    subject = Subject(name, num_threads)
    most, least = _peak(subject), _smallest(subject)
    forget_decisions()  # Nobody makes the steps in which plans for the smallest budget would be tried.
    budgets = [round(most * (least / most) ** (step / (NUM_BUDGETS - 1))) for step in range(NUM_BUDGETS)]
    budgets[-1] = least
    files = [_is_normalised(subject) and allowed < QUARTER * most for allowed in budgets]
    ways = [Way(OFFLOAD if file else "koila", allowed) for allowed, file in zip(budgets, files, strict=True)]
    with trying(tuned):
        found = _ratios(subject, ways, rounds, clock)
    with trying(False), _levers(RECOMPUTING):
        alone = _ratios(subject, [Way("koila", allowed) for allowed in budgets], rounds, clock)
    rows = [[allowed / most, allowed, *rest] for allowed, *rest in zip(budgets, found, alone, files, strict=True)]
    if (found[-1] or 0) > SMALLEST and subject.program.weight is not None:
        rows[-1] += _ratios(subject, [Way("micro-batch", 1)], rounds, clock)
    return rows


def steps(points: list[Point]) -> list[str]:
    """Where the curve of one program is not smooth, ends too high, or lies above that of recomputation."""
    found, name = list[str](), points[0].program
    known = [(point, point.ratio) for point in points if point.ratio is not None]
    for number, (point, ratio) in enumerate(known):
        least = min((other for later, other in known[number + 1 :] if later.files == point.files), default=ratio)
        if ratio > SLOWER * least:
            found.append(f"{name}: {point.share:.0%} takes {ratio:.2f}, a smaller budget {least:.2f}")
        if point.recomputing is not None and ratio > SLOWER * point.recomputing:
            found.append(f"{name}: {point.share:.0%} takes {ratio:.2f}, recomputation alone {point.recomputing:.2f}")
    for (_, before), (point, ratio) in pairwise(known):
        if ratio > STEP * before and point.share >= QUARTER:
            found.append(f"{name}: from {before:.2f} to {ratio:.2f} at {point.share:.0%}")
    for point, ratio in known:
        if ratio > max(SMALLEST, BY_HAND * (point.by_hand or 0)):
            by_hand = "" if point.by_hand is None else f"; micro-batches of one take {point.by_hand:.2f}"
            found.append(f"{name}: {ratio:.2f} at {point.share:.0%}{by_hand}")
    return found


def markdown(points: list[Point], failed: list[str], num_threads: int, by_cpu: bool) -> str:
    """A table for each program, and what is not as it should be."""
    clock = "CPU time" if by_cpu else "time"
    lines = [
        "# Time over a falling budget",
        "",
        f"Written by `./scripts/bench curve`; {machine(num_threads)}. Budgets from eager's peak (by the storage "
        f"tracker) down to the smallest; {clock} as a ratio to eager's step, interleaved; beside it, the same search "
        "if all that it may do is compute again.",
    ]
    names = list(dict.fromkeys(point.program for point in points))
    for name in names:
        own = [point for point in points if point.program == name]
        lines += ["", f"## {name}", "", "| budget | MiB | time | recomputation alone |", "|---|---|---|---|"]
        for point in own:
            ratio, alone = ("refused" if x is None else f"{x:.2f}" for x in (point.ratio, point.recomputing))
            files = ", with files" if point.files else ""
            lines.append(f"| {point.share:.0%} | {point.allowed_bytes / MIB:.1f} | {ratio}{files} | {alone} |")
    found = [line for name in names for line in steps([point for point in points if point.program == name])]
    for title, rows in (("Steps", found), ("Failures", failed)):
        lines += ["", f"## {title}", "", *([f"- {row}" for row in rows] or ["none"])]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench curve", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(PROGRAMS), help="these programs only", metavar="NAME")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved steps at each budget")
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch")
    parser.add_argument("--tuned", action="store_true", help="time loops that have tried their plans")
    parser.add_argument("--wall", action="store_true", help="time by the clock; the default with several threads")
    parser.add_argument("--into", type=Path, default=RESULTS, help="the folder for the results")
    given = parser.parse_args(arguments)
    by_cpu = given.threads == 1 and not given.wall
    given.into.mkdir(parents=True, exist_ok=True)
    path, points, failed = given.into / "curve.json", list[Point](), list[str]()
    for name in progress(given.only or list(PROGRAMS)):
        try:
            way = (given.rounds, given.threads, by_cpu, given.tuned)
            rows = call_outside("benchmarks.curve:measure", name, *way, hook=False)
        except WitnessError as error:
            failed.append(f"{name}: {' '.join(str(error).split())[-300:]}")
            continue
        points += [Point(name, *row) for row in rows]
        path.write_text(json.dumps([vars(point) for point in points], indent=1) + "\n", encoding="utf-8")
        text = markdown(points, failed, given.threads, by_cpu)
        (given.into / "curve.md").write_text(text, encoding="utf-8")
    print(markdown(points, failed, given.threads, by_cpu))
