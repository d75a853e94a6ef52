"""What a whole run will allocate, known before anything runs.

*Takes* a recorded program. *Gives* bytes. The projection is the run itself, on fake tensors under the storage tracker.
(A run in chunks is projected from its plan: `koila.planning.memory`.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from koila.execution.behind import behind
from koila.execution.tracker import FakeTracker
from koila.ir.graph import Graph
from koila.ir.node import Node, Value
from koila.ir.prepass import prepass_of
from koila.ir.replay import replay
from koila.planning.peak import Projection

OBJECT_BYTES = 3072
"""What PyTorch allocates for a recorded call and its gradient beside their storages, as the malloc hook sees it."""


def drawn_bytes(graph: Graph) -> int:
    """Bytes of the random numbers that the program holds."""
    return sum(source.num_bytes for node in graph.nodes for source in node.draws)


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
    with mode, FakeTracker() as tracker:
        last = {value: node for node in graph.nodes for value in node.values()}

        def free(node: Node) -> None:
            for value in [v for v in environment if last.get(v) is node and v not in alive]:
                del environment[value]

        replay(graph.nodes, environment, lambda _: lookup, numbers, free)
        for root in roots:
            environment[root].backward(torch.ones_like(environment[root]), retain_graph=root is not roots[-1])
    made = behind(graph.leaves)
    peak = tracker.peak_bytes + drawn_bytes(graph) + OBJECT_BYTES * len(graph.nodes)
    gradients = sum(leaf.numel() * leaf.element_size() for leaf in graph.leaves if leaf.requires_grad and roots)
    return Projection(made.held_bytes + max(peak, gradients + made.backward_bytes), tracker.peak_operator)


def _fake_leaf(leaf: torch.Tensor) -> torch.Tensor:
    prepass = prepass_of(leaf)
    fake = torch.empty_strided(prepass.shape, prepass.stride, dtype=prepass.dtype, device=prepass.device)
    return fake.requires_grad_() if prepass.requires_grad else fake
