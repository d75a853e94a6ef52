"""Programs: a recorded graph is traced once, and every later graph of the same structure uses that trace.

*Takes* a `Graph` and a `Demand`. *Gives* a `Program`: its joint graph, and the `Facts` for any selection of results.
What cannot be traced is remembered too, with the reason (Rule 3).
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from koila import events
from koila.analysis.family import Family, Sample
from koila.analysis.resized_facts import known_facts, note_facts
from koila.analysis.split import Facts, Origin, analyse
from koila.analysis.trace import Joint, trace
from koila.ir.cache import Cache
from koila.ir.formulas import NoFormula
from koila.ir.graph import Graph
from koila.ir.job import Demand, Wanted
from koila.ir.numbers import num_input_numbers, numbers_of, structure_of
from koila.ir.samples import after_failure, with_sample


class NotSplittable(Exception):
    """The program runs whole; the message says why."""

    def __init__(self, reason: str, is_final: bool = True) -> None:
        super().__init__(reason)
        self.is_final = is_final
        """Whether that is so for good: an error while tracing or planning may be of the moment."""


MAX_NODES = 2_000
"""Joint graphs are kept as long as they have fewer nodes in all; a node takes about two KiB."""
ALWAYS = 4
"""So many are kept in any case: the programs of a loop, with its evaluation and its short last batches."""


def _num_nodes(found: Joint | str) -> int:
    return 1 if isinstance(found, str) else len(found.module.graph.nodes)


_joints: Cache[Joint | str] = Cache("trace_cache", MAX_NODES, _num_nodes, ALWAYS)
"""By program its joint graph, or why it has none."""
_tries: Cache[int] = Cache("trace_tries", 256)
"""How often a program could not be traced."""
_TRIES = 3
_tracing = threading.RLock()
"""PyTorch notes in one place for all threads that a trace goes on."""


@contextmanager
def without_collection() -> Iterator[None]:
    """Graphs are many small objects that stay: looking for garbage among them takes a quarter of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True, eq=False)
class Program:
    """A traced program: the same for every graph of its structure."""

    graph: Graph
    """A recorded graph of this structure: the one of this step."""
    demand: Demand
    key: tuple[Any, ...]
    """Equal for programs that share their trace."""
    joint: Joint
    """Forward and backward as one graph."""

    @property
    def num_samples(self) -> int:
        """The batch size; a program without a batch is one sample."""
        return max(1, self.graph.num_samples)

    def facts(self, wanted: Wanted) -> Facts:
        """How the program can be cut; a batch of one is not, but parts of it can be along other axes."""
        return self._facts(self.joint, self.graph.batches if self.num_samples > 1 else {}, wanted, "cut")

    def uncut_facts(self, wanted: Wanted) -> Facts:
        """The program with nothing cut along the batch."""
        return self._facts(self.joint, {}, wanted, "uncut")

    def whole_facts(self, wanted: Wanted) -> Facts | None:
        """The same with the kernels of eager; this traces the program again."""
        joint = _traced((*self.key, "whole norms"), lambda: _found(self.graph, self.demand, whole_norms=True))
        if isinstance(joint, str):  # The uncut program is there anyway.
            events.count("plan::no whole trace")
            return None
        if not set(joint.pinned) <= set(self.joint.pinned):
            return None  # It holds for numbers that vary.
        return self._facts(joint, {}, wanted, "whole norms")

    def _facts(self, joint: Joint, batches: Mapping[int, int], wanted: Wanted, kind: str) -> Facts:
        """The facts about a joint graph: from those of other sizes of the program, or else found out."""
        origin = self._origin(wanted, kind)
        known = known_facts(joint, self.num_samples, origin)
        if known is not None:
            return known
        return note_facts(analyse(joint, batches, self.num_samples, self.results(wanted), origin), origin)

    def _origin(self, wanted: Wanted, kind: str) -> Origin:
        structure = (structure_of(self.graph), self.demand, wanted, kind)
        return Origin(structure, numbers_of(self.graph), num_input_numbers(self.graph))

    def results(self, wanted: Wanted) -> set[int]:
        """Indices of the joint graph's results: outputs, then gradients, then new values of written leaves."""
        found, first = set(wanted.outputs), self.joint.num_outputs
        if wanted.gradients:
            found |= set(range(first, first + len(self.joint.wrt)))
        if wanted.effects:
            first += len(self.joint.wrt)
            found |= set(range(first, first + len(self.joint.written)))
        return found


def program_of(graph: Graph, demand: Demand) -> Program:
    """The traced program of a graph.

    Raises:
        NotSplittable: It cannot be traced.
    """
    key: tuple[Any, ...] = (graph.key, demand)
    joint = _traced(key, lambda: _found(graph, demand))
    if isinstance(joint, Joint) and not joint.holds_for(graph):
        # A number that could not be found again has changed: it is part of the key.
        key = (*key, joint.pinned_in(graph))
        joint = _traced(key, lambda: _found(graph, demand))
    if isinstance(joint, str):
        raise NotSplittable(joint, is_final=False)
    return Program(graph, demand, key, joint)


_OUTLINED, _FORMULAS = 0.25, 0.4
"""What a node of an outline, and the formulas of a node, take in memory, over a node of a joint graph."""
MAX_OUTLINED = 3_000
"""Structures are kept as long as they take no more memory than so many nodes."""


class _Known:
    """What is known about the programs of one structure: some of their traces, and the family that these make."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.family: Family | None = None

    def num_nodes(self) -> int:
        """As many nodes of a joint graph take the memory of the outlines and of the formulas."""
        outlined = sum(len(sample.outline.nodes) for sample in self.samples)
        return int(_OUTLINED * outlined + _FORMULAS * outlined / max(1, len(self.samples)))

    def add(self, sample: Sample) -> None:
        """One more trace; an older one that is not like the others is left out."""
        self.samples = with_sample(self.samples, sample, lambda each: each.numbers)
        self.family = None
        for first in range(len(self.samples) - 1):
            try:
                self.family = Family(self.samples[first:])
                self.samples = self.samples[first:]
                break
            except NoFormula as reason:
                events.count(f"sizes::no family: {reason}")
        if self.family is None and len(self.samples) > 1:
            self.samples = after_failure(self.samples)


_structures: Cache[_Known] = Cache("structure_cache", MAX_OUTLINED, _Known.num_nodes, ALWAYS)


def _found(graph: Graph, demand: Demand, whole_norms: bool = False) -> Joint:
    """The joint graph of a program: built from formulas where its structure is known at other sizes, else traced."""
    key = (structure_of(graph), demand, whole_norms)
    known = _structures.get(key) or _Known()
    if known.family is not None:
        try:
            joint = known.family.build(graph, demand)
            events.count("sizes::built")
            return joint
        except NoFormula as reason:
            events.count(f"sizes::traced: {reason}")
    joint = trace(graph, demand, whole_norms)
    if not joint.shares_memory:
        known.add(Sample(graph, joint))
        _structures.add(key, known)
    return joint


def _traced(key: tuple[Any, ...], trace_now: Callable[[], Joint]) -> Joint | str:
    """The trace of a program, or why it has none. An error may be of the moment: it is final after a few."""
    found = _joints.get(key)
    if found is None:
        found = _attempt(trace_now)
        tries = (_tries.get(key) or 0) + 1
        if isinstance(found, Joint) or tries >= _TRIES:
            _joints.add(key, found)
        else:
            _tries.add(key, tries)
    return found


def _attempt(trace_now: Callable[[], Joint]) -> Joint | str:
    """The trace, or why there is none: then the program is an opaque eager segment (Rule 3), counted (Rule 6)."""
    started = time.perf_counter()
    try:
        with _tracing, without_collection():
            return trace_now()
    except MemoryError:  # That is of the moment, not of the program.
        raise
    except Exception as error:
        text = str(error).splitlines()[0] if str(error) else ""
        return f"it cannot be traced: {type(error).__name__}: {text}"
    finally:
        events.spend("trace_seconds", time.perf_counter() - started)


def forget_programs() -> None:
    """Trace every program anew."""
    _joints.clear()
    _tries.clear()
    _structures.clear()
