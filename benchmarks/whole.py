"""What koila costs where nothing has to be cut: `./scripts/bench whole`.

*Takes* programs, the number of pairs and of threads. *Gives* a table on stdout: for each program whose training step
takes at least 50 ms eagerly, the time of a lazy step without a budget over that of an eager step, beside that of a
second eager step over the first, and the geometric means of both. The three take turns in one process, and the last two
change places from round to round; the ratio is the median over rounds. One thread is timed by its CPU time, which work
beside it disturbs least, several by the clock.
"""

from __future__ import annotations

import argparse
import math
import platform
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

import koila
from benchmarks.programs import PROGRAMS, Program, make

LEAST_SECONDS = 0.05
"""Steps that take less eagerly are the business of `./scripts/bench record`."""
WARM_UP = 3
"""The first rounds fill caches and prepare the run."""

Clock = Callable[[], float]


def step(program: Program, is_lazy: bool) -> None:
    """Forward and backward, from no gradients."""
    program.zero_grad()
    batch = koila.lazy(*program.batch) if is_lazy else program.batch
    program.step(batch if isinstance(batch, tuple) else (batch,)).backward()


def seconds(program: Program, is_lazy: bool, clock: Clock) -> float:
    started = clock()
    step(program, is_lazy)
    return clock() - started


def measure(program: Program, pairs: int, clock: Clock) -> tuple[float, float, float]:
    """Seconds of an eager step, and the ratios to it of a lazy step and of another eager one; medians over pairs."""
    found: list[tuple[float, float, float]] = []
    for number in range(pairs + WARM_UP):
        eager = seconds(program, False, clock)
        order = (True, False) if number % 2 else (False, True)
        others = {is_lazy: seconds(program, is_lazy, clock) for is_lazy in order}
        found.append((eager, others[True] / eager, others[False] / eager))
    first, lazy, second = zip(*found[WARM_UP:], strict=True)
    return median(first), median(lazy), median(second)


def is_long(program: Program, clock: Clock) -> bool:
    """Whether an eager step is long enough to be looked at here."""
    step(program, False)
    return min(seconds(program, False, clock) for _ in range(2)) >= LEAST_SECONDS


def geometric_mean(ratios: Sequence[float]) -> float:
    """
    >>> geometric_mean([0.5, 2.0])
    1.0
    """
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def table(names: Sequence[str], pairs: int, clock: Clock) -> list[tuple[float, float]]:
    """Print a row for each program as soon as it is measured; the ratios of lazy and of eager steps."""
    print("\n| program | eager step | lazy / eager | eager / eager | beyond |\n|---|---|---|---|---|")
    found: list[tuple[float, float]] = []
    for name in names:
        program = make(name)
        if program.is_training and is_long(program, clock):
            eager, lazy, second = measure(program, pairs, clock)
            found.append((lazy, second))
            print(f"| {name} | {eager * 1e3:.0f} ms | {lazy:.4f} | {second:.4f} | {lazy / second:.4f} |", flush=True)
        else:
            print(f"| {name} | less than {LEAST_SECONDS * 1e3:.0f} ms, or no training | | | |", flush=True)
    return found


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench whole", description=__doc__)
    parser.add_argument("--pairs", type=int, default=30, help="rounds of interleaved steps")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--only", nargs="*", choices=list(PROGRAMS), help="these programs instead of all")
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    clock = time.process_time if given.threads == 1 else time.perf_counter
    print(f"torch {torch.__version__}, {given.threads} threads, {platform.machine()}; {given.pairs} pairs, medians")
    found = table(given.only or list(PROGRAMS), given.pairs, clock)
    if found:
        lazy, second = (geometric_mean(ratios) for ratios in zip(*found, strict=True))
        print(f"| geometric mean of {len(found)} | | {lazy:.4f} | {second:.4f} | {lazy / second:.4f} |")
