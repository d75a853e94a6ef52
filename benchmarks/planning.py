"""Planning time against the size of the joint graph: `python -m benchmarks.planning`.

*Takes* deep MLPs and GPTs of tiny width. *Gives* a table: seconds to trace, and to plan for half of the plain peak with
a fresh search, each per 1,000 nodes of the joint graph.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import koila
from benchmarks.programs import Block, Decoder
from koila._budget import Budget
from koila.analysis.program import program_of
from koila.errors import BudgetError
from koila.ir.job import Demand, Job, Wanted
from koila.planning.cut import Cutter
from koila.planning.decide import decide, forget_decisions
from koila.planning.search import Search

BATCH = 64


def mlp(layers: int) -> torch.Tensor:
    model = nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(8, 8), nn.Tanh())))
    return model(koila.lazy(torch.randn(BATCH, 8))).square().mean()


def gpt(layers: int) -> torch.Tensor:
    model = Decoder(32, 8, 8, [Block(8, 2, True) for _ in range(layers)])
    tokens, targets = koila.lazy(*torch.randint(0, 32, (2, BATCH, 8)))
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


PROGRAMS: dict[str, tuple[Callable[[int], torch.Tensor], tuple[int, ...]]] = {
    "mlp": (mlp, (10, 60, 250, 650)),
    "gpt": (gpt, (2, 8, 30, 80)),
}


@dataclass(frozen=True)
class Point:
    """One program, traced and planned."""

    program: str
    layers: int
    num_nodes: int
    trace_seconds: float
    plan_seconds: float
    outcome: str
    """The chunk size, or that the budget was refused."""

    def __str__(self) -> str:
        thousands = self.num_nodes / 1000
        trace, plan = self.trace_seconds / thousands, self.plan_seconds / thousands
        times = f"{self.trace_seconds:.2f} | {trace:.2f} | {self.plan_seconds:.2f} | {plan:.2f}"
        return f"| {self.program} | {self.layers} | {self.num_nodes} | {times} | {self.outcome} |"


def measure(name: str, layers: int) -> Point:
    """Trace a program, then plan it for half of what it needs without levers."""
    torch.manual_seed(0)
    graph = koila.graph(PROGRAMS[name][0](layers))
    wrt = tuple(number for number, leaf in enumerate(graph.leaves) if leaf.requires_grad)
    started = time.perf_counter()
    program = program_of(graph, Demand((0,), wrt))
    traced = time.perf_counter() - started

    wanted = Wanted((0,), gradients=True)
    job = Job(graph, program.demand, wanted, Budget(), previous="an unsplit run")
    cutter = Cutter(job, program)
    half = Search(program.facts(wanted), frozenset()).smallest()[1].peak_bytes // 2 + cutter.outside_bytes(wanted)
    forget_decisions()
    started = time.perf_counter()
    try:
        outcome = f"chunk {decide(job.within(Budget(allowed_bytes=half))).chunk_size}"
    except BudgetError as error:
        outcome = f"refused, needs {error.needed_bytes / half:.2f} of it"
    planned = time.perf_counter() - started
    return Point(name, layers, len(program.joint.module.graph.nodes), traced, planned, outcome)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.planning", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(PROGRAMS), metavar="NAME")
    parser.add_argument("--most", type=int, default=10**6, help="skip programs with more layers")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print("| program | layers | nodes | trace s | per 1,000 | plan s | per 1,000 | outcome |")
    print("|---|---|---|---|---|---|---|---|")
    for name in given.only or PROGRAMS:
        for layers in (number for number in PROGRAMS[name][1] if number <= given.most):
            print(measure(name, layers), flush=True)


if __name__ == "__main__":
    main()
