"""The engine: job → decision → run → bind → commit.

*Takes* pending values, or a backward request. *Gives* the values bound to real tensors, and gradients committed. How a
program runs is decided in `koila.planning.decide`; what is asked of it, in `koila.execution.jobs`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from koila import events
from koila._budget import Budget, current_budget
from koila.analysis.program import NotSplittable, program_of
from koila.capture.lookup import BackwardRequest
from koila.capture.pending import Recorder
from koila.errors import BudgetError
from koila.execution.attach import attached, count_fallback
from koila.execution.commit import (
    Binding,
    drop_effects,
    gradients_restored_on_error,
    is_from_user,
    restored_on_error,
    write_effects,
)
from koila.execution.history import history_of
from koila.execution.jobs import Pending, Task, accumulating, held_bytes, task_for
from koila.execution.out_of_memory import is_out_of_memory, note_failure, run_until_it_fits
from koila.execution.results import Seeds, run_split, seed_for, stream_split
from koila.execution.steps import Step, remember, step, was_bound_last
from koila.execution.whole_run import run_whole, written_leaves
from koila.interfaces import BatchInfo
from koila.ir.graph import Graph, collect
from koila.ir.job import Demand, Wanted
from koila.ir.node import Node, Value
from koila.ir.prepass import prepass_of
from koila.ir.source import user_site
from koila.planning.decide import Decision, any_forced, decide, decision_for


class Engine:
    """The realizer: carries out what is asked for."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    # What capture asks for.

    def materialize(self, values: Sequence[Value], why: str) -> None:
        """Bind pending values to real tensors, and perform the pending effects."""
        with step() as noted:
            self._serve(values, None, noted)

    def backward(self, request: BackwardRequest) -> None:
        """Run forward and backward, and leave the gradients where PyTorch's backward would."""
        involved = [v for v in (*request.roots, *(request.inputs or ())) if isinstance(v, Value)]
        seeds = [_own_seed(*pair) for pair in zip(request.roots, request.gradients, strict=True)]
        with step() as noted:
            noted.continues, noted.is_empty = was_bound_last(involved), False
            if not self._serve(involved, request, noted, seeds):
                self._commit(request, seeds, accumulating(request, Graph((), ())))
        self._recorder.new_epoch()

    def before_step(self, parameters: Sequence[torch.Tensor]) -> None:
        """An optimizer is about to change parameters: run what the user holds and is pending on them, if it fits."""
        depending, due = self._depending_on(parameters), list[Value]()
        room = held_bytes(current_budget(collect(depending, []).budgets)) if depending else 0
        for value in sorted(depending, key=lambda value: value.prepass.num_bytes):
            room -= value.prepass.num_bytes
            if room >= 0:
                due.append(value)
        if due:
            events.count("forced::optimizer step", site=user_site())
            self.materialize(due, "optimizer step")

    def batch_of(self, value: Value) -> BatchInfo | None:
        """Trace and type the program behind a value; nothing is run."""
        if value.real is not None:
            return None if value.batch is None else BatchInfo(value.batch, value.real.shape[value.batch])
        try:
            program = program_of(collect([value], []), Demand())
        except NotSplittable:
            return None
        dim = program.facts(Wanted((0,))).batch_dims.get(0)
        return None if dim is None else BatchInfo(dim, program.num_samples)

    def stream(self, value: Value, budget: Budget) -> Iterator[torch.Tensor]:
        """The chunks of a value; in one piece if it cannot be cut."""
        task = self.task([value], None, budget)
        decision = None if task is None else decision_for(task.streamed)
        if task is None or decision is None or decision.how == "whole":
            if decision is not None and decision.fallback is not None:
                count_fallback(decision.fallback)
            self.materialize([value], "stream")
            yield _real(value).detach()
            return
        task.own.graph.check_fresh()
        for piece in stream_split(decision, task.own.graph):
            yield piece
            task.own.graph.check_fresh()  # The caller's code has run in between (Rule 5).

    # Job.

    def task(
        self, values: Sequence[Value], request: BackwardRequest | None = None, budget: Budget | None = None,
        device: torch.device | None = None, detailed: bool = True,
    ) -> Task | None:  # fmt: skip
        """The task that a run of these values would carry out; None: nothing is to run."""
        pending = Pending(self._recorder.effects, self._recorder.pending())
        return task_for(values, pending, request, budget, device, detailed)

    def _depending_on(self, parameters: Sequence[torch.Tensor]) -> list[Value]:
        """Pending values that the user holds and that are made from these tensors."""
        changed, found = {id(parameter) for parameter in parameters}, list[Value]()
        dependent: set[Node] = set()
        for node in self._recorder.pending():
            if any(id(o) in changed for o in node.operands) or any(v.node in dependent for v in node.values()):
                dependent.add(node)
                outputs = (node.output(index) for index in range(node.num_outputs))
                found += [v for v in outputs if v is not None and v.node is not None and v.is_held]
        return found

    # Decision → run → bind → commit.

    def _serve(
        self, values: Sequence[Value], request: BackwardRequest | None, noted: Step,
        seeds: Sequence[torch.Tensor | None] = (),
    ) -> bool:  # fmt: skip
        """Compute values, and differentiate them if that is requested; False: nothing was to be done."""
        task = self.task(values, request, detailed=any_forced())
        if task is None:
            return False
        noted.follows = request is None and was_bound_last(v for node in task.own.graph.nodes for v in node.values())
        failed = task.is_plain and not self._runs_as_it_is(task, noted, seeds)
        if failed:
            task = self.task(values, request)
            assert task is not None
        if failed or not task.is_plain:
            self._run(task, noted, seeds, failed)
        return True

    def _runs_as_it_is(self, task: Task, noted: Step, seeds: Sequence[torch.Tensor | None]) -> bool:
        """Run a task that nobody has to decide about; False if memory ran out."""
        try:
            decision = decide(task.job)
            noted.tries(decision)
            self._carry_out(task, decision, noted, seeds)
        except Exception as error:
            if is_out_of_memory(error):
                note_failure(error)
                return False
            drop_effects(task.own.graph.nodes)
            raise
        except BaseException:
            drop_effects(task.own.graph.nodes)
            raise
        return True

    def _run(self, task: Task, noted: Step, seeds: Sequence[torch.Tensor | None] = (), failed: bool = False) -> None:
        run = lambda decision: self._carry_out(task, decision, noted, seeds)  # noqa: E731
        try:
            run_until_it_fits(task.job, run, noted.tries, failed)
        except BaseException:
            drop_effects(task.own.graph.nodes)
            raise

    def _carry_out(self, task: Task, decision: Decision, noted: Step, seeds: Sequence[torch.Tensor | None]) -> None:
        """Run a task by a decision; an error leaves everything as it was (Rule 4)."""
        is_whole = decision.how == "whole"
        graph = (task.whole if is_whole else task.own).graph
        if decision.fallback is not None:
            count_fallback(decision.fallback)
        with restored_on_error(written_leaves(graph) if task.request else (), unless=is_from_user):
            binding = self._whole(task) if is_whole else self._split(task, decision, noted, seeds)
            if task.request is not None:
                # A split run changes no gradient before its commit, which is PyTorch's own addition: no copies.
                changing = accumulating(task.request, graph)
                kept = changing if is_whole else [tensor for tensor in changing if tensor.grad is None]
                self._commit(task.request, seeds, kept, binding, can_be_repeated=len(kept) == len(changing))
        noted.num_calls += len(graph.nodes)
        events.count("runs")
        events.count(f"runs::{decision.how}")
        self._recorder.new_epoch()

    def _whole(self, task: Task) -> Binding:
        evaluation = task.whole
        results, done = run_whole(evaluation.graph, evaluation.needed, evaluation.effects, task.required)
        return self._bind(done, results, task)

    def _split(
        self, task: Task, decision: Decision, noted: Step, given: Sequence[torch.Tensor | None]
    ) -> Binding:  # fmt: skip
        for other in task.others:
            self._perform(other)
        job, graph = task.job, task.own.graph
        graph.check_fresh()
        seeds = _seeds(task, decision, given)
        results = run_split(decision, graph, seeds)
        noted.phase_seconds = results.phase_seconds
        if job.demand.roots and task.request is None:
            history_of(job).ran(guessed=decision.wanted.gradients)
        bound = attached(job, decision, results, seeds)
        write_effects(graph, results.written)
        for index, dim in results.batch_dims.items():
            graph.outputs[index].batch = dim  # A later program that starts from it can be cut, too.
        binding = self._bind(graph.nodes, bound, task)
        views = [value for value in task.own.derived if value.storage.real]
        if views:
            apart = collect(views, [])
            binding.following = self._bind(apart.nodes, run_whole(apart, set(views), set())[0], task)
        return binding

    def _bind(self, nodes: Sequence[Node], results: dict[Value, torch.Tensor], task: Task) -> Binding:
        remember(results)
        return Binding(nodes, results, task.given_bytes)

    def _perform(self, graph: Graph) -> None:
        """Run another program for its effects alone."""
        task = task_for([], Pending([node for node in graph.nodes if node.due], ()))
        try:
            if task is not None:
                self._run(task, Step())
        except Exception:  # Whoever asks for its value will see the error.
            events.count("effects::dropped", site=graph.nodes[-1].site)

    def _commit(
        self, request: BackwardRequest, seeds: Sequence[torch.Tensor | None], changing: list[torch.Tensor],
        binding: Binding | None = None, can_be_repeated: bool = False,
    ) -> None:  # fmt: skip
        """PyTorch's own backward on real tensors, in one engine call."""
        try:
            with gradients_restored_on_error(changing, unless=is_from_user):
                _backward_on_real(request, seeds)
        except BaseException as error:
            if binding is not None and not is_from_user(error):
                binding.undo()
            if is_out_of_memory(error) and not can_be_repeated:
                raise BudgetError(
                    f"memory ran out while gradients were computed or added: {str(error).splitlines()[0]}",
                    where=f"the backward pass at {user_site()}",
                    hint="name a budget before the forward pass: koila.lazy(x, budget=...)",
                ) from error
            raise


def _seeds(task: Task, decision: Decision, given: Sequence[torch.Tensor | None]) -> Seeds:
    """A seed for each root: as requested, or as it came with the backward pass that followed the last time."""
    job = task.job
    if not decision.wanted.gradients:
        return ()
    roots = [job.graph.outputs[root] for root in job.demand.roots]
    if task.request is None:
        return [seed_for(root.prepass, None, history_of(job).seed) for root in roots]
    by_root: dict[Value, torch.Tensor] = {}
    for root, seed in zip(task.request.roots, given, strict=True):
        if isinstance(root, Value) and seed is not None:
            by_root[root] = by_root[root] + seed if root in by_root else seed
    return [seed_for(root.prepass, by_root[root]) for root in roots]


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
