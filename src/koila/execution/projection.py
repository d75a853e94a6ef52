"""Projection: what a run will allocate, known before anything runs.

*Takes* a compiled plan, or a recorded program for a whole run. *Gives* bytes. The projection is the run itself: the
same code runs on fake tensors under the storage tracker, over the chunks that differ from each other (the first, which
starts the merges, the second, which adds to them, and the last, which may be shorter).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from koila.execution.chunked import CompiledPlan, run_chunked
from koila.execution.tracker import fake_tracker
from koila.ir.draws import Source
from koila.ir.graph import Graph
from koila.ir.node import Node, Value
from koila.ir.prepass import prepass_of
from koila.ir.replay import replay


@dataclass(frozen=True, slots=True)
class Projection:
    """The bytes that a run allocates at its peak."""

    peak_bytes: int
    """Transients, merges, kept values, results and gradients, and the random numbers that the program has drawn."""
    largest: str
    """The operator at the peak."""


class _FakeSource(Source):
    """A random source whose numbers are fake."""

    __slots__ = ()

    def rows(self, start: int, stop: int) -> torch.Tensor:
        chunk = self.whole().new_empty((stop - start, *self.shape[1:]))
        _unpacking = chunk.new_empty(chunk.shape) if chunk.dtype == torch.bool else None
        return chunk


def drawn_bytes(graph: Graph) -> int:
    """Bytes of the random numbers that the program holds."""
    return sum(source.num_bytes for node in graph.nodes for source in node.draws)


def project_split(compiled: CompiledPlan, graph: Graph) -> Projection:
    """Run a plan on fake tensors."""
    fakes = [node.meta["val"] for node in compiled.placeholders]
    kinds = [found.kind for found in compiled.plan.facts.joint.inputs]
    inputs: list[Any] = [_FakeSource(fake) if kind == "draw" else fake for kind, fake in zip(kinds, fakes, strict=True)]
    mode = next((fake.fake_mode for fake in fakes), None) or FakeTensorMode()
    with mode, fake_tracker() as tracker:
        run_chunked(compiled.sampled(), graph, inputs)
    return Projection(tracker.peak_bytes + drawn_bytes(graph), tracker.peak_operator)


def project_whole(graph: Graph, roots: Sequence[Value]) -> Projection:
    """Replay a recorded program on fake tensors with autograd, and differentiate its roots."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fakes = {id(leaf): _fake_leaf(leaf) for leaf in graph.leaves}
    environment: dict[Value, Any] = {}

    def lookup(leaf: Any) -> Any:
        if type(leaf) is Value:
            found = environment.get(leaf)
            leaf = leaf.real if found is None else found
        return fakes.get(id(leaf), leaf)

    def numbers(node: Node) -> list[torch.Tensor]:
        return [torch.empty(source.shape, dtype=source.dtype) for source in node.draws]

    alive = set(graph.outputs)
    with mode, fake_tracker() as tracker:
        last = {value: node for node in graph.nodes for value in node.values()}

        def free(node: Node) -> None:
            for value in [v for v in environment if last.get(v) is node and v not in alive]:
                del environment[value]

        replay(graph.nodes, environment, lambda _: lookup, numbers, free)
        for root in roots:
            environment[root].backward(torch.ones_like(environment[root]), retain_graph=root is not roots[-1])
    return Projection(tracker.peak_bytes + drawn_bytes(graph), tracker.peak_operator)


def _fake_leaf(leaf: torch.Tensor) -> torch.Tensor:
    prepass = prepass_of(leaf)
    fake = torch.empty_strided(prepass.shape, prepass.stride, dtype=prepass.dtype, device=prepass.device)
    return fake.requires_grad_() if prepass.requires_grad else fake
