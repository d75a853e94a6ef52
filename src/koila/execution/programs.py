"""Programs: traced, planned and compiled once, used by every graph of the same structure.

*Takes* a graph, what to differentiate, what to compute and a chunk size. *Gives* results through cached plans.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from koila import events
from koila._budget import Budget
from koila.analysis.split import analyse
from koila.analysis.trace import Demand, Joint, trace
from koila.execution.chunked import CompiledPlan, run_chunked, stream_chunked
from koila.errors import BudgetError
from koila.execution.projection import drawn_bytes
from koila.ir.cache import Cache
from koila.ir.graph import Graph
from koila.planning.plan import make_layout, make_plan
from koila.planning.search import Search, refusal


@dataclass(frozen=True, slots=True)
class Selection:
    """Which results of a joint graph a run computes."""

    outputs: tuple[int, ...] = ()
    """Indices of the program's outputs."""
    gradients: bool = False
    effects: bool = False

    def wanted(self, joint: Joint) -> set[int]:
        """Indices of the joint graph's results."""
        found = set(self.outputs)
        first = joint.num_outputs
        if self.gradients:
            found |= set(range(first, first + len(joint.wrt)))
        if self.effects:
            first += len(joint.wrt)
            found |= set(range(first, first + len(joint.written)))
        return found


@dataclass(frozen=True)
class Results:
    """What a run computed; nothing is committed."""

    outputs: dict[int, torch.Tensor]
    gradients: list[torch.Tensor | None]
    written: dict[int, torch.Tensor]
    batch_dims: dict[int, int]
    """The batch dimension of each output that plainly carries the batch."""


class NotSplittable(Exception):
    """The program runs whole; the message says why."""


_joints: Cache[Joint] = Cache("trace_cache", 256)
_failures: Counter[Any] = Counter()
_TRIES = 3
"""How often a program is traced or planned in vain before it counts as opaque."""
_plans: Cache[CompiledPlan | str] = Cache("plan_cache", 512)
_searches: Cache[Search] = Cache("search_cache", 32)


class Program:
    """One traced program and the graph of this step."""

    def __init__(self, graph: Graph, demand: Demand) -> None:
        self.graph, self.demand = graph, demand
        self.key: tuple[Any, ...] = (graph.key, demand)
        found = self._traced()
        if not _holds(found, graph):
            # A float that could not be made a slot has changed: it is part of the key.
            self.key = (*self.key, tuple(graph.nodes[node].slots[which] for node, which, _ in found.pinned))
            found = self._traced()
        self.joint = found

    def _traced(self) -> Joint:
        if _failures[self.key] >= _TRIES:
            raise NotSplittable("it could not be traced or planned before")
        return _joints.get_or_add(self.key, self._trace)

    def _trace(self) -> Joint:
        started = time.perf_counter()
        try:
            return trace(self.graph, self.demand)
        except Exception as error:  # What cannot be traced is an opaque eager segment (Rule 3), and counted (Rule 6).
            raise self._failed("it cannot be traced", error) from error
        finally:
            events.sample("trace_seconds", time.perf_counter() - started)

    def _failed(self, what: str, error: Exception) -> NotSplittable:
        """An error may be of the moment: a program is given up after a few."""
        _failures[self.key] += 1
        text = str(error).splitlines()[0] if str(error) else ""
        return NotSplittable(f"{what}: {type(error).__name__}: {text}")

    @property
    def num_samples(self) -> int:
        return self.graph.num_samples

    def compiled(self, selection: Selection, chunk_size: int) -> CompiledPlan:
        """The plan for a selection of results."""
        key = (*self.key, selection, chunk_size)
        found = _plans.get_or_add(key, lambda: self._plan(selection, chunk_size))
        if isinstance(found, str):
            raise NotSplittable(found)
        return found

    def _plan(self, selection: Selection, chunk_size: int) -> CompiledPlan | str:
        started = time.perf_counter()
        facts = analyse(self.joint, self.graph.batches, self.num_samples, selection.wanted(self.joint))
        if not facts.is_split:
            return "nothing in it can be cut along the batch"
        try:
            compiled = CompiledPlan(make_plan(make_layout(facts), chunk_size))
        except Exception as error:  # A chunk that is illegal on fake tensors is found before anything runs (Rule 3).
            raise self._failed("its chunks are illegal", error) from error
        events.count("plans")
        events.sample("plan_seconds", time.perf_counter() - started)
        return compiled

    def fitting(self, selection: Selection, allowed_bytes: int) -> CompiledPlan:
        """The plan for a selection of results that a byte budget allows."""
        key = (*self.key, selection, "bytes", allowed_bytes)
        found = _plans.get_or_add(key, lambda: self._fit(selection, allowed_bytes))
        if isinstance(found, str):
            raise NotSplittable(found)
        return found

    def _fit(self, selection: Selection, allowed_bytes: int) -> CompiledPlan | str:
        started = time.perf_counter()
        search = _searches.get_or_add((*self.key, selection), lambda: self._search(selection))
        outside = self.outside_bytes(selection)
        try:
            plan, projection = search.run(allowed_bytes - outside)
        except BudgetError as error:
            raise refusal(error.needed_bytes + outside, allowed_bytes, error.where) from None
        except Exception as error:  # A chunk that is illegal on fake tensors is found before anything runs (Rule 3).
            raise self._failed("its chunks are illegal", error) from error
        events.count("plans")
        events.sample("plan_seconds", time.perf_counter() - started)
        compiled = CompiledPlan(plan)
        compiled.projected_bytes = projection.peak_bytes + outside
        return compiled

    def _search(self, selection: Selection) -> Search:
        return Search(analyse(self.joint, self.graph.batches, self.num_samples, selection.wanted(self.joint)))

    def outside_bytes(self, selection: Selection) -> int:
        """Bytes of a run that the plan does not see: random numbers that were drawn, seeds of a backward."""
        seeds = (self.graph.outputs[root].prepass.num_bytes for root in self.demand.roots)
        return drawn_bytes(self.graph) + (sum(seeds) if selection.gradients else 0)

    def run(self, selection: Selection, budget: Budget, seeds: tuple[torch.Tensor | None, ...] = ()) -> Results:
        """Compute a selection of results in chunks."""
        if budget.allowed_bytes is not None:
            compiled = self.fitting(selection, budget.allowed_bytes)
        else:
            compiled = self.compiled(selection, budget.chunk_size or 1)
        inputs = self._inputs(seeds)
        plan = compiled.plan
        events.emit(events.RunStart("", len(plan.facts.items), self.num_samples, plan.chunk_size, len(plan.phases)))
        started = time.perf_counter()
        values = run_chunked(compiled, self.graph, inputs)
        events.emit(events.RunEnd(time.perf_counter() - started, len(plan.chunks)))
        joint, first = self.joint, self.joint.num_outputs
        last = first + len(joint.wrt)
        outputs = {index: values[index] for index in selection.outputs}
        written = dict(zip(joint.written, values[last:], strict=True)) if selection.effects else {}
        gradients = values[first:last] if selection.gradients else []
        return Results(outputs, gradients, written, {i: d for i, d in compiled.batch_dims.items() if i in outputs})

    def stream(self, index: int, chunk_size: int) -> Iterator[torch.Tensor]:
        """The chunks of one output."""
        compiled = self.compiled(Selection((index,)), chunk_size)
        return stream_chunked(compiled, self.graph, self._inputs(()))

    def _inputs(self, seeds: tuple[torch.Tensor | None, ...]) -> list[Any]:
        found: list[Any] = []
        for each in self.joint.inputs:
            if each.kind == "leaf":
                found.append(self.graph.leaves[each.index].detach())
            else:
                found.append(
                    self.graph.nodes[each.index].draws[each.draw] if each.kind == "draw" else seeds[each.index]
                )
        return found


def forget_plans() -> None:
    """Forget every plan: the rules have changed."""
    _plans.clear()
    _searches.clear()


def _holds(joint: Joint, graph: Graph) -> bool:
    return all(graph.nodes[node].slots[which] == value for node, which, value in joint.pinned)
