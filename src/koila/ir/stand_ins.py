"""Stand-ins: fake tensors in the place of a program's leaves and random numbers.

*Takes* a graph, under a fake mode. *Gives* what a replay of it asks for: what stands for each leaf and each value that
was computed, and numbers of the right layout for its draws.
"""

from __future__ import annotations

from typing import Any

import torch

from koila.ir.graph import Graph
from koila.ir.node import HOOKS, Node, Value
from koila.ir.prepass import empty, prepass_of, with_bits


class StandIns:
    """What a replay on fake tensors reads, and what it gives."""

    def __init__(self, graph: Graph) -> None:
        self.calls = [node for node in graph.nodes if node.func not in HOOKS]
        """What is replayed: nobody's hooks see a fake tensor."""
        self.leaves = {id(leaf): _fake(leaf) for leaf in graph.leaves}
        """By identity, the stand-in of each leaf."""
        self.environment: dict[Value, Any] = {
            value: self.leaves[id(value.real)] for value in graph.bound if id(value.real) in self.leaves
        }
        """What was computed."""

    def lookup(self, leaf: Any) -> Any:
        """What stands for a leaf of a call's arguments."""
        if type(leaf) is Value:
            leaf = self.environment.get(leaf, leaf.real)
        return self.leaves.get(id(leaf), leaf)

    @staticmethod
    def numbers(node: Node) -> list[torch.Tensor]:
        """What stands for the random numbers of a call."""
        return [empty(source.replayed_prepass()) for source in node.draws]


def _fake(leaf: torch.Tensor) -> torch.Tensor:
    prepass = prepass_of(leaf)
    fake = with_bits(empty(prepass), prepass.bits)
    return fake.requires_grad_() if prepass.requires_grad else fake
