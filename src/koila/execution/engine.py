"""The engine: from a demand to bound values and committed gradients.

*Takes* pending values, or a backward request. *Gives* the values bound to real tensors, and gradients committed.

A program runs whole (deferred eager execution) unless the budget asks for chunks. In chunks, values and gradients of a
scalar are computed in one joint run where a backward is asked for, or where one followed the last time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from koila import events
from koila._budget import Budget, current_budget, default_bytes, result_bytes
from koila.analysis.trace import Demand
from koila.capture.lookup import BackwardRequest
from koila.capture.pending import Recorder
from koila.errors import StaleInputError
from koila.execution.evaluation import Evaluation, connected_leaves
from koila.execution.memory import give_back, is_out_of_memory
from koila.execution.programs import NotSplittable, Program, Results, Selection, correct
from koila.execution.projection import project_whole
from koila.execution.report import Notes, Report, measuring
from koila.execution.segment import Demanded, Gradients, SegmentState, attach, scaled
from koila.execution.tracker import StorageTracker
from koila.execution.transaction import (
    gradients_restored_on_error,
    is_from_user,
    leaves_behind,
    restored_on_error,
    write_effects,
)
from koila.execution.whole import gradients_whole, run_whole, written_leaves
from koila.interfaces import BatchInfo
from koila.ir.cache import Cache
from koila.ir.graph import Graph, collect
from koila.ir.node import Node, Value, version_of
from koila.ir.prepass import prepass_of
from koila.ir.source import user_site
from koila.planning.memory import Projection
from koila.planning.search import refusal
from koila.planning.shelf import shelf_in

Seeds = tuple[torch.Tensor | None, ...]


class Engine:
    """The realizer: decides how a program runs, runs it, and binds what came out."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._demanded: Cache[Demanded] = Cache("demand_cache", 256)
        self._backs_off: set[Any] = set()
        self.last_report = Report()
        """What the last run did."""
        self._notes, self._noted = Notes(), False

    def materialize(self, values: Sequence[Value], why: str) -> None:
        """Bind pending values to real tensors, and perform the pending effects."""
        with self._noting():
            self._realize(values, None, whole=why == "grad_fn")

    def backward(self, request: BackwardRequest) -> None:
        """Run forward and backward, and leave the gradients where PyTorch's backward would."""
        involved = [v for v in (*request.roots, *(request.inputs or ())) if isinstance(v, Value)]
        due = collect(involved, self._recorder.effects)
        try:
            seeds = [_own_seed(*pair) for pair in zip(request.roots, request.gradients, strict=True)]
            with self._noting(), restored_on_error(written_leaves(due), unless=is_from_user):
                self._realize(involved, request)
                changing = self._accumulating(request)
                if self._notes.how == "split":
                    # It changes no gradient before its commit, which is PyTorch's own addition: no copies.
                    changing = [tensor for tensor in changing if tensor.grad is None]
                with gradients_restored_on_error(changing, unless=is_from_user):
                    _backward_on_real(request, seeds)
        except BaseException:
            self._drop_effects(due.nodes)
            raise
        self._recorder.new_epoch()

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Note what a run does; measure it if somebody wants to know."""
        if self._noted:  # A run within a run: a hook that forces a value.
            yield
            return
        self._notes, self._noted = Notes(), True
        scopes = list(measuring())
        tracker = StorageTracker() if scopes else None
        try:
            with tracker or nullcontext():
                yield
        finally:
            self._noted = False
            if tracker is not None:
                self._notes.measured_bytes = tracker.peak_bytes
            self.last_report = self._notes.report()
            if self.last_report.how != "nothing ran":
                for scope in scopes:
                    scope.reports.append(self.last_report)
                _learn(self._notes)

    def _accumulating(self, request: BackwardRequest) -> list[torch.Tensor]:
        """Tensors whose .grad a backward may change."""
        roots = [root for root in request.roots if isinstance(root, Value)]
        found = list(collect(roots, []).leaves)
        reals = [root.real if isinstance(root, Value) else root for root in request.roots]
        real_inputs = [real for real in (*found, *reals) if real is not None and real.requires_grad]
        return [real for real in real_inputs if real.is_leaf] + leaves_behind(real_inputs)

    def before_step(self, parameters: Sequence[torch.Tensor]) -> None:
        """An optimizer is about to change parameters: run what the user holds and is pending on them, if it fits."""
        nodes = self._recorder.pending()
        changed, due = {id(parameter) for parameter in parameters}, []
        dependent: set[Node] = set()
        for node in nodes:
            reads = any(id(o) in changed for o in node.operands) or any(v.node in dependent for v in node.values())
            if reads:
                dependent.add(node)
                outputs = (node.output(index) for index in range(node.num_outputs))
                due += [v for v in outputs if v is not None and v.node is not None and v.is_held]
        due = [value for value in due if value.prepass.num_bytes <= result_bytes()]
        if due:
            events.count("forced::optimizer step", site=user_site())
            self.materialize(due, "optimizer step")

    def batch_of(self, value: Value) -> BatchInfo | None:
        """Trace and type the program behind a value; nothing is run."""
        if value.real is not None:
            return None if value.batch is None else BatchInfo(value.batch, value.real.shape[value.batch])
        program = Program(collect([value], []), Demand())
        dim = program.compiled(Selection((0,)), 1).batch_dims.get(0)
        return None if dim is None else BatchInfo(dim, program.num_samples)

    # Deciding.

    def _realize(self, values: Sequence[Value], request: BackwardRequest | None, whole: bool = False) -> None:
        pending = [value for value in values if value.real is None or value.storage.writers]
        effects = self._recorder.effects
        graph = collect(pending, effects)
        if not graph.nodes:
            return
        whole = whole or not self._is_cut(graph, current_budget(graph.budgets))
        if whole:
            # Eager would have run everything by now, in this order; autograd's order of summation depends on it.
            graph = collect(pending, [*effects, *self._recorder.pending()])
        elif effects:
            # What another program writes is computed for itself: it has a batch of its own.
            graph, others = graph.apart()
            for other in others:
                self._perform(other)
            if not graph.nodes:
                return
        try:
            self._run(Evaluation(graph, pending, {node for node in graph.nodes if node.due}), request, whole)
        except BaseException as error:
            own = collect(pending, [])
            if len(own.nodes) == len(graph.nodes) or not isinstance(error, Exception):
                self._drop_effects(own.nodes)
                raise
            # Something else that was pending may have failed: what was asked for stands for itself.
            self._run_alone(own, pending, request, whole)

    def _run_alone(self, graph: Graph, wanted: list[Value], request: BackwardRequest | None, whole: bool) -> None:
        """Run a program without what else is pending; the others' effects are performed one by one, or dropped."""
        due = [node for node in graph.nodes if node.due]
        for node in [node for node in self._recorder.effects if node not in graph.positions]:
            self._perform(collect([], [node]))
        try:
            if graph.nodes:
                self._run(Evaluation(graph, wanted, set(due)), request, whole)
        except BaseException:
            self._drop_effects(graph.nodes)
            raise

    def _perform(self, graph: Graph) -> None:
        """Run a program for its effects alone."""
        due = {node for node in graph.nodes if node.due}
        whole = not self._is_cut(graph, current_budget(graph.budgets))
        try:
            self._run(Evaluation(graph, [], due), None, whole)
        except Exception:  # Whoever asks for its value will see the error.
            events.count("effects::dropped", site=graph.nodes[-1].site)
            self._drop_effects(graph.nodes)

    def _is_cut(self, graph: Graph, budget: Budget) -> bool:
        if budget.chunk_size is not None:
            return budget.chunk_size < graph.num_samples
        return not budget.is_default or _may_be_too_large(graph, budget)

    def _drop_effects(self, nodes: Sequence[Node]) -> None:
        """A run that failed leaves no writes behind that every later run would try again (Rule 4)."""
        dropped = {node for node in nodes if node.due}
        for node in dropped:
            node.due = False
        failed = set(nodes)
        for storage in {storage for node in nodes for storage in node.storages}:
            storage.writers = [writer for writer in storage.writers if writer not in dropped]
            storage.readers = [r for r in storage.readers if (n := r()) is not None and n not in failed]

    def _run(self, evaluation: Evaluation, request: BackwardRequest | None, whole: bool) -> None:
        started, notes = time.perf_counter(), self._notes
        evaluation.graph.check_fresh()
        budget = Budget() if whole else _resolved(current_budget(evaluation.graph.budgets))
        notes.how, notes.num_samples, notes.allowed_bytes = "whole", evaluation.graph.num_samples, budget.allowed_bytes
        if not whole and not self._fits_whole(evaluation, request, budget):
            try:
                self._run_split(evaluation, request, budget)
                notes.how = "split"
            except NotSplittable as reason:
                self._check_whole_fits(evaluation, request, budget, str(reason))
                self._fall_back(str(reason))
        if notes.how == "whole":
            self._run_whole(evaluation, request)
        events.count("runs")
        events.count(f"runs::{notes.how}")
        events.sample("run_seconds", time.perf_counter() - started)

    def _run_whole(self, evaluation: Evaluation, request: BackwardRequest | None) -> None:
        try:
            results = run_whole(evaluation.graph, evaluation.needed, evaluation.effects)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._count_retry(error)
            try:
                half = _projected_whole(evaluation, request).peak_bytes // 2
                self._run_split(evaluation, request, Budget(allowed_bytes=max(1, half), is_default=True))
                self._notes.how = "split"
            except NotSplittable:
                raise error from None
        else:
            self._bind(evaluation.graph, results)

    def _fits_whole(self, evaluation: Evaluation, request: BackwardRequest | None, budget: Budget) -> bool:
        if budget.allowed_bytes is None or any(node.func in _HOOKS for node in evaluation.graph.nodes):
            return False
        projection = _projected_whole(evaluation, request)
        fits = projection.peak_bytes <= budget.allowed_bytes
        if fits:
            self._notes.projected_bytes = projection.peak_bytes
        return fits

    def _check_whole_fits(
        self, evaluation: Evaluation, request: BackwardRequest | None, budget: Budget, reason: str
    ) -> None:
        """Rule 2: what cannot be cut and does not fit is refused before it runs."""
        if budget.allowed_bytes is not None and not self._fits_whole(evaluation, request, budget):
            projection = _projected_whole(evaluation, request)
            if projection.peak_bytes > budget.allowed_bytes and not budget.is_default:
                why = f"{projection.largest}; it runs whole: {reason}"
                raise refusal(projection.peak_bytes, budget.allowed_bytes, why)

    def _fall_back(self, reason: str) -> None:
        self._notes.fallbacks.append(reason)
        _count_fallback(reason)

    def _count_retry(self, error: Exception) -> None:
        """Memory ran out: give back what can be given back, and say so (Rule 6)."""
        self._notes.retries += 1
        events.count("retries", site=user_site())
        error.__traceback__ = None  # Its frames hold the tensors of the run that failed.
        give_back()

    # The split run.

    def _run_split(self, evaluation: Evaluation, request: BackwardRequest | None, budget: Budget) -> None:
        graph = evaluation.graph
        _check_splittable(graph, request)
        demand, seeds = self._demand(evaluation, request)
        program = Program(graph, demand)
        with_gradients = bool(demand.roots) and (request is not None or self._expects_backward(program.key))
        selection = Selection(evaluation.fitting(), with_gradients, effects=bool(evaluation.effects))
        if selection == Selection():
            raise NotSplittable("only views are wanted")
        results = self._run_until_it_fits(program, selection, budget, seeds)
        bound = self._attach(evaluation, program, results, seeds, budget)
        write_effects(graph, results.written)
        self._bind(graph, bound)
        for index, dim in results.batch_dims.items():
            graph.outputs[index].batch = dim  # A later program that starts from it can be cut, too.
        derived = [value for value in evaluation.derived if value.storage.real]
        if derived:
            views = collect(derived, [])
            self._bind(views, run_whole(views, set(derived), set()))

    def _run_until_it_fits(self, program: Program, selection: Selection, budget: Budget, seeds: Seeds) -> Results:
        """Run; if memory runs out all the same, with smaller and smaller plans."""
        notes = self._notes
        while True:
            compiled = program.plan(selection, budget)
            notes.plan, notes.projected_bytes, notes.phase_seconds = compiled.plan, compiled.projected_bytes, []
            notes.program, notes.tune = (program.key, selection), budget.tune
            try:
                with shelf_in(budget.offload):
                    return program.run(compiled, selection, seeds, notes.phase_seconds)
            except Exception as error:
                smaller = program.smaller(compiled, selection, budget) if is_out_of_memory(error) else None
                if smaller is None:
                    raise
                self._count_retry(error)
                budget = smaller

    def _demand(self, evaluation: Evaluation, request: BackwardRequest | None) -> tuple[Demand, Seeds]:
        """What to differentiate: the request's roots, or a scalar that may be differentiated later."""
        outputs = {value: index for index, value in enumerate(evaluation.graph.outputs)}
        if request is None:
            roots: tuple[int, ...] = evaluation.scalar_roots()
            seeds: Seeds = (None,) * len(roots)
        else:
            given = zip(request.roots, request.gradients, strict=True)
            pairs = [(outputs[root], seed) for root, seed in given if isinstance(root, Value) and root in outputs]
            roots, seeds = tuple(root for root, _ in pairs), tuple(seed for _, seed in pairs)
            if any(s is None and evaluation.graph.outputs[r].prepass.shape not in ((), (1,)) for r, s in pairs):
                roots, seeds = (), ()  # Eager's own error comes from the engine, on the real value.
        if not evaluation.wrt or not roots:
            return Demand(), ()
        return Demand(roots, tuple(seed is not None for seed in seeds), evaluation.wrt), seeds

    def _expects_backward(self, key: Any) -> bool:
        """Learned demand: a backward followed the last time, and no guess was wrong."""
        last = self._demanded.get(key)
        if last is None or key in self._backs_off:
            return False
        if last.guessed and not last.asked:
            self._backs_off.add(key)
            events.count("learned_demand::wrong")
        return last.asked

    def _attach(
        self, evaluation: Evaluation, program: Program, results: Results, seeds: Seeds, budget: Budget
    ) -> dict[Value, torch.Tensor]:
        """The outputs as ordinary tensors: those that require grad as results of autograd nodes on their leaves."""
        graph = evaluation.graph
        bound = {graph.outputs[index]: real for index, real in results.outputs.items()}
        roots = program.demand.roots if results.gradients else ()
        groups = [tuple(i for i in roots if i in results.outputs)] if roots else []
        # Results of one call share one node, as they do in eager's autograd.
        siblings: dict[Any, list[int]] = {}
        for index in results.outputs:
            if graph.outputs[index].requires_grad and index not in roots:
                siblings.setdefault(graph.outputs[index].node, []).append(index)
        groups += [tuple(group) for group in siblings.values()]
        for group in groups:
            own = _own_graph(graph, group)
            leaves = tuple(sorted({leaf for value in own.outputs for leaf in connected_leaves(own, value)}))
            if not leaves:
                continue
            values = [_fresh(results.outputs[index], graph.leaves) for index in group]
            demanded = Demanded(guessed=group[0] in roots)
            state = SegmentState(_Again(own, leaves, budget), demanded)
            if group[0] in roots:
                chosen = {id(graph.leaves[n]): g for n, g in zip(program.joint.wrt, results.gradients, strict=True)}
                state.held = [chosen[id(own.leaves[leaf])] for leaf in leaves]
                del chosen
                state.seeds = tuple(_seed(seed, value) for seed, value in zip(seeds, values, strict=True))
                results.gradients.clear()
            if group[0] in program.demand.roots:
                self._demanded.add(program.key, demanded)
            attached = attach(state, values, [own.leaves[leaf] for leaf in leaves])
            bound.update(zip((graph.outputs[index] for index in group), attached, strict=True))
        return bound

    # Binding.

    def _bind(self, graph: Graph, results: dict[Value, torch.Tensor]) -> None:
        """The values are real now, and what was executed is no longer pending."""
        executed = set(graph.nodes)
        for node in executed:
            node.done, node.due = True, False
        for value, real in results.items():
            value.bind(real)
        storages = {v.storage for node in graph.nodes for v in node.values()}
        storages.update(storage for node in graph.nodes for storage in node.storages)
        storages.update(value.storage for value in results)
        for storage in storages:
            storage.writers = [writer for writer in storage.writers if writer not in executed]
            storage.readers = [r for r in storage.readers if (n := r()) is not None and n not in executed]
        self._recorder.new_epoch()


_HOOKS = {torch.Tensor.register_hook, torch.Tensor.retain_grad}


def _check_splittable(graph: Graph, request: BackwardRequest | None) -> None:
    if any(node.func in _HOOKS for node in graph.nodes):
        raise NotSplittable("hooks on lazy values see whole gradients")
    marked = [node.operands[0] for node in graph.nodes if node.func is torch.Tensor.requires_grad_]
    if any(isinstance(value, Value) and value.is_held for value in marked):
        raise NotSplittable("requires_grad_() on a lazy value makes a leaf that collects its own gradient")
    if request is not None and request.create_graph:
        raise NotSplittable("create_graph=True needs the graph of the whole run")


_whole_bytes: Cache[Projection] = Cache("projection_cache", 256)


def _projected_whole(evaluation: Evaluation, request: BackwardRequest | None) -> Projection:
    """What a whole run would allocate; the same for every program of this structure."""
    graph = evaluation.graph
    roots = [] if request is None else [r for r in request.roots if isinstance(r, Value) and r in graph.outputs]
    key = (graph.key, tuple(graph.outputs.index(root) for root in roots))
    return _whole_bytes.get_or_add(key, lambda: project_whole(graph, roots))


_LARGE_BYTES = 128 << 20
"""Without a budget, programs that make less than this are run as they are, without looking at what is free."""


def _may_be_too_large(graph: Graph, budget: Budget) -> bool:
    """Whether a program could need more than is free: everything it makes, twice, and its gradients."""
    made = sum(output.prepass.num_bytes for node in graph.nodes for output in node.inference.outputs)
    gradients = sum(leaf.numel() * leaf.element_size() for leaf in graph.leaves if leaf.requires_grad)
    rough = 2 * made + gradients
    return rough > _LARGE_BYTES and rough > default_bytes(budget.reserved_bytes)


def _resolved(budget: Budget) -> Budget:
    """The budget as bytes that a run may allocate now."""
    if budget.chunk_size is not None:
        return budget
    limit = default_bytes(budget.reserved_bytes) if budget.is_default else budget.limit()
    assert limit is not None
    if budget.is_default or budget.total_bytes is not None:
        # What is free changes all the time: plans are made for steps of an eighth.
        step = 1 << max(0, limit.bit_length() - 4)
        limit = limit // step * step
    return replace(budget, allowed_bytes=max(1, limit), total_bytes=None, reserved_bytes=0)


def _learn(notes: Notes) -> None:
    """A peak above the projection corrects the next plan, unless plans are frozen."""
    if notes.how != "split" or notes.measured_bytes is None or notes.projected_bytes is None:
        return
    if notes.measured_bytes > notes.projected_bytes:
        events.count("projection::too low")
        if notes.tune:
            events.count("plan::changed by measuring")
            correct(notes.program, notes.measured_bytes - notes.projected_bytes)


def _count_fallback(reason: str) -> None:
    site = str(user_site())
    events.count(f"fallback::{reason}", site=site)
    events.emit(events.Fallback("split run", reason, site))


def _seed(given: torch.Tensor | None, value: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(value) if given is None else given


def _fresh(value: torch.Tensor, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    """A result that is not an input of the program itself: autograd's node must own its outputs."""
    storage = value.untyped_storage()._cdata
    return value.clone() if any(leaf.untyped_storage()._cdata == storage for leaf in leaves) else value


def _own_graph(graph: Graph, group: tuple[int, ...]) -> Graph:
    """The part of a program that some of its outputs need: a segment depends on nothing else."""
    values = [graph.outputs[index] for index in group]
    needed = collect(values, [])
    if len(needed.nodes) == len(graph.nodes) and len(values) == len(graph.outputs):
        return graph
    return Graph(tuple(node for node in needed.nodes if node in graph.positions), tuple(values))


class _Again:
    """A segment's program, run again in chunks for any gradients of its outputs."""

    def __init__(self, graph: Graph, leaves: tuple[int, ...], budget: Budget) -> None:
        self.graph, self.leaves, self.budget = graph, leaves, budget
        self.versions = [version_of(leaf) for leaf in graph.leaves]

    def check_fresh(self) -> None:
        if [version_of(leaf) for leaf in self.graph.leaves] != self.versions:
            raise StaleInputError(
                "an input was changed after the forward pass and before the backward pass that needs it",
                where=f"recorded at {self.graph.nodes[0].site}",
                hint="change it after backward()",
            )

    def run(self, incoming: Sequence[torch.Tensor | None]) -> Gradients:
        events.count("segment::rerun")
        roots = tuple(index for index, g in enumerate(incoming) if g is not None)
        seeds = tuple(g for g in incoming if g is not None)
        try:
            return _gradients_split(self.graph, roots, seeds, self.leaves, self.budget)
        except NotSplittable as reason:
            _count_fallback(str(reason))
            return gradients_whole(self.graph, [self.graph.outputs[root] for root in roots], seeds, self.leaves)

    def differentiably(self, incoming: Sequence[torch.Tensor | None]) -> Gradients:
        events.count("segment::rerun")
        _count_fallback("create_graph=True needs the graph of the whole run")
        roots = [value for value, g in zip(self.graph.outputs, incoming, strict=True) if g is not None]
        seeds = [g for g in incoming if g is not None]
        return gradients_whole(self.graph, roots, seeds, self.leaves, create_graph=True)


def _gradients_split(
    graph: Graph, roots: tuple[int, ...], seeds: tuple[torch.Tensor, ...], leaves: tuple[int, ...], budget: Budget
) -> Gradients:
    wrt = tuple(index for index, leaf in enumerate(graph.leaves) if leaf.requires_grad)
    scalar = len(roots) == 1 and seeds[0].numel() == 1
    program = Program(graph, Demand(roots, (False,) if scalar else (True,) * len(roots), wrt))
    selection = Selection((), gradients=True)
    while True:
        compiled = program.plan(selection, budget)
        try:
            with shelf_in(budget.offload):
                found = program.run(compiled, selection, seeds).gradients
            break
        except Exception as error:
            smaller = program.smaller(compiled, selection, budget) if is_out_of_memory(error) else None
            if smaller is None:
                raise
            events.count("retries")
            error.__traceback__ = None
            give_back()
            budget = smaller
    if scalar and float(seeds[0]) != 1.0:
        found = scaled(found, float(seeds[0]))
    chosen = dict(zip(wrt, found, strict=True))
    return [chosen[leaf] for leaf in leaves]


def _real(tensor: Value | torch.Tensor) -> torch.Tensor:
    real = tensor.real if isinstance(tensor, Value) else tensor
    assert real is not None
    return real


def _own_seed(root: Value | torch.Tensor, given: torch.Tensor | None) -> torch.Tensor | None:
    """The seed of a scalar, made before anything runs; for others eager's engine says what is missing."""
    shape = root.prepass.shape if isinstance(root, Value) else tuple(root.shape)
    if given is not None or any(size != 1 for size in shape):
        return given
    prepass = root.prepass if isinstance(root, Value) else prepass_of(root)
    return torch.ones(shape, dtype=prepass.dtype, device=prepass.device) if prepass.dtype.is_floating_point else None


def _backward_on_real(request: BackwardRequest, seeds: Sequence[torch.Tensor | None]) -> None:
    roots = [_real(root) for root in request.roots]
    inputs = None if request.inputs is None else [_real(tensor) for tensor in request.inputs]
    torch.autograd.backward(
        roots, list(seeds), retain_graph=request.retain_graph, create_graph=request.create_graph, inputs=inputs
    )
