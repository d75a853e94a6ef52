"""A batch 64 times larger inside the same budget: `./scripts/bench scale`.

*Takes* small programs at a base batch, and at 4, 16 and 64 times it. *Gives* time per sample over that of the base
batch, and peaks by the malloc hook, in `benchmarks/results/`. The budget is eager's peak at the base batch and what the
results grow by; inputs are there before the step.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.programs import Block, Decoder, Program, language, resnet
from benchmarks.ways import Refusal, Subject, Way, step_of
from benchmarks.witness import WitnessError, call_outside

RESULTS = Path(__file__).with_name("results")
MIB = 2**20
FACTORS = (1, 4, 16, 64)


def gpt(batch: int) -> Program:
    return language(Decoder(512, 64, 64, [Block(64, 4, True) for _ in range(2)]), batch, 64, 512)


def cnn(batch: int) -> Program:
    model = resnet([1, 1], 16, lambda size: nn.GroupNorm(4, size), False)
    return Program(
        model,
        (torch.randn(batch, 3, 32, 32), torch.randint(0, 100, (batch,))),
        lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
    )


def inference(batch: int) -> Program:
    model = nn.Sequential(nn.Linear(128, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 16))

    def step(batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        with torch.no_grad():
            return model(batch[0])

    return Program(model, (torch.randn(batch, 128),), step, is_training=False)


PROGRAMS: dict[str, tuple[Callable[[int], Program], int]] = {
    "gpt": (gpt, 4),
    "cnn": (cnn, 8),
    "inference": (inference, 512),
}


@dataclass(frozen=True)
class Point:
    """A batch of a program inside its budget."""

    program: str
    factor: int
    allowed_bytes: int
    outside_bytes: int | None = None
    seconds: float | None = None
    note: str = ""


class ScaledSubject(Subject):
    """A program at a factor of its base batch."""

    def __init__(self, name: str, factor: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        maker, base = PROGRAMS[name]
        self.program = maker(base * factor)
        self.expected = self._numbers(step_of(self.program, Way("eager")))


def result_bytes(name: str, factor: int) -> int:
    """Bytes of the output of inference; a loss has none."""
    return 0 if name != "inference" else PROGRAMS[name][1] * factor * 16 * 4


def peak(name: str, factor: int, allowed: int | None) -> list[Any]:
    """The peak of a step by the hook, or the message of a refusal."""
    found = ScaledSubject(name, factor).peaks(Way("eager") if allowed is None else Way("koila", allowed))
    return [None, found.message] if isinstance(found, Refusal) else [found.outside_bytes, ""]


def seconds(name: str, budgets: dict[str, int], rounds: int) -> dict[str, float]:
    """Median seconds of a step for each factor, interleaved."""
    subjects = {factor: ScaledSubject(name, int(factor)) for factor in budgets}
    steps = {f: step_of(subject.program, Way("koila", budgets[f])) for f, subject in subjects.items()}
    taken: dict[str, list[float]] = {factor: [] for factor in budgets}
    for number in range(rounds + 1):
        for factor, step in steps.items():
            # The base batch is repeated, so that all factors are timed over about as many samples.
            repeats = max(FACTORS) // int(factor)
            subjects[factor].reset()
            started = time.perf_counter()
            for _ in range(repeats):
                step()
                subjects[factor].program.zero_grad()
            if number:
                taken[factor].append((time.perf_counter() - started) / repeats)
    return {factor: median(values) for factor, values in taken.items()}


def points(name: str, rounds: int) -> list[Point]:
    eager, _ = call_outside("benchmarks.scale:peak", name, 1, None)
    found = []
    for factor in FACTORS:
        allowed = eager + result_bytes(name, factor) - result_bytes(name, 1)
        try:
            outside, note = call_outside("benchmarks.scale:peak", name, factor, allowed)
        except WitnessError as error:
            outside, note = None, str(error).splitlines()[-1][:200]
        found.append(Point(name, factor, allowed, outside, note=note.splitlines()[0] if note else ""))
    budgets = {str(point.factor): point.allowed_bytes for point in found if point.outside_bytes is not None}
    times = call_outside("benchmarks.scale:seconds", name, budgets, rounds, hook=False) if budgets else {}
    return [Point(**{**asdict(point), "seconds": times.get(str(point.factor))}) for point in found]


def markdown(found: list[Point]) -> str:
    lines = [
        "# A larger batch inside the same budget",
        "",
        "Written by `./scripts/bench scale`. Budget: eager's peak at the base batch, and what the results grow by. "
        "Time per sample: over that of the base batch, both by koila.",
        "",
        "| program | batch × | allowed MiB | outside MiB | transient over base | time per sample | note |",
        "|---|---|---|---|---|---|---|",
    ]
    for point in found:
        base = next(other for other in found if other.program == point.program)
        grown = result_bytes(point.program, point.factor) - result_bytes(point.program, 1)
        peak = transient = ratio = ""
        if point.outside_bytes is not None and base.outside_bytes is not None:
            peak = f"{point.outside_bytes / MIB:.2f}"
            transient = f"{(point.outside_bytes - grown) / base.outside_bytes:.3f}"
        if point.seconds is not None and base.seconds is not None:
            ratio = f"{point.seconds / base.seconds / point.factor:.3f}"
        allowed = f"{point.allowed_bytes / MIB:.2f}"
        lines.append(
            f"| {point.program} | {point.factor} | {allowed} | {peak} | {transient} | {ratio} | {point.note} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench scale", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(PROGRAMS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--into", type=Path, default=RESULTS, help="the folder for the results")
    given = parser.parse_args(arguments)
    found = [point for name in given.only or PROGRAMS for point in points(name, given.rounds)]
    given.into.mkdir(parents=True, exist_ok=True)
    (given.into / "scale.json").write_text(json.dumps([asdict(point) for point in found], indent=1) + "\n")
    (given.into / "scale.md").write_text(markdown(found), encoding="utf-8")
    print(markdown(found))
