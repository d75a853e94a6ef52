"""Programs: traced, planned and compiled once, used by every graph of the same structure.

*Takes* a graph, what to differentiate, what to compute and a chunk size. *Gives* results through cached plans.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from koila import events
from koila._budget import Budget
from koila.analysis.split import Facts, analyse
from koila.analysis.trace import Demand, Joint, trace
from koila.errors import BudgetError
from koila.execution.behind import behind
from koila.execution.projection import drawn_bytes
from koila.execution.split_run import CompiledPlan, run_chunked, stream_chunked
from koila.ir.cache import Cache
from koila.ir.graph import Graph
from koila.planning.phases import make_layout
from koila.planning.plan import make_plan
from koila.planning.search import ALL, Search, refusal


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


@contextmanager
def _without_collection() -> Iterator[None]:
    """Graphs are many small objects that stay: looking for garbage among them takes a quarter of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


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

    @_without_collection()
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

    @_without_collection()
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

    def fitting(self, selection: Selection, allowed_bytes: int, offload: bool = False) -> CompiledPlan:
        """The plan for a selection of results that a byte budget allows."""
        key = (*self.key, selection, "bytes", allowed_bytes, offload)
        found = _plans.get_or_add(key, lambda: self._fit(selection, allowed_bytes, offload))
        if isinstance(found, str):
            raise NotSplittable(found)
        return found

    @_without_collection()
    def _fit(self, selection: Selection, allowed_bytes: int, offload: bool) -> CompiledPlan | str:
        started = time.perf_counter()
        search = _searches.get_or_add((*self.key, selection, offload), lambda: self._search(selection, offload))
        outside, after = self.outside_bytes(selection), self.after_bytes(selection)
        try:
            plan, projection = search.run(allowed_bytes - outside)
            if after > allowed_bytes:
                raise refusal(after - outside, allowed_bytes, "the backward of eager code before the program")
        except BudgetError as error:
            raise refusal(max(error.needed_bytes + outside, after), allowed_bytes, str(error.where)) from None
        except Exception as error:  # A chunk that is illegal on fake tensors is found before anything runs (Rule 3).
            raise self._failed("its chunks are illegal", error) from error
        events.count("plans")
        events.sample("plan_seconds", time.perf_counter() - started)
        compiled = CompiledPlan(plan, search.facts)
        compiled.projection, compiled.projected_bytes = projection, max(projection.peak_bytes + outside, after)
        return compiled

    def facts(self, selection: Selection) -> Facts:
        """How the program can be cut; a batch of one is not, but parts of it can be along other axes."""
        batches = self.graph.batches if self.num_samples > 1 else {}
        return analyse(self.joint, batches, self.num_samples, selection.wanted(self.joint))

    def whole_facts(self, selection: Selection) -> Facts | None:
        """The program as it is, with the kernels of eager: nothing is cut along the batch."""
        key = (*self.key, "whole norms")
        try:
            joint = _joints.get_or_add(key, lambda: trace(self.graph, self.demand, whole_norms=True))
        except Exception:  # The cut program is there anyway.
            events.count("plan::no whole trace")
            return None
        if not set(joint.pinned) <= set(self.joint.pinned):
            return None  # It holds for numbers that vary.
        return analyse(joint, {}, self.num_samples, selection.wanted(joint))

    def _search(self, selection: Selection, offload: bool) -> Search:
        levers = ALL | {"offload"} if offload else ALL
        return Search(self.facts(selection), levers, lambda: self.whole_facts(selection))

    def outside_bytes(self, selection: Selection) -> int:
        """Bytes of a run that the plan does not see: random numbers that were drawn, seeds of a backward."""
        seeds = (self.graph.outputs[root].prepass.num_bytes for root in self.demand.roots)
        # Real values that eager code made on the way.
        made = behind(self.graph.leaves).held_bytes
        objects = OBJECT_BYTES * len(self.joint.module.graph.nodes)
        # The commit can be taken back: running statistics are copied before they are written.
        copies = [self.graph.leaves[index] for index in self.joint.written] if selection.effects else []
        made += 2 * sum(leaf.numel() * leaf.element_size() for leaf in copies)
        known = drawn_bytes(self.graph) + made + objects + _corrections.get((self.key, selection), 0)
        return known + (sum(seeds) if selection.gradients else 0)

    def after_bytes(self, selection: Selection) -> int:
        """What is alive when the gradients have come to leaves that eager code made, and it differentiates on."""
        found = behind(self.graph.leaves)
        if not selection.gradients or not found.backward_bytes:
            return 0
        gradients = (self.graph.leaves[index] for index in self.joint.wrt)
        return found.held_bytes + found.backward_bytes + sum(leaf.numel() * leaf.element_size() for leaf in gradients)

    def plan(self, selection: Selection, budget: Budget) -> CompiledPlan:
        """The plan for a budget; what is only the default is not refused, but met as far as possible."""
        if budget.allowed_bytes is None:
            return self.compiled(selection, budget.chunk_size or 1)
        offload = budget.offload is not None
        try:
            return self.fitting(selection, budget.allowed_bytes, offload)
        except BudgetError as error:
            if not budget.is_default:
                raise
            events.count("budget::over what is free")
            return self.fitting(selection, error.needed_bytes, offload)

    def smaller(self, compiled: CompiledPlan, selection: Selection, budget: Budget) -> Budget | None:
        """A budget for a plan with fewer bytes than one that ran out of memory; None if there is none."""
        if compiled.projected_bytes is None:
            chunk = compiled.plan.chunk_size // 2
            return replace(budget, chunk_size=chunk) if chunk >= compiled.plan.facts.granule else None
        half = replace(budget, allowed_bytes=max(1, compiled.projected_bytes // 2), is_default=True)
        following = self.plan(selection, half).projected_bytes
        assert following is not None
        return replace(half, allowed_bytes=following) if following < compiled.projected_bytes else None

    def run(
        self, compiled: CompiledPlan, selection: Selection, seeds: tuple[torch.Tensor | None, ...] = (),
        phase_seconds: list[float] | None = None,
    ) -> Results:  # fmt: skip
        """Compute a selection of results in chunks."""
        inputs = self._inputs(seeds)
        plan = compiled.plan
        events.emit(events.RunStart("", len(plan.facts.items), self.num_samples, plan.chunk_size, len(plan.phases)))
        started = time.perf_counter()
        values = run_chunked(compiled, self.graph, inputs, phase_seconds)
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


OBJECT_BYTES = 384
"""What Python and PyTorch allocate for a tensor beside its storage, as the malloc hook sees it."""
_corrections: dict[Any, int] = {}
"""By program, the bytes by which a measured peak was above the projection."""


def correct(program: Any, num_bytes: int) -> None:
    """The next plans of a program count on that many more bytes."""
    _corrections[program] = _corrections.get(program, 0) + num_bytes
    forget_plans()


def forget_plans() -> None:
    """Forget every plan: the rules have changed."""
    _plans.clear()
    _searches.clear()


def _holds(joint: Joint, graph: Graph) -> bool:
    return all(graph.nodes[node].slots[which] == value for node, which, value in joint.pinned)
