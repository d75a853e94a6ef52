"""The joint trace: a recorded program becomes one functional graph of aten operators, forward and backward.

*Takes* a `Graph` and a `Demand` (which values, which gradients). *Gives* a `Joint`: an FX graph over fake tensors that
holds no real tensor, so that every later program of the same structure can use it.

The recorded calls are replayed on fake tensors under `make_fx`, then the result is functionalised. Batch
normalisation and losses are decomposed on the way (`koila.analysis.decompositions`): this graph is for cutting; an
unsplit run replays the recorded calls instead, and one that is only shrunk keeps the kernels of batch normalisation.
Python floats that vary between steps are traced as marks, numbers that occur nowhere else, and found again in the
graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from koila import events
from koila._torch import (
    FakeTensor,
    FakeTensorMode,
    RunMode,
    dissolve,
    get_proxy_mode,
    graph_root,
    in_turn,
    make_fx,
    ordinary_dispatch,
    without_saved_tensors_hooks,
)
from koila.analysis.addressing import address_from_bases
from koila.analysis.decompositions import decompositions
from koila.analysis.decompositions.checks import TracedFunctions, check_in_kernel
from koila.analysis.functional import is_mutable, without_writes
from koila.analysis.marks import Marks, Place, place_slots
from koila.analysis.overlaps import check_overlaps
from koila.analysis.peephole import simplify_losses
from koila.analysis.positions import pick_by_position
from koila.analysis.slim import slim
from koila.analysis.twins import join_twins
from koila.capture.pending import recorder
from koila.errors import AnalysisError
from koila.ir.dtypes import is_refused
from koila.ir.graph import Graph, written_storages
from koila.ir.job import Demand
from koila.ir.layout import dense_strides
from koila.ir.node import Node, Storage, Value
from koila.ir.prepass import PrePass, prepass_of, with_bits
from koila.ir.replay import replay

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Input:
    """What a placeholder of the joint graph stands for."""

    kind: str
    """`leaf`, `draw` or `seed`."""
    index: int
    """Index of the leaf, of the node, or of the root."""
    draw: int = 0
    """Which of the node's draws."""


class Traced:
    """A graph, and the constants that it reads as attributes; nothing is generated from it."""

    def __init__(self, graph: fx.Graph, constants: dict[str, torch.Tensor]) -> None:
        self.graph = graph
        self.constants = constants
        for name, value in constants.items():
            setattr(self, name, value)

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ends():  # When Python ends, what is called here may be gone.
            dissolve(self.graph)  # Whoever reads its nodes holds the joint graph, and so this.


@dataclass(frozen=True)
class Joint:
    """Forward and backward of a program as one functional graph."""

    module: Traced
    inputs: tuple[Input, ...]
    """One for each placeholder, in order."""
    num_outputs: int
    """The first results of the graph are the outputs of the program."""
    wrt: tuple[int, ...]
    """Then one gradient (or None) for each of these leaves."""
    written: tuple[int, ...]
    """Then the new values of these leaves, which the program writes to."""
    pinned: tuple[tuple[int, int, float], ...]
    """(node, position, value) of slots that could not be found again: the graph holds for these values only."""
    completed: tuple[int, ...] = ()
    """The leaves of `wrt` in the order in which autograd completes their gradients: the order of hooks on them."""
    shares_memory: bool = False
    """Whether a call writes beside what it reads in the same memory: at other sizes it may be the same elements."""
    is_built: bool = False
    """Whether formulas gave it (`koila.analysis.family`), not a trace."""

    def pinned_in(self, graph: Graph) -> tuple[float, ...]:
        """The numbers that a graph of this structure has in the places of the pinned ones."""
        return tuple(graph.nodes[node].slots[position] for node, position, _ in self.pinned)

    def holds_for(self, graph: Graph) -> bool:
        """Whether a graph of this structure has the pinned numbers."""
        return self.pinned_in(graph) == tuple(value for _, _, value in self.pinned)


def _leaf_index(graph: Graph) -> dict[int, int]:
    return {id(leaf): number for number, leaf in enumerate(graph.leaves)}


def written_indices(graph: Graph) -> tuple[int, ...]:
    """Leaves whose data the program writes to: running statistics; other writes to real tensors never wait."""
    index, found = _leaf_index(graph), set[int]()
    for node in graph.nodes:
        for operand in (node.operands[i] for i in node.inference.hidden_writes):
            real = operand.real if isinstance(operand, Value) else operand
            if id(real) in index:
                found.add(index[id(real)])
    return tuple(sorted(found))


def _fake(mode: FakeTensorMode, prepass: PrePass) -> torch.Tensor:
    with mode:
        fake = torch.empty_strided(prepass.shape, prepass.stride, dtype=prepass.dtype, device=prepass.device)
        return with_bits(fake, prepass.bits)


def inputs_of(graph: Graph, demand: Demand) -> list[tuple[Input, PrePass]]:
    found = [(Input("leaf", number), prepass_of(leaf)) for number, leaf in enumerate(graph.leaves)]
    for number, node in enumerate(graph.nodes):
        for which, source in enumerate(node.draws):
            found.append((Input("draw", number, which), source.prepass()))
    for number, root in enumerate(demand.roots):
        found.append((Input("seed", number), seed_layout(graph.outputs[root].prepass)))
    return found


def seed_layout(prepass: PrePass) -> PrePass:
    """The layout in which a program takes the gradient of a value: the value's own, but dense."""
    stride = dense_strides(prepass.shape, prepass.stride)
    with torch.no_grad():
        return prepass_of(torch.empty_strided(prepass.shape, stride, dtype=prepass.dtype, device="meta")).on(
            prepass.device
        )


def _written_views(graph: Graph) -> set[Storage]:
    """Memory that is written to, and of which there are views."""
    written = written_storages(graph)
    return {value.storage for node in graph.nodes for value in node.values() if value.is_view} & written


def _check_layouts(node: Node, environment: dict[Value, Any], aliased: set[Storage]) -> None:
    """What is a view of a result, and what is a copy, depends on how the result lies in memory."""
    outputs = (node.output(index) for index in range(node.num_outputs) if aliased)
    for value in outputs:
        if value is not None and value.storage in aliased and value in environment:
            steps = zip(value.prepass.shape, value.prepass.stride, environment[value].stride(), strict=True)
            if any(size > 1 and recorded != traced for size, recorded, traced in steps):
                raise AnalysisError(f"{node.name} gives another layout in a trace, and a view of its result is written")


class _Program:
    """The function that is traced: replay forward, then differentiate."""

    def __init__(
        self, graph: Graph, demand: Demand, inputs: Sequence[Input], written: tuple[int, ...], plain: frozenset[Place]
    ) -> None:  # fmt: skip
        self.graph, self.demand, self.inputs, self.written = graph, demand, inputs, written
        self.marks = Marks(graph, plain)
        self.index = _leaf_index(graph)
        self.completed: list[int] = []

    def __call__(self, *tensors: torch.Tensor) -> list[Any]:
        by_input = dict(zip(self.inputs, tensors, strict=True))
        leaves = [by_input[Input("leaf", n)] for n in range(len(self.graph.leaves))]
        for number, real in enumerate(self.graph.leaves):
            if real.requires_grad and number not in self.written:
                leaves[number] = leaves[number].detach().requires_grad_()
        environment = self._forward(leaves, by_input)
        wanted = [self._value(value, environment, leaves) for value in self.graph.outputs]
        grads = self._backward(wanted, leaves, by_input)
        written = [leaves[number].detach() for number in self.written]
        return [*(value.detach() for value in wanted), *grads, *written]

    def _forward(self, leaves: list[torch.Tensor], by_input: dict[Input, torch.Tensor]) -> dict[Value, Any]:
        inputs = ((value, self.index.get(id(value.real))) for value in self.graph.bound)
        environment: dict[Value, Any] = {value: leaves[index] for value, index in inputs if index is not None}
        position = self.graph.positions

        def lookup(leaf: Any) -> Any:
            if type(leaf) is Value:
                return self._value(leaf, environment, leaves)
            return leaves[self.index[id(leaf)]] if isinstance(leaf, torch.Tensor) else leaf

        def numbers(node: Node) -> list[torch.Tensor]:
            return [by_input[Input("draw", position[node], which)] for which in range(len(node.draws))]

        lookup_for = lambda node: self.marks.lookup(position[node], node, lookup)  # noqa: E731
        tagger, aliased = _Tagger(), _written_views(self.graph)

        def after(node: Node) -> None:
            tagger.tag(position[node])
            _check_layouts(node, environment, aliased)

        replay(self.graph.nodes, environment, lookup_for, numbers, after)
        return environment

    def _value(self, value: Value, environment: dict[Value, Any], leaves: list[torch.Tensor]) -> Any:
        # A value of this program may have been bound since: its producer comes first.
        return environment[value] if value in environment else leaves[self.index[id(value.real)]]

    def _backward(
        self, wanted: list[torch.Tensor], leaves: list[torch.Tensor], by_input: dict[Input, torch.Tensor]
    ) -> list[torch.Tensor | None]:
        if not self.demand.wrt:
            return []
        roots = [wanted[number] for number in self.demand.roots]
        seeds = [by_input[Input("seed", number)] for number in range(len(roots))]
        wrt = [leaves[number] for number in self.demand.wrt]
        for number in (number for number in self.demand.wrt if leaves[number].requires_grad):
            leaves[number].register_hook(lambda _, number=number: self.completed.append(number))
        with _Refusals():
            return list(torch.autograd.grad(roots, wrt, seeds, allow_unused=True))


class _Refusals(RunMode):
    """Sees the operators of a backward pass before they are decomposed: what eager refuses is not traced."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_refused(func, args, kwargs or {}):
            raise AnalysisError(f"eager refuses the dtypes of an operator in the backward pass: {func}")
        return func(*args, **(kwargs or {}))


class _Tagger:
    """Notes on each traced node which recorded call it comes from; backward's nodes have no note."""

    def __init__(self) -> None:
        mode = get_proxy_mode()
        assert mode is not None
        self._graph = mode.tracer.graph
        self._last = graph_root(self._graph).prev

    def tag(self, number: int | None) -> None:
        """Whatever was traced since the last call belongs to recorded call `number`."""
        node = self._last.next
        while node is not graph_root(self._graph):
            if number is not None:
                node.meta["recorded"] = number
            node = node.next
        self._last = graph_root(self._graph).prev


class _Retrace(fx.Interpreter):
    """Runs a traced graph so that notes are carried over to the graph that is traced now."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.tagger = _Tagger()
        return super().run(*args, **kwargs)

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self.tagger.tag(n.meta.get("recorded"))
        return result


@in_turn
def trace(graph: Graph, demand: Demand, whole_norms: bool = False, plain: frozenset[Place] = frozenset()) -> Joint:
    """Trace a program once for all programs of its structure.

    Args:
        graph: The program.
        demand: What is differentiated.
        whole_norms: Whether it is for a program that is not cut.
        plain: Slots that are traced with their values, and pinned to them.
    """
    table = decompositions(whole_norms)
    written = written_indices(graph)
    pairs = inputs_of(graph, demand)
    inputs = tuple(found for found, _ in pairs)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    program = _Program(graph, demand, inputs, written, plain)
    # Whoever asks for a value may be in inference mode, or below the dispatch keys that tracing needs.
    with torch.inference_mode(False), ordinary_dispatch(), without_saved_tensors_hooks(), recorder.tracing():
        fakes = [_fake(mode, prepass) for _, prepass in pairs]
        with torch.enable_grad(), mode, TracedFunctions():
            module = make_fx(program, table)(*fakes)
        shares_memory = check_overlaps(module.graph)
        if any(map(is_mutable, module.graph.nodes)) and not without_writes(module, mode, table):
            module = _functionalise(module, fakes, mode, table)
    _check_inputs(module, fakes)
    _simplify(module)
    address_from_bases(module.graph)
    if not whole_norms:
        simplify_losses(module.graph)
    positions = [Input("leaf", number) for number in graph.counting]
    pick_by_position(module.graph, [n for n, i in zip(module.graph.nodes, inputs, strict=False) if i in positions])
    _check_functional(module)
    pinned, spoiled = place_slots(module.graph, program.marks, graph)
    if spoiled:
        return trace(graph, demand, whole_norms, plain | spoiled)
    events.count("traces")
    completed = tuple(dict.fromkeys(program.completed))
    slim(module.graph)
    names = (str(node.target) for node in module.graph.nodes if node.op == "get_attr")
    traced = Traced(module.graph, {name: getattr(module, name) for name in names})
    return Joint(traced, inputs, len(graph.outputs), demand.wrt, written, pinned, completed, shares_memory)


def _functionalise(
    module: fx.GraphModule, fakes: Sequence[torch.Tensor], mode: FakeTensorMode, table: dict[Any, Any]
) -> fx.GraphModule:
    with torch.no_grad(), mode:
        again = make_fx(torch.func.functionalize(_Retrace(module).run, remove="mutations"), table)(*fakes)
    for node in reversed(again.graph.nodes):
        # The write-back to an input: the run returns the new value and commits it later (Rule 4).
        if node.target is aten.copy_.default and node.args[0].op == "placeholder":
            node.replace_all_uses_with(node.args[1])
            again.graph.erase_node(node)
    return again


_SCATTERS = {aten.slice_scatter.default, aten.select_scatter.default, aten.diagonal_scatter.default}
_PASS_THROUGH = {aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default, aten.lift_fresh.default}


def _simplify(module: fx.GraphModule) -> None:
    for node in module.graph.nodes:
        if node.target in _PASS_THROUGH:
            node.replace_all_uses_with(node.args[0])
        elif node.target is aten.copy.default:
            _replace_by_source(module.graph, node)
        elif node.target is aten.t.default and node.args[0].target is aten.t.default:
            node.replace_all_uses_with(node.args[0].args[0])
        elif node.target is aten._linalg_check_errors.default:
            check_in_kernel(node)
    join_twins(module.graph)
    module.graph.eliminate_dead_code()


def _replace_by_source(graph: fx.Graph, node: fx.Node) -> None:
    """A copy over all of a tensor depends on what is copied alone."""
    source, fake = node.args[1], node.meta["val"]
    if not isinstance(source, fx.Node) or source.meta["val"].shape != fake.shape:
        return
    # What follows was traced for the layout of the copy; a scatter does not look at it.
    same = source.meta["val"].stride() == fake.stride() and fake.is_contiguous()
    if not same and not all(user.target in _SCATTERS and user.args[1] is node for user in node.users):
        return
    if source.meta["val"].dtype != fake.dtype:
        with graph.inserting_before(node):
            cast = graph.call_function(aten._to_copy.default, (source,), {"dtype": fake.dtype})
        cast.meta["val"] = fake
        source = cast
    node.replace_all_uses_with(source)


def _check_inputs(module: fx.GraphModule, fakes: Sequence[torch.Tensor]) -> None:
    """A trace that looked at the memory of stand-ins holds numbers instead of a program: it is never kept."""
    if not all(isinstance(fake, FakeTensor) for fake in fakes):
        raise AnalysisError("the program was traced on tensors that are not fake")
    depends: set[fx.Node] = set()
    for node in module.graph.nodes:
        if node.op == "placeholder" or any(argument in depends for argument in node.all_input_nodes):
            depends.add(node)
    results = module.graph.output_node().all_input_nodes
    constants = any(node.op == "get_attr" for node in module.graph.nodes)
    if constants and results and not any(result in depends for result in results):
        raise AnalysisError("no result of the traced graph depends on the program's inputs")


_LIARS = {aten.native_batch_norm.default, aten._native_batch_norm_legit.default}


def _check_functional(module: fx.GraphModule) -> None:
    for node in module.graph.nodes:
        if is_mutable(node) or (node.target in _LIARS and node.args[5]):
            raise AnalysisError(f"the traced graph writes in place: {node.target}")
        if node.op == "get_attr" and not isinstance(node.target, str):
            raise AnalysisError(f"the traced graph holds {node.target}")
