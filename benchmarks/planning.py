"""Planning time against the size of the joint graph: `python -m benchmarks.planning`.

*Takes* deep MLPs and GPTs of tiny width to 10,000 nodes, GPT-2 124M, ResNet-50 and a siamese ResNet-18 with batch
normalisation, and a GRU cell unrolled 64 times. *Gives* a table: seconds to trace, to plan for half of the plain peak
with a fresh search, and to refuse a budget of nothing; trace and plan for each 1,000 nodes of the joint graph, and as a
ratio to those of the GPT of the nearest size; and the seconds of an eager step. Seconds are those of the processor, and
the least of several tries, so that neighbours disturb less.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, ResNetConfig, ResNetForImageClassification, ResNetModel

import koila
from benchmarks.programs import Block, Decoder
from koila._budget import Budget
from koila.analysis.program import program_of
from koila.errors import BudgetError
from koila.ir.cache import clear_all
from koila.ir.job import Demand, Job, Wanted
from koila.planning.cut import Cutter
from koila.planning.decide import decide
from koila.planning.in_force import forget_decisions
from koila.planning.search import Search

Step = tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]
"""The loss of a batch, and a batch."""


def mlp(layers: int) -> Step:
    model = nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(8, 8), nn.Tanh())))
    return lambda x: model(x).square().mean(), (torch.randn(64, 8),)


def gpt(layers: int) -> Step:
    model = Decoder(32, 8, 8, [Block(8, 2, True) for _ in range(layers)])
    loss = lambda x, y: F.cross_entropy(model(x).flatten(0, 1), y.flatten())  # noqa: E731
    return loss, tuple(torch.randint(0, 32, (2, 64, 8)))


def gpt2(layers: int) -> Step:
    settings: dict[str, Any] = {"n_layer": layers}
    model = GPT2LMHeadModel(GPT2Config(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, **settings))
    loss = lambda x: model(input_ids=x, labels=x, use_cache=False).loss  # noqa: E731
    return loss, (torch.randint(0, 50257, (4, 256)),)


def resnet(depth: int) -> Step:
    model = ResNetForImageClassification(ResNetConfig(depths=[3, 4, depth, 3], num_labels=10)).train()
    loss = lambda x, y: F.cross_entropy(model(pixel_values=x).logits, y)  # noqa: E731
    return loss, (torch.randn(8, 3, 128, 128), torch.randint(0, 10, (8,)))


def siamese(depth: int) -> Step:
    sizes = {"hidden_sizes": [64, 128, 256, 512], "embedding_size": 64, "layer_type": "basic"}
    model = ResNetModel(ResNetConfig(depths=[depth] * 4, **sizes)).train()

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        one, other = (F.normalize(model(pixel_values=each).pooler_output.flatten(1), dim=1) for each in (x, y))
        return F.cross_entropy(one @ other.T / 0.1, torch.arange(len(x)))

    return loss, (torch.randn(8, 3, 64, 64), torch.randn(8, 3, 64, 64))


def gru(length: int) -> Step:
    cell, head = nn.GRUCell(32, 64), nn.Linear(64, 10)

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(len(x), 64)
        for place in range(length):
            state = cell(x[:, place], state)
        return F.cross_entropy(head(state), y)

    return loss, (torch.randn(16, length, 32), torch.randint(0, 10, (16,)))


PROGRAMS: dict[str, tuple[Callable[[int], Step], tuple[int, ...]]] = {
    "gpt": (gpt, (2, 8, 30, 98)),
    "mlp": (mlp, (10, 60, 250, 900)),
    "gpt2": (gpt2, (12,)),
    "resnet": (resnet, (6,)),
    "siamese": (siamese, (2,)),
    "gru": (gru, (64,)),
}
WARM_UP = {"gpt": 1, "gpt2": 1, "resnet": 1, "siamese": 1, "gru": 2}
"""What PyTorch does once in a process is not counted."""


@dataclass(frozen=True)
class Point:
    """One program, traced and planned."""

    program: str
    size: int
    """Its layers, or the length of what is unrolled."""
    num_nodes: int
    eager_seconds: float
    trace_seconds: float
    plan_seconds: float
    refusal_seconds: float
    outcome: str
    """The chunk size, or that the budget was refused."""

    @property
    def per_thousand(self) -> float:
        """Seconds to trace and plan for each 1,000 nodes."""
        return 1000 * (self.trace_seconds + self.plan_seconds) / self.num_nodes

    @property
    def refused_per_thousand(self) -> float:
        return 1000 * (self.trace_seconds + self.refusal_seconds) / self.num_nodes

    def row(self, gpt: Point | None) -> str:
        """A line of the table; `gpt` is what it is compared with."""
        seconds = (self.eager_seconds, self.trace_seconds, self.plan_seconds, self.refusal_seconds)
        numbers = [f"{each:.2f}" for each in (*seconds, self.per_thousand, self.refused_per_thousand)]
        if gpt is None:
            ratios = ["", ""]
        else:
            ratios = [f"{each / gpt.per_thousand:.2f}" for each in (self.per_thousand, self.refused_per_thousand)]
        return f"| {self.program} | {self.size} | {self.num_nodes} | {' | '.join([*numbers, *ratios, self.outcome])} |"


def seconds_of(act: Callable[[], Any]) -> float:
    """How long something takes, in seconds of the processor; what earlier programs left behind is collected before."""
    gc.collect()
    started = time.process_time()
    act()
    return time.process_time() - started


def least(points: list[Point]) -> Point:
    """Of each measurement, the least."""
    kinds = ("eager_seconds", "trace_seconds", "plan_seconds", "refusal_seconds")
    return replace(points[0], **{kind: min(getattr(point, kind) for point in points) for kind in kinds})


def measure(name: str, size: int) -> Point:
    """Trace a program, plan it for half of what it needs without levers, and have it refused."""
    torch.manual_seed(0)
    clear_all()
    loss, batch = PROGRAMS[name][0](size)
    loss(*batch).backward()
    eager = seconds_of(lambda: loss(*batch).backward())
    graph = koila.graph(loss(*(koila.lazy(each) for each in batch)))
    demand = Demand((0,), tuple(number for number, leaf in enumerate(graph.leaves) if leaf.requires_grad))
    traced = seconds_of(lambda: program_of(graph, demand))
    program = program_of(graph, demand)

    wanted = Wanted((0,), gradients=True)
    job = Job(graph, demand, wanted, Budget(), previous="an unsplit run")
    outside = Cutter(job, program).outside_bytes(wanted)
    half = Search(program.facts(wanted), frozenset()).smallest()[1].peak_bytes // 2 + outside
    outcomes: list[str] = []

    def plan(allowed: int) -> None:
        try:
            outcomes.append(f"chunk {decide(job.within(Budget(allowed_bytes=allowed))).chunk_size}")
        except BudgetError as error:
            outcomes.append(f"refused, needs {error.needed_bytes / half:.2f} of it")

    forget_decisions()
    planned, refused = seconds_of(lambda: plan(half)), seconds_of(lambda: plan(1))
    num_nodes = len(program.joint.module.graph.nodes)
    return Point(name, size, num_nodes, eager, traced, planned, refused, outcomes[0])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.planning", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(PROGRAMS), metavar="NAME")
    parser.add_argument("--most", type=int, default=10**6, help="skip programs with more layers")
    parser.add_argument("--tries", type=int, default=3, help="how often each program is traced and planned")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    names = given.only or list(PROGRAMS)
    for name in names:
        if name in WARM_UP:
            measure(name, WARM_UP[name])
    columns = "eager s | trace s | plan s | refusal s | per 1,000 | refused per 1,000 | ÷ GPT | refused ÷ GPT | outcome"
    print(f"| program | size | nodes | {columns} |")
    print("|---" * 12 + "|")
    gpts: list[Point] = []
    for name in names:
        for size in (number for number in PROGRAMS[name][1] if number <= given.most):
            found = least([measure(name, size) for _ in range(given.tries)])
            gpts += [found] if name == "gpt" else []
            nearest = min(gpts, key=lambda each: abs(each.num_nodes - found.num_nodes), default=None)
            print(found.row(nearest), flush=True)


if __name__ == "__main__":
    main()
