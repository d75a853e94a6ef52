"""The unsplit run: eager execution, deferred.

*Takes* a graph. *Gives* real tensors for its values, by replaying the recorded calls on PyTorch's own engine with its
own autograd: bit-identical to eager by construction. Also the executor of what cannot be traced (Rule 3).
"""

from __future__ import annotations

from typing import Any

import torch

from koila import events
from koila.execution.transaction import restored_on_error
from koila.ir.graph import Graph
from koila.ir.node import Node, Value
from koila.ir.replay import Lookup, replay


def written_leaves(graph: Graph) -> list[torch.Tensor]:
    """Real tensors that the program writes to."""
    found: dict[int, torch.Tensor] = {}
    for node in graph.nodes:
        for index in node.inference.writes:
            operand = node.operands[index]
            real = operand.real if isinstance(operand, Value) else operand
            if real is not None and not node.inference.ordered:
                found[id(real)] = real
            elif isinstance(operand, Value):
                found.update({id(leaf): leaf for leaf in graph.leaves if _lies_in(leaf, operand, graph)})
    return list(found.values())


def _lies_in(leaf: torch.Tensor, operand: Value, graph: Graph) -> bool:
    """Whether a leaf shares the storage that a pending view is written through."""
    values = (value for node in graph.nodes for value in node.values())
    return any(value.real is leaf and value.storage is operand.storage for value in values)


def _last_uses(graph: Graph) -> dict[Node, list[Value]]:
    """Values that nobody needs after a node."""
    wanted, seen, dying = set(graph.outputs), set[Value](), dict[Node, list[Value]]()
    for node in reversed(graph.nodes):
        fresh = {value for value in node.values() if value.real is None and value not in seen}
        fresh |= {out for i in range(node.num_outputs) if (out := node.output(i)) is not None and out not in seen}
        seen |= fresh
        dying[node] = [value for value in fresh if value not in wanted and not value.is_held]
    return dying


def run_whole(graph: Graph, effects: set[Node]) -> dict[Value, torch.Tensor]:
    """Replay the program; the real tensor of every value that is wanted or that the user still holds.

    A write whose node is not among the due `effects` has happened in an earlier run: it goes to a copy.
    """
    environment: dict[Value, Any] = {}
    dying = _last_uses(graph)

    def lookup(leaf: Any) -> Any:
        if type(leaf) is not Value:
            return leaf
        return leaf.real if leaf.real is not None else environment[leaf]

    def free(node: Node) -> None:
        for value in dying[node]:
            environment.pop(value, None)

    def lookup_for(node: Node) -> Lookup:
        if node in effects or not node.inference.hidden_writes:
            return lookup
        written = [node.operands[index] for index in node.inference.hidden_writes]
        copies = {id(operand): lookup(operand).clone() for operand in written}
        return lambda leaf: copies[id(leaf)] if id(leaf) in copies else lookup(leaf)

    with restored_on_error(written_leaves(graph)):
        replay(graph.nodes, environment, lookup_for, lambda node: [draw.whole() for draw in node.draws], free)
    events.count("nodes_executed", len(graph.nodes))
    return environment
