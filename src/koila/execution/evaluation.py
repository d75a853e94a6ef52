"""Evaluation: from a demand to bound values and committed gradients.

*Takes* pending values, or a backward request. *Gives* the values bound to real tensors, and gradients committed.

A program runs whole (deferred eager execution) unless the budget asks for chunks. In chunks, values and gradients of a
scalar are computed in one joint run where a backward is asked for, or where one followed the last time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from koila import events
from koila._budget import current_budget, result_bytes
from koila.analysis.trace import Demand
from koila.analysis.types import Sliced
from koila.capture.lookup import BackwardRequest
from koila.capture.recorder import Recorder
from koila.execution.programs import NotSplittable, Program, Results, Selection, batch_size
from koila.execution.segment import Demanded, Gradients, SegmentState, attach
from koila.execution.transaction import gradients_restored_on_error, write_effects
from koila.execution.whole import run_whole
from koila.interfaces import BatchInfo
from koila.ir.cache import Cache
from koila.ir.graph import Graph, collect
from koila.ir.node import Node, Value
from koila.ir.source import user_site


class Evaluation:
    """One graph on its way to real tensors: what is wanted, what else the user holds, what is differentiated."""

    def __init__(self, graph: Graph, wanted: Sequence[Value], effects: set[Node]) -> None:
        self.effects = effects
        held = {out for node in graph.nodes for i in range(node.num_outputs)
                if (out := node.output(i)) is not None and out.is_held and out.real is None}  # fmt: skip
        everything = {*wanted, *held}
        # The order of the outputs depends on the program only, not on who asked for what.
        place = {node: index for index, node in enumerate(graph.nodes)}
        pending = [value for value in everything if value.node is not None]
        outputs = sorted(pending, key=lambda value: (place[value.node], value.index))  # type: ignore[index]
        self.graph = Graph(graph.nodes, tuple(outputs))
        self.wanted = set(wanted)

    @property
    def wrt(self) -> tuple[int, ...]:
        """Leaves that require grad."""
        return tuple(index for index, leaf in enumerate(self.graph.leaves) if leaf.requires_grad)

    def scalar_roots(self) -> tuple[int, ...]:
        """Wanted scalars that could be differentiated without a seed."""
        outputs = enumerate(self.graph.outputs)
        return tuple(i for i, v in outputs if v in self.wanted and v.requires_grad and _numel(v) == 1)

    def fitting(self) -> tuple[int, ...]:
        """What is wanted or kept on purpose, and of what else the user holds, the smallest that fit."""
        room = result_bytes()
        chosen = [i for i, value in enumerate(self.graph.outputs) if value in self.wanted or value.keep]
        others = (i for i in range(len(self.graph.outputs)) if i not in chosen)
        for index in sorted(others, key=lambda i: self.graph.outputs[i].prepass.num_bytes):
            room -= self.graph.outputs[index].prepass.num_bytes
            if room >= 0:
                chosen.append(index)
        if len(chosen) < len(self.graph.outputs):
            events.count("results::too large to keep", len(self.graph.outputs) - len(chosen))
        return tuple(sorted(chosen))


def _numel(value: Value) -> int:
    count = 1
    for size in value.prepass.shape:
        count *= size
    return count


class Engine:
    """The realizer: decides how a program runs, runs it, and binds what came out."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._demanded: Cache[Demanded] = Cache("demand_cache", 256)
        self._backs_off: set[Any] = set()

    def materialize(self, values: Sequence[Value], why: str) -> None:
        """Bind pending values to real tensors, and perform the pending effects."""
        pending = [value for value in values if value.real is None or value.storage.writers]
        graph = collect(pending, self._recorder.effects)
        if graph.nodes:
            self._run(Evaluation(graph, pending, set(self._recorder.effects)), None)

    def backward(self, request: BackwardRequest) -> None:
        """Run forward and backward, and leave the gradients where PyTorch's backward would."""
        involved = [v for v in (*request.roots, *(request.inputs or ())) if isinstance(v, Value)]
        pending = [value for value in involved if value.real is None or value.storage.writers]
        graph = collect(pending, self._recorder.effects)
        if graph.nodes:
            self._run(Evaluation(graph, pending, set(self._recorder.effects)), request)
        _backward_on_real(request)
        self._recorder.new_epoch()

    def batch_of(self, value: Value) -> BatchInfo | None:
        """Trace and type the program behind a value; nothing is run."""
        if value.real is not None:
            return None if value.batch is None else BatchInfo(value.batch, value.real.shape[value.batch])
        graph = collect([value], [])
        program = Program(graph, Demand())
        facts = program.compiled(Selection((0,)), 1).plan.facts
        output = next(node for node in program.joint.module.graph.nodes if node.op == "output")
        kind = facts.types[output.args[0][0].name]
        return BatchInfo(kind.dim, facts.num_samples) if isinstance(kind, Sliced) else None

    # Deciding.

    def _run(self, evaluation: Evaluation, request: BackwardRequest | None) -> None:
        started = time.perf_counter()
        chunk_size, samples = current_budget().chunk_size, batch_size(evaluation.graph)
        how = "whole"
        if chunk_size is not None and chunk_size < samples:
            try:
                self._run_split(evaluation, request, chunk_size)
                how = "split"
            except NotSplittable as reason:
                self._fall_back(str(reason))
        if how == "whole":
            evaluation.graph.check_fresh()
            results = run_whole(evaluation.graph, evaluation.effects)
            self._bind(evaluation.graph, results)
        events.count("runs")
        events.count(f"runs::{how}")
        events.sample("run_seconds", time.perf_counter() - started)

    def _fall_back(self, reason: str) -> None:
        site = str(user_site())
        events.count(f"fallback::{reason}", site=site)
        events.emit(events.Fallback("split run", reason, site))

    # The split run.

    def _run_split(self, evaluation: Evaluation, request: BackwardRequest | None, chunk_size: int) -> None:
        graph = evaluation.graph
        if any(node.func in _HOOKS for node in graph.nodes):
            raise NotSplittable("hooks on lazy values see whole gradients")
        if request is not None and request.create_graph:
            raise NotSplittable("create_graph=True needs the graph of the whole run")
        demand, seeds = self._demand(evaluation, request)
        program = Program(graph, demand)
        with_gradients = bool(demand.roots) and (request is not None or self._expects_backward(program.key))
        outputs = evaluation.fitting()
        selection = Selection(outputs, with_gradients, effects=bool(evaluation.effects))
        graph.check_fresh()
        results = program.run(selection, chunk_size, seeds)
        write_effects(graph, results.written, evaluation.effects)
        self._bind_split(evaluation, program, results, with_gradients, seeds, chunk_size)

    def _demand(
        self, evaluation: Evaluation, request: BackwardRequest | None
    ) -> tuple[Demand, tuple[torch.Tensor | None, ...]]:
        """What to differentiate: the request's roots, or a scalar that may be differentiated later."""
        outputs = {value: index for index, value in enumerate(evaluation.graph.outputs)}
        if request is None:
            roots = evaluation.scalar_roots()
            seeds: tuple[torch.Tensor | None, ...] = (None,) * len(roots)
        else:
            pairs = [(outputs[r], g) for r, g in zip(request.roots, request.gradients, strict=True) if r in outputs]  # type: ignore[index]
            roots, seeds = tuple(root for root, _ in pairs), tuple(seed for _, seed in pairs)
            if any(s is None and _numel(evaluation.graph.outputs[r]) != 1 for r, s in pairs):
                raise RuntimeError("grad can be implicitly created only for scalar outputs")
        wrt = evaluation.wrt if roots else ()
        return Demand(roots if wrt else (), tuple(s is not None for s in seeds) if wrt else (), wrt), seeds

    def _expects_backward(self, key: Any) -> bool:
        """Learned demand: a backward followed the last time, and no guess was wrong."""
        last = self._demanded.get(key)
        if last is None or key in self._backs_off:
            return False
        if last.guessed and not last.asked:
            self._backs_off.add(key)
            events.count("learned_demand::wrong")
        return last.asked

    def _bind_split(
        self,
        evaluation: Evaluation,
        program: Program,
        results: Results,
        with_gradients: bool,
        seeds: tuple[torch.Tensor | None, ...],
        chunk_size: int,
    ) -> None:
        graph = evaluation.graph
        leaves = [leaf for leaf in graph.leaves if leaf.requires_grad]
        differentiable = [i for i in results.outputs if graph.outputs[i].requires_grad]
        bound = {graph.outputs[index]: real for index, real in results.outputs.items()}
        if differentiable and leaves:
            values = [_fresh(results.outputs[index], graph.leaves) for index in differentiable]
            demanded = self._demanded.add(program.key, Demanded(with_gradients))
            state = SegmentState(_rerun(graph, differentiable, chunk_size), demanded)
            if with_gradients:
                given = dict(zip(program.demand.roots, seeds, strict=True))
                state.held = results.gradients
                state.seeds = tuple(
                    _seed(given[i], values[n]) if i in given else None for n, i in enumerate(differentiable)
                )
            attached = attach(state, values, leaves)
            bound.update({graph.outputs[index]: real for index, real in zip(differentiable, attached, strict=True)})
        self._bind(graph, bound)

    # Binding.

    def _bind(self, graph: Graph, results: dict[Value, torch.Tensor]) -> None:
        """The values are real now, and what was executed is no longer pending."""
        executed = set(graph.nodes)
        for value, real in results.items():
            value.bind(real)
        storages = {v.storage for node in graph.nodes for v in node.values()}
        storages.update(storage for node in graph.nodes for storage in node.storages)
        storages.update(value.storage for value in results)
        for storage in storages:
            storage.writers = [writer for writer in storage.writers if writer not in executed]
            storage.readers = [r for r in storage.readers if (n := r()) is not None and n not in executed]
        left = [node for node in self._recorder.effects if node not in executed]
        left += [writer for value in results for writer in value.storage.writers if writer not in left]
        self._recorder.effects = sorted(left, key=lambda node: node.sequence)
        self._recorder.new_epoch()


_HOOKS = {torch.Tensor.register_hook, torch.Tensor.retain_grad}


def _seed(given: torch.Tensor | None, value: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(value) if given is None else given


def _fresh(value: torch.Tensor, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    """A result that is not an input of the program itself: autograd's node must own its outputs."""
    storage = value.untyped_storage()._cdata
    return value.clone() if any(leaf.untyped_storage()._cdata == storage for leaf in leaves) else value


def _rerun(graph: Graph, differentiable: list[int], chunk_size: int) -> Any:
    """The gradients of a segment by running its program again in chunks, for any gradients of its outputs."""

    def gradients(incoming: Sequence[torch.Tensor | None]) -> Gradients:
        events.count("segment::rerun")
        roots = tuple(index for index, g in zip(differentiable, incoming, strict=True) if g is not None)
        seeds = tuple(g for g in incoming if g is not None)
        wrt = tuple(index for index, leaf in enumerate(graph.leaves) if leaf.requires_grad)
        scalar = len(roots) == 1 and seeds[0].numel() == 1
        program = Program(graph, Demand(roots, (False,) if scalar else (True,) * len(roots), wrt))
        found = program.run(Selection((), gradients=True), chunk_size, seeds).gradients
        if scalar:
            for gradient in found:
                if gradient is not None and float(seeds[0]) != 1.0:
                    gradient.mul_(seeds[0])
        return found

    return gradients


def _real(tensor: Value | torch.Tensor) -> torch.Tensor:
    real = tensor.real if isinstance(tensor, Value) else tensor
    assert real is not None
    return real


def _backward_on_real(request: BackwardRequest) -> None:
    roots = [_real(root) for root in request.roots]
    inputs = None if request.inputs is None else [_real(tensor) for tensor in request.inputs]
    with gradients_restored_on_error(roots, inputs):
        torch.autograd.backward(
            roots,
            request.gradients,
            retain_graph=request.retain_graph,
            create_graph=request.create_graph,
            inputs=inputs,
        )
