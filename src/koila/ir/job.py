"""Job: one program, and everything that a decision about it depends on.

*Takes* a recorded graph, what is asked of it, and the budget as bytes or a chunk size. *Gives* a frozen `Job`. The same
job gives the same decision, whoever asks: a run, `koila.plan` or `koila.explain`.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from koila._budget import Budget
from koila.ir.graph import Graph

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Demand:
    """What is differentiated in a program, in terms of its structure."""

    roots: tuple[int, ...] = ()
    """Indices into the graph's outputs: values to differentiate. Each brings its seed as an input of the program."""
    wrt: tuple[int, ...] = ()
    """Indices of the leaves whose gradients are wanted."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which results of a program a run computes."""

    outputs: tuple[int, ...] = ()
    """Indices of the program's outputs."""
    gradients: bool = False
    """Whether the gradients that the demand names are computed."""
    effects: bool = False
    """Whether running statistics are written."""
    streamed: bool = False
    """Whether the one output is handed out chunk by chunk, and never exists whole."""

    @property
    def is_nothing(self) -> bool:
        """Whether nothing is asked for."""
        return not (self.outputs or self.gradients or self.effects)


@dataclass(frozen=True)
class Job:
    """A program with all that is known before anything is decided."""

    graph: Graph
    """The program of what is asked for; its outputs are all values that are needed afterwards."""
    demand: Demand
    """What may be differentiated."""
    wanted: Wanted
    """What must be computed."""
    budget: Budget
    """Resolved: `allowed_bytes`, or `chunk_size`, or neither, which is no limit."""
    devices: tuple[torch.device, ...] = (CPU,)
    """Where the program runs: the accelerators that its inputs are on, or the CPU. A plan counts the bytes of all of
    them together and keeps to the smallest budget of any, so that the budget holds on each."""
    everything: Graph | None = None
    """The program with all else that is pending, which is what eager would have run by now; None: nothing else is."""
    held: tuple[int, ...] = ()
    """Outputs that the user holds and nobody asked for, smallest first: results if they fit."""
    guessed: Wanted | None = None
    """What would serve a backward pass as well, where one followed the last time."""
    must_run_whole: str | None = None
    """Why the program cannot be cut, where that is known before it is traced."""
    copied_bytes: int = 0
    """Bytes of gradients and statistics that an unsplit run copies so that it can be taken back."""
    history: tuple[int, int] = (0, 0)
    """Bytes of eager code that made some of the leaves: what autograd holds for it, what its backward allocates."""
    previous: Any = None
    """The decision in force for this program, to be carried over or improved."""

    carried: Any = None
    """How plans of this structure were made at other sizes, by what they compute: they are tried first."""
    levers: frozenset[str] | None = None
    """What a search may do to meet the budget; None is all that there is."""

    smallest_chunk: int = 1
    """A search has chunks of no fewer samples."""

    @property
    def device(self) -> torch.device:
        """The device whose rules hold."""
        return self.devices[0]

    @property
    def whole_graph(self) -> Graph:
        """What an unsplit run executes."""
        return self.graph if self.everything is None else self.everything

    @cached_property
    def num_threads(self) -> int:
        """How many threads kernels may use: with others they need other workspaces."""
        return torch.get_num_threads()

    @cached_property
    def key(self) -> Hashable:
        """Equal for jobs that must get the same decision."""
        return (
            self.num_threads,
            self.graph.key,
            None if self.everything is None else self.everything.key,
            self.demand,
            self.wanted,
            self.held,
            self.guessed,
            self.must_run_whole,
            self.copied_bytes,
            self.history,
            self.budget,
            self.devices,
            self.levers,
            self.smallest_chunk,
        )

    def within(self, budget: Budget) -> Job:
        """The same job with another budget."""
        return replace(self, budget=budget)
