"""The unsplit run: eager execution, deferred.

*Takes* a graph. *Gives* real tensors for its values, by replaying the recorded calls on PyTorch's own engine with its
own autograd: bit-identical to eager by construction. Also the executor of what cannot be traced (Rule 3).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch

from koila import events
from koila.execution.commit import restored_on_error
from koila.ir.failures import is_out_of_memory
from koila.ir.graph import Graph
from koila.ir.node import Node, Value
from koila.ir.replay import Lookup, replay

Required = Callable[[], Container[Node]]
"""Which calls of a program must succeed."""


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


def _replay(
    graph: Graph, wanted: set[Value], effects: set[Node], swap: dict[int, torch.Tensor], required: Required,
    is_fresh: bool = False,
) -> tuple[dict[Value, Any], list[Node]]:  # fmt: skip
    """Replay the program with some leaves swapped; a write that is not due goes to a copy.

    Gives the values, and the calls that were made: those that nobody requires may be stale, or fail. `is_fresh` says
    that somebody has looked whether the inputs are as they were.
    """
    environment: dict[Value, Any] = {value: value.real for value in graph.bound}
    failed = set[Node]() if is_fresh else _stale(graph, required)
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

    def may_fail(node: Node, error: Exception) -> bool:
        if node in required() or is_out_of_memory(error):
            return False
        failed.add(node)
        # Whoever asks for its value will see the error (Rule 6: until then it is counted).
        kind = type(error).__name__.lstrip("_")
        events.count(f"pending::failed::{kind}", site=node.site)
        return True

    numbers = lambda node: [draw.replayed() for draw in node.draws]  # noqa: E731
    replay([n for n in graph.nodes if n not in failed], environment, lookup_for, numbers, free, may_fail)
    done = [node for node in graph.nodes if node not in failed] if failed else list(graph.nodes)
    for node in done:
        events.count(f"executed::{node.name}")
    events.count("nodes_executed", len(done))
    return environment, done


def _stale(graph: Graph, required: Required) -> set[Node]:
    """Calls whose inputs were changed, and those that need them, if nobody requires them; else an error (Rule 5)."""
    found: set[Node] = set()
    for node, error in graph.stale():
        if node in required():
            raise error
        found.add(node)
    for node in graph.nodes if found else ():
        if any(value.node in found for value in node.values()):
            found.add(node)
    return found


def run_whole(
    graph: Graph, wanted: set[Value], effects: set[Node], required: Required | None = None
) -> tuple[dict[Value, torch.Tensor], list[Node]]:
    """Replay the program on its real leaves; the tensors of the wanted values, and the calls that were made.

    Args:
        graph: The program.
        wanted: Values to give.
        effects: Calls whose writes are due; any other write has happened in an earlier run and goes to a copy.
        required: Says which calls must succeed; all of them if it is not given. It is asked if one does not.
    """
    with restored_on_error(written_leaves(graph)):
        environment, done = _replay(graph, wanted, effects, {}, required or (lambda: graph.positions.keys()))
    return {value: environment[value] for value in wanted if value in environment}, done


def inner_gradient(
    graph: Graph, roots: Sequence[Value], seeds: Sequence[torch.Tensor], wrt: Value
) -> torch.Tensor | None:  # fmt: skip
    """The gradient of some values with respect to another one inside of a program, by replaying it.

    It is replayed on stand-ins that share their data with the leaves, so that nobody's hooks are called.
    """
    swap = {id(leaf): leaf.detach().requires_grad_() for leaf in graph.leaves if leaf.requires_grad}
    with torch.enable_grad():
        environment, _ = _replay(graph, {*roots, wrt}, set(), swap, lambda: graph.positions.keys())
        wanted = [environment[root] for root in roots]
        return torch.autograd.grad(wanted, environment[wrt], list(seeds), allow_unused=True)[0]


def gradients_whole(
    graph: Graph,
    roots: Sequence[Value],
    seeds: Sequence[torch.Tensor],
    wrt: Sequence[int],
    before: Mapping[int, torch.Tensor],
    create_graph: bool = False,
) -> list[torch.Tensor | None]:
    """The gradients of some values by replaying the program on its leaves.

    It goes on stand-ins that share their data, so that nobody's hooks are called, and so that gradients end there: one
    leaf may be made from another. With `create_graph` the stand-ins are made from the leaves. Leaves that were changed
    since are given as they were, by index, in `before`.
    """
    leaves = [graph.leaves[index] for index in wrt]
    with torch.enable_grad():
        aliases = [leaf.view_as(leaf) if create_graph else leaf.detach().requires_grad_() for leaf in leaves]
    swap = {id(graph.leaves[index]): alias for index, alias in zip(wrt, aliases, strict=True)}
    swap |= {id(graph.leaves[index]): leaf for index, leaf in before.items()}
    with torch.enable_grad():
        environment, _ = _replay(graph, set(roots), set(), swap, lambda: graph.positions.keys(), is_fresh=True)
        wanted = [environment[root] for root in roots]
        return list(torch.autograd.grad(wanted, aliases, list(seeds), allow_unused=True, create_graph=create_graph))
