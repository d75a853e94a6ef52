"""The unsplit run: eager execution, deferred.

*Takes* a graph. *Gives* real tensors for its values, by replaying the recorded calls on PyTorch's own engine with its
own autograd: bit-identical to eager by construction. Also the executor of what cannot be traced (Rule 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from koila import events
from koila.execution.transaction import restored_on_error
from koila.ir.graph import Graph
from koila.ir.node import Node, Value
from koila.ir.replay import Lookup, replay


def written_leaves(graph: Graph) -> list[torch.Tensor]:
    """Real tensors that the program writes to: running statistics; other writes to real tensors never wait."""
    found = (node.operands[index] for node in graph.nodes for index in node.inference.hidden_writes)
    reals = (operand.real if isinstance(operand, Value) else operand for operand in found)
    return list({id(real): real for real in reals if real is not None}.values())


def _last_uses(graph: Graph, wanted: set[Value]) -> dict[Node, list[Value]]:
    """Values that nobody needs after a node."""
    seen, dying = set[Value](), dict[Node, list[Value]]()
    for node in reversed(graph.nodes):
        fresh = {value for value in node.values() if value not in seen}
        fresh |= {out for i in range(node.num_outputs) if (out := node.output(i)) is not None and out not in seen}
        seen |= fresh
        dying[node] = [value for value in fresh if value not in wanted]
    return dying


def _replay(graph: Graph, wanted: set[Value], effects: set[Node], swap: dict[int, torch.Tensor]) -> dict[Value, Any]:
    """Replay the program with some leaves swapped; a write that is not due goes to a copy."""
    environment: dict[Value, Any] = {}
    dying = _last_uses(graph, wanted)

    def lookup(leaf: Any) -> Any:
        if type(leaf) is Value:
            found = environment.get(leaf)
            leaf = leaf.real if found is None else found
        return swap.get(id(leaf), leaf)

    def lookup_for(node: Node) -> Lookup:
        if node in effects or not node.inference.hidden_writes:
            return lookup
        written = [node.operands[index] for index in node.inference.hidden_writes]
        copies = {id(operand): lookup(operand).clone() for operand in written}
        return lambda leaf: copies[id(leaf)] if id(leaf) in copies else lookup(leaf)

    def free(node: Node) -> None:
        for value in dying[node]:
            environment.pop(value, None)

    replay(graph.nodes, environment, lookup_for, lambda node: [draw.whole() for draw in node.draws], free)
    for node in graph.nodes:
        events.count(f"executed::{node.name}")
    events.count("nodes_executed", len(graph.nodes))
    return environment


def run_whole(graph: Graph, wanted: set[Value], effects: set[Node]) -> dict[Value, torch.Tensor]:
    """Replay the program on its real leaves; the tensors of the wanted values.

    A write whose node is not among the due `effects` has happened in an earlier run: it goes to a copy.
    """
    with restored_on_error(written_leaves(graph)):
        return _replay(graph, wanted, effects, {})


def gradients_whole(
    graph: Graph,
    roots: Sequence[Value],
    seeds: Sequence[torch.Tensor],
    wrt: Sequence[int],
    create_graph: bool = False,
) -> list[torch.Tensor | None]:
    """The gradients of some values by replaying the program on its leaves.

    Without `create_graph` on stand-ins that share their data, so that nobody's hooks are called.
    """
    leaves = [graph.leaves[index] for index in wrt]
    aliases = leaves if create_graph else [leaf.detach().requires_grad_() for leaf in leaves]
    swap = {id(graph.leaves[index]): alias for index, alias in zip(wrt, aliases, strict=True)}
    with torch.enable_grad():
        environment = _replay(graph, set(roots), set(), swap)
        wanted = [environment[root] for root in roots]
        return list(torch.autograd.grad(wanted, aliases, list(seeds), allow_unused=True, create_graph=create_graph))
