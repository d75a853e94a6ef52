"""What eager's autograd refuses, and a run in chunks, which keeps no graph, would not notice by itself.

*Takes* a program that is differentiated. *Gives* PyTorch's own error where eager raises it: for a second backward pass
through what the first one has freed, and for a value that was changed in place after it was saved.

Whether autograd saved anything at a place is PyTorch's knowledge. So if there is a reason to ask (a call was
differentiated before, a value was written to since), the program is replayed on fake tensors, with the same earlier
backward pass and the same writes, and differentiated: autograd itself answers. Without a reason nothing is replayed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from koila import events
from koila._torch import FakeTensorMode, current_backward, in_turn, write_count
from koila.ir.graph import Graph, collect, connected_nodes
from koila.ir.node import HOOKS, Node, Value
from koila.ir.replay import replay
from koila.ir.stand_ins import StandIns

_RECORDED = -2
"""Stands for a backward pass that was a recorded call."""
_REFUSALS = ("Trying to backward through the graph a second time", "modified by an inplace operation")


class GradientCheck:
    """Whether eager would differentiate the outputs of a program.

    Args:
        graph: The program; its outputs are differentiated.
        connected: The calls through which gradients go, found before the outputs are bound.
    """

    def __init__(self, graph: Graph, connected: set[Node]) -> None:
        self._graph, self._connected = graph, connected
        self._versions: dict[Value, int] = {}

    def watch(self, bound: Mapping[Value, torch.Tensor]) -> None:
        """These values of the program are real tensors now: writes to them are noticed."""
        own = ((value, real) for value, real in bound.items() if value in self._graph.produced)
        self._versions = {value: write_count(real) for value, real in own if not real.is_inference()}

    def freed(self) -> None:
        """A backward pass without `retain_graph` has gone through the program."""
        for node in self._connected:
            node.freed = current_backward()

    def raise_eagers_error(self, changed: Sequence[torch.Tensor] = ()) -> None:
        """Raise what eager would raise if the program were differentiated now.

        Args:
            changed: Leaves that were written to since the program ran.

        Raises:
            RuntimeError: PyTorch's own error.
        """
        own = (None, current_backward())  # One pass may come through several segments.
        freed = [node for node in self._connected if node.freed not in own]
        written = self._written()
        if not freed and not written and not changed:
            return
        try:
            _differentiate(self._graph, freed, written, changed)
        except RuntimeError as error:
            if any(text in str(error) for text in _REFUSALS):
                where = written[0].node if written and written[0].node is not None else self._graph.nodes[-1]
                raise RuntimeError(f"{error}\n(koila: the program was recorded at {where.site})") from None
            events.count(f"gradient_check::unknown::{type(error).__name__}", site=self._graph.nodes[-1].site)

    def _written(self) -> list[Value]:
        """Values that were changed after the program had used them: by a pending call, or as real tensors."""
        graph = self._graph
        found = [
            value
            for value in graph.produced
            if any(node not in graph.positions and node.func not in HOOKS for node in value.storage.writers)
        ]
        bound = (value for value, version in self._versions.items() if value.real is not None)
        return found + [value for value in bound if _version(value) != self._versions[value]]


def _version(value: Value) -> int:
    assert value.real is not None
    return write_count(value.real)


@in_turn
def _differentiate(
    graph: Graph, freed: Iterable[Node], written: Iterable[Value], changed: Iterable[torch.Tensor]
) -> None:
    """Do on fake tensors what eager would do by now, and differentiate the outputs."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.autograd.set_detect_anomaly(False):
        fakes = StandIns(graph)
        environment = fakes.environment
        replay(fakes.calls, environment, lambda node: fakes.lookup, fakes.numbers)
        before = (node.output(index) for node in freed for index in range(node.num_outputs))
        _backward([environment[value] for value in before if value in environment])
        with torch.no_grad():
            for value in written:
                if value in environment:
                    environment[value].detach().zero_()
            for leaf in changed:
                fakes.leaves[id(leaf)].detach().zero_()
        _backward([environment[value] for value in graph.outputs if value in environment])


def _backward(values: list[torch.Tensor]) -> None:
    roots = [value for value in values if value.requires_grad]
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])


def check_again(graph: Graph, roots: Iterable[Any]) -> None:
    """Raise eager's error if a program is computed once more, to be differentiated a second time."""
    if any(node.freed is not None for node in graph.nodes):
        own = collect([root for root in roots if isinstance(root, Value) and root in graph.produced], [])
        GradientCheck(own, connected_nodes(own, own.outputs)).raise_eagers_error()


def note_recorded_gradients(graph: Graph) -> None:
    """The program has run: what its calls of `autograd.grad` went through without `retain_graph` is freed."""
    for node in graph.nodes:
        if frees_graph(node):
            outputs, inputs = node.args[:2]
            _free_between(graph, _tuple(outputs), _tuple(inputs))


def frees_graph(node: Node) -> bool:
    """Whether a call is an `autograd.grad` without `retain_graph`."""
    if node.func is not torch.autograd.grad:
        return False
    retains, creates = node.args[3:5]
    return not (creates if retains is None else retains)


def _tuple(tensors: Any) -> tuple[Any, ...]:
    return tuple(tensors) if isinstance(tensors, (list, tuple)) else (tensors,)


def _free_between(graph: Graph, outputs: Iterable[Any], inputs: Iterable[Any]) -> None:
    """Mark the calls on the ways from outputs to inputs."""
    wanted = {id(each) for each in inputs}
    wanted |= {id(each.real) for each in inputs if isinstance(each, Value) and each.real is not None}
    leading: set[Node] = set()
    for node in graph.nodes:
        reals = (operand.real if isinstance(operand, Value) else operand for operand in node.operands)
        follows = any(value.node in leading for value in node.values())
        if follows or any(id(each) in wanted for each in (*node.operands, *reals)):
            leading.add(node)
    for node in connected_nodes(graph, [value for value in outputs if isinstance(value, Value)]) & leading:
        node.freed = _RECORDED
