"""measured ≤ projected ≤ allowed on the simulated accelerator, by its own counter: `./scripts/bench accelerator`.

*Takes* the programs of `benchmarks.programs`. *Gives* a table of each at 50, 25 and 10 % of eager's peak, with exact
allocations and with the blocks of a caching allocator, and how often the host waited for the device in a step. What
holds here is not thereby shown on hardware.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch

import koila
from benchmarks.programs import PROGRAMS, Program, make
from koila.ir.cache import clear_all
from tests.accelerator import sim

SHARES = (0.5, 0.25, 0.1)
MIB = 2**20
ALLOCATORS: dict[str, Callable[[], AbstractContextManager[str]]] = {
    "exact": partial(nullcontext, "sim:0"),
    "caching": sim.caching,
}
"""By name, a scope that gives the device with that allocator."""


@dataclass(frozen=True)
class Seen:
    """What a step did."""

    results: list[torch.Tensor]
    peak_bytes: int
    num_waits: int


def on_device(program: Program, device: str) -> Program:
    """The program with its model and its batch on the device; leaves of its batch stay leaves."""
    tensors = (*program.batch, *program.leaves)
    moved = {id(t): t.detach().to(device).requires_grad_(t.requires_grad) for t in tensors}
    batch = tuple(moved[id(tensor)] for tensor in program.batch)
    return replace(
        program, model=program.model.to(device), batch=batch, leaves=tuple(moved[id(t)] for t in program.leaves)
    )


def step(program: Program, allowed: int | None) -> Seen:
    """One step from the same numbers, by eager if nothing is allowed."""
    program.zero_grad()
    torch.manual_seed(1)
    gc.collect()
    index = program.batch[0].device.index
    sim.reset_peak(index)
    before, waits = sim.live(index), sim.counts()["waits"]
    batch = program.batch if allowed is None else koila.lazy(program.batch, budget=allowed)
    grad = torch.enable_grad() if program.is_training else torch.no_grad()
    with grad, torch.device(program.batch[0].device), koila.measure() as measure:
        result = program.step(batch)
        if program.is_training:
            result.backward()
        elif allowed is not None:
            result = koila.run(result)
    # What the forward pass made before the run, such as the first state of an LSTM, is not the run's.
    peak = sim.peak(index) - before if allowed is None else measure.peak_bytes
    waits = sim.counts()["waits"] - waits
    results = program.gradients() if program.is_training else [result]
    return Seen([each.detach().cpu() for each in results], peak, waits)


ZERO = 1e-4
"""Smaller gradients are measured by this share of the largest: that of a bias of keys is nothing but rounding."""


def distance(found: Seen, expected: Seen) -> float:
    """The largest relative distance of the results; those that are nothing but rounding are measured by the largest."""
    pairs = [(a.double(), b.double()) for a, b in zip(found.results, expected.results, strict=True)]
    least = ZERO * max(b.norm().item() for _, b in pairs)
    return max(((a - b).norm() / max(b.norm().item(), least)).item() for a, b in pairs)


def rows(name: str, allocator: str) -> Iterator[str]:
    """The lines of one program."""
    clear_all()
    with ALLOCATORS[allocator]() as device:
        program = on_device(make(name), device)
        eager = step(program, None)
        title = f"| {name} | {allocator}"
        yield f"{title} | eager | | | {eager.peak_bytes / MIB:.1f} | {eager.num_waits} | | |"
        for share in SHARES:
            allowed = int(share * eager.peak_bytes)
            try:
                step(program, allowed)  # The second step repeats the first: nothing is planned any more.
                found = step(program, allowed)
            except koila.BudgetError as refused:
                needed = (refused.needed_bytes or 0) / MIB
                yield f"{title} | {share:.0%} | {allowed / MIB:.1f} | | | | | refused, {needed:.1f} would do |"
                continue
            yield f"{title} | {share:.0%} | {allowed / MIB:.1f} | {_cells(found, eager)} |"
        del program
        gc.collect()
        torch.accelerator.empty_cache()


def _cells(found: Seen, eager: Seen) -> str:
    report = koila.last_report()
    projected = report.projected_bytes or 0
    kept = found.peak_bytes <= projected <= (report.allowed_bytes or 0)
    verdict = "ok" if kept and not report.retries else "VIOLATION"
    verdict += "" if found.num_waits <= eager.num_waits else ", waits more than eager"
    numbers = f"{projected / MIB:.1f} | {found.peak_bytes / MIB:.1f} | {found.num_waits}"
    return f"{numbers} | {distance(found, eager):.1e} | {verdict}"


def main(arguments: list[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="bench accelerator", description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(PROGRAMS), choices=list(PROGRAMS), help="some programs")
    parser.add_argument("--allocators", nargs="*", default=list(ALLOCATORS), choices=list(ALLOCATORS))
    given = parser.parse_args(arguments)
    print("| program | allocator | budget | allowed MiB | projected | measured | waits | from eager | |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in given.only:
        for allocator in given.allocators:
            for row in rows(name, allocator):
                print(row, flush=True)
