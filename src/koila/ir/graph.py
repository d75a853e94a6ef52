"""Graph: the pending program behind some values, in program order.

*Takes* the values that are wanted and the effects that are due. *Gives* a frozen `Graph`: the nodes they need, its
leaves, and a key that two programs share exactly if they make the same calls on tensors of the same layout.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from koila.errors import BudgetError, KoilaError, StaleInputError
from koila.ir.changes import changed_at
from koila.ir.node import Node, Storage, Value, version_of
from koila.ir.owned import OwnedCall
from koila.ir.prepass import prepass_of
from koila.ir.source import Site, user_site


@dataclass(frozen=True)
class Graph:
    """A recorded program: printable, hashable by structure."""

    nodes: tuple[Node, ...]
    """In program order."""
    outputs: tuple[Value, ...]
    """The values that are wanted."""
    bound: frozenset[Value] = field(init=False, repr=False, compare=False)
    """Results of its calls that were real tensors when the graph was made. They are inputs: the user may have written
    to them since. Their call is made again for another result of it, which is still pending."""

    def __post_init__(self) -> None:
        made = (node.output(index) for node in self.nodes if node.done for index in range(node.num_outputs))
        bound = frozenset([value for value in made if value is not None and value.node is None])
        object.__setattr__(self, "bound", bound)

    @cached_property
    def positions(self) -> dict[Node, int]:
        """Each node's place in the program."""
        return {node: index for index, node in enumerate(self.nodes)}

    @property
    def sites(self) -> tuple[Site, ...]:
        """The user's line of each node."""
        return tuple(node.site for node in self.nodes)

    @cached_property
    def produced(self) -> dict[Value, tuple[int, int]]:
        """(node, result) of each value that the program computes; it may have been bound since the graph was made."""
        return {
            value: (position, index)
            for position, node in enumerate(self.nodes)
            for index in range(node.num_outputs)
            if (value := node.output(index)) is not None and value not in self.bound
        }

    def _inputs(self) -> Iterator[Value | torch.Tensor]:
        """Operands that the program does not compute."""
        everything = (*(operand for node in self.nodes for operand in node.operands), *self.outputs)
        return (o for o in everything if not isinstance(o, Value) or o not in self.produced)

    @cached_property
    def leaves(self) -> tuple[torch.Tensor, ...]:
        """Real tensors that the program reads, in order of first use; each once."""
        reals = (operand.real if isinstance(operand, Value) else operand for operand in self._inputs())
        return tuple({id(real): real for real in reals if real is not None}.values())

    @cached_property
    def batches(self) -> dict[int, int]:
        """The batch dimension of leaves that `koila.lazy` was told one for, by index of the leaf."""
        index = {id(leaf): number for number, leaf in enumerate(self.leaves)}
        values = (operand for operand in self._inputs() if isinstance(operand, Value))
        return {index[id(value.real)]: value.batch for value in values if value.batch is not None}

    @cached_property
    def budgets(self) -> list[int]:
        """Byte budgets that the inputs were given."""
        values = (value for node in self.nodes for value in node.values())
        return [value.budget for value in values if value.budget is not None]

    @cached_property
    def num_samples(self) -> int:
        """The batch size: the largest batch among the leaves; 0 if none has a batch."""
        return max((self.leaves[leaf].shape[dim] for leaf, dim in self.batches.items()), default=0)

    @cached_property
    def remembered(self) -> dict[str, Hashable]:
        """What was found out about it, by name, for as long as it is there."""
        return {}

    @cached_property
    def counting(self) -> tuple[int, ...]:
        """Leaves that hold the positions 0, 1, … of the batch, as in `logp[torch.arange(B), y]`.

        Only those are looked at that may be an index: to look at a tensor of an accelerator is to wait for it.
        """
        if self.num_samples < 2:
            return ()
        given = (number for number in range(len(self.leaves)) if number not in self.batches)
        like = [number for number in given if _may_count(self.leaves[number], self.num_samples)]
        indices = self._indices() if like else ()
        return tuple(number for number in like if id(self.leaves[number]) in indices and _counts(self.leaves[number]))

    def _indices(self) -> set[int]:
        """The identities of real tensors that a call may take as an index."""
        operands = (operand for node in self.nodes if _may_index(node) for operand in node.operands)
        return {id(operand.real if isinstance(operand, Value) else operand) for operand in operands}

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """The program's structure; what varies from step to step (data, slots) is not in it."""
        index = {id(leaf): number for number, leaf in enumerate(self.leaves)}
        calls = tuple(
            (node.key, tuple([_operand_code(operand, index, self.produced) for operand in node.operands]))
            for node in self.nodes
        )
        metas = tuple((prepass_of(leaf).without_idle_strides(), leaf.is_leaf) for leaf in self.leaves)
        outputs = tuple(_operand_code(value, index, self.produced) for value in self.outputs)
        return calls, metas, tuple(self.batches.items()), self.counting, outputs

    @property
    def name(self) -> str:
        """What a person would call it: its last call, and where that was recorded."""
        return f"{self.nodes[-1].name} at {self.nodes[-1].site}" if self.nodes else "an empty program"

    @cached_property
    def structural_hash(self) -> int:
        """Equal for programs of equal structure."""
        return hash(self.key)

    def apart(self) -> tuple[Graph, list[Graph]]:
        """What is connected to the wanted values, and the programs that share no value or storage with it."""
        leader = {node: node for node in self.nodes}

        def lead(node: Node) -> Node:
            while leader[node] is not node:
                leader[node] = node = leader[leader[node]]
            return node

        for node in self.nodes:
            for earlier in _before(node):
                leader[lead(earlier)] = lead(node)
        wanted = [lead(node) for value in self.outputs for node in _makers(value)]
        for each in wanted:
            leader[lead(each)] = lead(wanted[0])
        parts: dict[Node, list[Node]] = {}
        for node in self.nodes:
            parts.setdefault(lead(node), []).append(node)
        own = parts.pop(lead(wanted[0])) if wanted else []
        return Graph(tuple(own), self.outputs), [Graph(tuple(nodes), ()) for nodes in parts.values()]

    def stale(self) -> Iterator[tuple[Node, KoilaError]]:
        """Calls of which an operand was changed since they were recorded, with the error that says so (Rule 5).

        It is a `BudgetError` where the call was to run before the change, and a budget refused that.
        """
        for node in self.nodes:
            for operand, recorded in zip(node.operands, node.versions, strict=True):
                if recorded is not None and recorded != version_of(operand):
                    yield node, _stale(node, operand) if node.refusal is None else _refused(node, node.refusal)
                    break
        yield from self.rebound()

    def rebound(self) -> Iterator[tuple[Node, StaleInputError]]:
        """Calls of the user's code that read a name which was rebound since they were recorded."""
        for node in self.nodes:
            name = node.func.rebound() if isinstance(node.func, OwnedCall) else None
            if name is not None:
                yield node, _rebound(node, name)

    def check_fresh(self) -> None:
        """Raise if an operand was changed since its call was recorded."""
        for _, error in self.stale():
            raise error

    def __str__(self) -> str:
        lines = [
            f"graph of {len(self.nodes)} nodes, {len(self.leaves)} leaves, hash {self.structural_hash & 0xFFFFFFFF:08x}"
        ]
        names = _Names(self)
        for number, leaf in enumerate(self.leaves):
            batch = f", batch in dim {self.batches[number]}" if number in self.batches else ""
            lines.append(f"  leaf{number}: {prepass_of(leaf)}{batch}")
        for index, node in enumerate(self.nodes):
            operands = ", ".join(names.of(operand) for operand in node.operands)
            results = ", ".join(repr(output.prepass) for output in node.inference.outputs)
            lines.append(f"  %{index}: {node.name}({operands}) -> {results or '()'}  # {node.site}")
        lines.append(f"  return {', '.join(names.of(value) for value in self.outputs)}")
        return "\n".join(lines)

    def to_dot(self) -> str:
        """Graphviz source."""
        names, lines = _Names(self), ["digraph koila {", "  rankdir=TB;", "  node [shape=box];"]
        for number, leaf in enumerate(self.leaves):
            lines.append(f'  "leaf{number}" [label="leaf{number}\\n{prepass_of(leaf)}", shape=ellipse];')
        for index, node in enumerate(self.nodes):
            shapes = ", ".join(repr(output.prepass) for output in node.inference.outputs)
            lines.append(f'  "%{index}" [label="{node.name}\\n{shapes}"];')
            lines += [f'  "{names.of(operand).split(".")[0]}" -> "%{index}";' for operand in node.operands]
        return "\n".join([*lines, "}"])


_INDEXING = ("__getitem__", "__setitem__", "index")
"""In the names of functions that may take tensors as indices."""


def _may_index(node: Node) -> bool:
    """Whether a call may take one of its operands as an index; the user's own code may do anything."""
    return isinstance(node.func, OwnedCall) or any(part in node.name for part in _INDEXING)


def _may_count(leaf: torch.Tensor, size: int) -> bool:
    return leaf.dtype == torch.int64 and leaf.shape == (size,)


def _counts(leaf: torch.Tensor) -> bool:
    return torch.equal(leaf, torch.arange(len(leaf), device=leaf.device))


class _Names:
    """Readable names of operands."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._leaves = {id(leaf): number for number, leaf in enumerate(graph.leaves)}

    def of(self, operand: Value | torch.Tensor) -> str:
        code = _operand_code(operand, self._leaves, self._graph.produced)
        if isinstance(code, int):
            return f"leaf{code}"
        several = self._graph.nodes[code[0]].num_outputs > 1
        return f"%{code[0]}.{code[1]}" if several else f"%{code[0]}"


def _operand_code(operand: Value | torch.Tensor, leaves: dict[int, int], produced: dict[Value, tuple[int, int]]) -> Any:
    if not isinstance(operand, Value):
        return leaves[id(operand)]
    return produced[operand] if operand in produced else leaves[id(operand.real)]


def _stale(node: Node, operand: Value | torch.Tensor) -> StaleInputError:
    real = operand.real if isinstance(operand, Value) else operand
    assert real is not None  # Only real tensors have versions.
    changed = changed_at(real)
    return StaleInputError(
        f"an input of {node.name} (shape {list(real.shape)}) was changed after the call was recorded and before it ran",
        where=f"recorded at {node.site}, {'' if changed is None else f'changed at {changed}, '}run at {user_site()}",
        hint=_way_out(node),
    )


def _refused(node: Node, refusal: BudgetError) -> BudgetError:
    return BudgetError(
        f"{node.name} had to run before one of its inputs was changed: {refusal.fact}",
        where=f"recorded at {node.site}, run at {user_site()}; {refusal.where}",
        hint=refusal.hint,
        needed_bytes=refusal.needed_bytes,
        allowed_bytes=refusal.allowed_bytes,
    )


def _way_out(node: Node) -> str:
    """A run that was too small to hold the value has come and gone, or there was none."""
    if node.done:
        return "koila.keep(value) before the run that computes it, so that it is kept however large it is"
    return "koila.run(value), or koila.settle() for all that is pending, before the line that changes the input"


def _rebound(node: Node, name: str) -> StaleInputError:
    return StaleInputError(
        f"{name}, which {node.name} reads, was rebound after the call was recorded and before it ran",
        where=f"recorded at {node.site}, run at {user_site()}",
        hint=f"rebind {name} before the call or after the run, or give its value to the Function as an argument",
    )


def collect(wanted: Sequence[Value], effects: Sequence[Node]) -> Graph:
    """The program that computes `wanted` and performs `effects`: what they need, and what would be too late after."""
    found: set[Node] = set()
    pending: list[Node] = [*effects]
    for value in wanted:
        pending += _makers(value)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += _before(node)
    return Graph(tuple(sorted(found, key=lambda node: node.sequence)), tuple(wanted))


def _makers(value: Value) -> list[Node]:
    """What must run before a value is there, and up to date."""
    return [*([] if value.node is None else [value.node]), *value.storage.writers]


def _before(node: Node) -> list[Node]:
    """Producers of the operands, earlier writes to their storages, and reads that a write of this node would spoil."""
    needed: list[Node] = []
    storages = list(node.storages)
    for value in node.values():
        if value.node is not None:
            needed.append(value.node)
        storages.append(value.storage)
    for storage in storages:
        needed += [writer for writer in storage.writers if writer.sequence < node.sequence]
        if node in storage.writers:
            readers = (reference() for reference in storage.readers)
            needed += [
                r for r in readers if r is not None and (storage.real or r.sequence < node.sequence) and r.is_open
            ]
    return needed


def written_storages(graph: Graph) -> set[Storage]:
    """Memory of values that a program writes to in place."""
    operands = (node.operands[index] for node in graph.nodes for index in node.inference.writes)
    return {operand.storage for operand in operands if isinstance(operand, Value)}


def connected_nodes(graph: Graph, values: Sequence[Value]) -> set[Node]:
    """Calls through which autograd would go from pending values: those recorded with gradients, not `detach`."""
    seen: set[Node] = set()
    pending = [maker for value in values for maker in _makers(value) if maker in graph.positions]
    while pending:
        node = pending.pop()
        if node in seen or not node.context.grad:
            continue
        seen.add(node)
        for operand in node.values():
            if operand.node is not None:
                pending += [operand.node] if operand.requires_grad else []
                pending += [w for w in operand.storage.writers if w.sequence < node.sequence and w in graph.positions]
    return seen


def connected_leaves(graph: Graph, values: Sequence[Value], connected: set[Node] | None = None) -> tuple[int, ...]:
    """Leaves that autograd would reach from values; `connected` are the calls on the way, if they are known."""
    index = {id(leaf): number for number, leaf in enumerate(graph.leaves)}
    nodes = connected_nodes(graph, values) if connected is None else connected
    operands = (operand for node in nodes for operand in node.operands)
    ready = (o for o in (*values, *operands) if not isinstance(o, Value) or o.node is None)
    reals = (operand.real if isinstance(operand, Value) else operand for operand in ready)
    return tuple(sorted({index[id(real)] for real in reals if real is not None and real.requires_grad}))
