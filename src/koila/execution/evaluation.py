"""Evaluation: one program on its way to real tensors.

*Takes* a graph and the values that are asked for. *Gives* what the run must compute: those values, what the user or a
pending call still needs of the others, and what hangs on which leaves for autograd.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import torch

from koila.execution.eager_errors import frees_graph
from koila.ir.graph import Graph
from koila.ir.node import Node, Storage, Value


class Evaluation:
    """What a run computes, and why."""

    def __init__(self, graph: Graph, wanted: Sequence[Value], effects: set[Node]) -> None:
        self.wanted = {value for value in wanted if value.node is not None}
        """Asked for now."""
        self.effects = effects
        """Writes to running statistics that are due."""
        self._nodes = graph.nodes
        self._place = graph.positions
        self.needed = self.wanted | {value for value in self._products() if self._is_needed(value)}
        """Everything that must be bound afterwards."""
        self.derived: set[Value] = set()
        """Views that a split run leaves to be made from what they are views of."""
        self.graph = Graph(graph.nodes, self._outputs())

    def _products(self) -> list[Value]:
        found = (node.output(index) for node in self._nodes for index in range(node.num_outputs))
        return [value for value in found if value is not None and value.node is not None]

    def _is_needed(self, value: Value) -> bool:
        """The user holds it, or a call that is not part of this run reads it.

        A value that a call outside of this run writes to stays pending: bound now, it would miss that write.
        """
        if any(writer not in self._place for writer in value.storage.writers):
            return False
        if value.is_held:
            return True
        readers = (reference() for reference in value.storage.readers)
        outside = [r for r in readers if r is not None and r not in self._place and value in r.operands]
        return bool(outside) and bool(awaited([n for n in _pending_from(outside) if n not in self._place]))

    def _outputs(self) -> tuple[Value, ...]:
        """Results that stand for themselves; values that share memory are made from one of them.

        So is a value whose memory was written: whatever is computed again starts from all of that memory, because the
        writes are done then.
        """
        groups: dict[int, list[Value]] = {}
        for value in self.needed:
            groups.setdefault(id(value.storage), []).append(value)
        outputs: set[Value] = set()
        for values in groups.values():
            if values[0].storage.real:
                self.derived.update(values)
            elif len(values) > 1 or values[0].storage.writers:
                base = _base(values[0])
                outputs.add(base)
                self.derived.update(value for value in values if value is not base)
            else:
                outputs.update(values)
        # The order depends on the program only, not on who asked for what.
        return tuple(sorted(outputs, key=lambda value: (self._place[_producer(value)], value.index)))

    @property
    def has_reshaped_views(self) -> bool:
        """Whether a view meets a value of the same memory whose shape was changed in place after the view was made.

        It must be made again from that value, or is used later: a trace makes its gradient again from the new shape.
        """
        changed = dict[Storage, list[tuple[int, Value]]]()
        if any(node.inference.reshapes for node in self._nodes):
            for position, node in enumerate(self._nodes):
                if any(self._is_older(value, changed.get(value.storage, ())) for value in node.values()):
                    return True
                for operand in (node.operands[index] for index in node.inference.reshapes):
                    if isinstance(operand, Value):
                        changed.setdefault(operand.storage, []).append((position, operand))
        given = (self._is_older(value, changed.get(value.storage, ())) for value in self.graph.outputs)
        return any(given) or any(value.storage in changed for value in self.derived)

    @property
    def has_written_aliases(self) -> bool:
        """Whether a write has given a gradient to what `detach` took from a value: it is no view of it for autograd.

        Made again from that value, it would have no gradient.
        """
        made = (value for value in self.derived if value.requires_grad)
        return any(value.family != _base(value).family for value in made)

    def _is_older(self, value: Value, changes: Iterable[tuple[int, Value]]) -> bool:
        """Whether one of these changes to other values of its memory came after a value was made."""
        made, _ = self.graph.produced.get(value, (-1, 0))
        return any(value is not other and made < position for position, other in changes)

    def scalar_roots(self) -> tuple[int, ...]:
        """The one wanted scalar that may be differentiated later without a seed."""
        found = [i for i, v in enumerate(self.graph.outputs) if v in self.wanted and v.requires_grad and _is_scalar(v)]
        return tuple(found) if len(found) == 1 else ()

    @cached_property
    def wrt(self) -> tuple[int, ...]:
        """Leaves that require grad."""
        return tuple(index for index, leaf in enumerate(self.graph.leaves) if leaf.requires_grad)

    @cached_property
    def asked(self) -> tuple[int, ...]:
        """Outputs that are wanted or kept on purpose, or that a wanted view lies in."""
        now = self.wanted | self._spoiled() | self._behind_gradients()
        based = {id(value.storage) for value in self.derived & now}
        return tuple(i for i, v in enumerate(self.graph.outputs) if v in now or v.keep or id(v.storage) in based)

    def _spoiled(self) -> set[Value]:
        """Results of calls that start from what a value was before this run writes to it and binds it.

        They are computed now or never: later, they would start from what was written.
        """
        bound = {value.storage for value in self.needed if value.storage.writers and not value.storage.real}
        found: set[Node] = set()
        for node in self._nodes if bound else ():
            for value in node.values():
                before = value.storage in bound and node.sequence < value.storage.writers[-1].sequence
                if before or (value.node in found and value.storage not in bound):
                    found.add(node)
        return {value for value in self.needed if value.node in found and value.storage not in bound}

    def _behind_gradients(self) -> set[Value]:
        """Results that depend on recorded gradients, if this run frees what one of these went through.

        They are computed now or never, too: the gradients could not be computed again.
        """
        if not any(frees_graph(node) for node in self._nodes):
            return set()
        found: set[Node] = set()
        for node in self._nodes:
            if node.func is torch.autograd.grad or any(value.node in found for value in node.values()):
                found.add(node)
        return {value for value in self.needed if value.node in found}

    @cached_property
    def held(self) -> tuple[int, ...]:
        """Outputs that nobody asked for but somebody holds, smallest first."""
        outputs = self.graph.outputs
        found = [i for i in range(len(outputs)) if i not in self.asked]
        return tuple(sorted(found, key=lambda i: (outputs[i].prepass.num_bytes, i)))


def awaited(nodes: Sequence[Node]) -> list[Node]:
    """Of pending calls, in order, those that lead to something that somebody holds, or to a write that is due.

    What nobody can ask for is garbage, whether Python has collected it by now or not. A write to memory in which
    somebody holds a view leads to that view, whether its own result is held or not.
    """
    found: set[Node] = set()
    held = {value.storage for node in nodes if not node.done for value in node.waiting()}
    for node in reversed(nodes):
        if (
            node.due
            or (node.inference.ordered and any(map(_is_used, node.values())))
            or any(_leads_on(node.output(index), found) for index in range(node.num_outputs))
            or any(storage in held or _is_read(storage, found) for storage in _written(node))
        ):
            found.add(node)
    found.update([node for node in nodes if node.inference.writes and _spoils(node, found)])
    return [node for node in nodes if node in found]


def _spoils(node: Node, found: set[Node]) -> bool:
    """Whether a call writes to what an earlier one has read: autograd refuses to differentiate that one then."""
    written = (node.operands[index] for index in node.inference.writes)
    readers = (reference() for value in written if isinstance(value, Value) for reference in value.storage.readers)
    return any(reader in found and reader.sequence < node.sequence for reader in readers if reader is not None)


def _written(node: Node) -> list[Storage]:
    """The memory of pending values that a call writes to."""
    written = (node.operands[index] for index in node.inference.writes)
    return [operand.storage for operand in written if isinstance(operand, Value)]


def _is_read(storage: Storage, nodes: set[Node]) -> bool:
    return any(reference() in nodes for reference in storage.readers)


def _is_used(value: Value) -> bool:
    """Whether something that somebody holds is computed from a pending value, by calls that ran already, too."""
    seen: set[Value] = set()
    pending = [value]
    while pending:
        found = pending.pop()
        if found in seen or found.node is None:
            continue
        if found.is_held:
            return True
        seen.add(found)
        readers = (reader for reference in found.storage.readers if (reader := reference()) is not None)
        results = (reader.output(index) for reader in readers for index in range(reader.num_outputs))
        pending += [result for result in results if result is not None]
    return False


def _leads_on(value: Value | None, found: set[Node]) -> bool:
    if value is None:
        return False
    readers = (reference() for reference in value.storage.readers)
    return value.is_held or any(
        reader in found and any(operand is value for operand in reader.operands)
        for reader in readers
        if reader is not None
    )


def _pending_from(nodes: Sequence[Node]) -> list[Node]:
    """Pending calls and those that read their results, in order."""
    found: set[Node] = set()
    pending = [node for node in nodes if not node.done]
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            outputs = (node.output(index) for index in range(node.num_outputs))
            readers = (reference() for value in outputs if value is not None for reference in value.storage.readers)
            pending += [reader for reader in readers if reader is not None and not reader.done]
    return sorted(found, key=lambda node: node.sequence)


def _is_scalar(value: Value) -> bool:
    count = 1
    for size in value.prepass.shape:
        count *= size
    return count == 1


def _producer(value: Value) -> Node:
    assert value.node is not None
    return value.node


def _bases(value: Value) -> Iterator[Value]:
    """A pending value, what it is a view of, and so on, down to the value whose producer made the memory."""
    operand: Value | torch.Tensor | None = value
    while isinstance(operand, Value) and operand.node is not None:
        yield operand
        shares = operand.node.inference.outputs[operand.index].shares
        operand = None if shares is None else operand.node.operands[shares]


def _base(value: Value) -> Value:
    """The value whose producer made the memory that a view lies in."""
    *_, base = _bases(value)
    return base
