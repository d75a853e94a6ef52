"""The engine: job → decision → run → bind → commit.

*Takes* pending values, or a backward request. *Gives* the values bound to real tensors, and gradients committed. What
is asked of a program stands in `koila.execution.jobs`, how it runs is decided in `koila.planning.decide`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from koila import events
from koila._budget import Budget, current_budget
from koila._torch import without_saved_tensors_hooks
from koila._torch.dynamo import without_dynamo
from koila._torch.transforms import outside_transforms
from koila.analysis.program import NotSplittable, program_of
from koila.capture.gradients import BackwardRequest, GradRequest
from koila.capture.pending import Recorder
from koila.errors import BudgetError
from koila.execution.advice import warn_of_closed_scope
from koila.execution.attach import attached, count_fallback
from koila.execution.commit import (
    Binding,
    commit,
    forget_writes,
    give_up,
    gradients_restored_on_error,
    is_from_user,
    restored_on_error,
    undone_on_error,
    write_effects,
)
from koila.execution.eager_errors import check_again, note_recorded_gradients
from koila.execution.evaluation import awaited
from koila.execution.frames import few_frames, shorten
from koila.execution.history import history_of
from koila.execution.inner import places_of, real_gradients
from koila.execution.jobs import Pending, Task, accumulating, decision_of, devices_of, held_bytes, task_for
from koila.execution.out_of_memory import note_failure, retried_once, run_until_it_fits
from koila.execution.prepared import Question, asked_of
from koila.execution.process_memory import run_kept_small
from koila.execution.repetition import Repetition, repetition_of
from koila.execution.results import run_split, stream_split
from koila.execution.seeds import Given, given_seeds, seeds_of
from koila.execution.segment import is_passed_by
from koila.execution.steps import Step, remember, step, was_bound_last
from koila.execution.whole_run import run_whole, written_leaves
from koila.interfaces import BatchInfo
from koila.ir.changes import note_change
from koila.ir.draws import leave_ended
from koila.ir.failures import is_out_of_memory
from koila.ir.graph import Graph, collect
from koila.ir.job import Demand, Wanted
from koila.ir.node import Node, Value
from koila.ir.replay import ordinary_state
from koila.ir.source import user_site
from koila.planning.decide import Decision, decide
from koila.planning.in_force import any_forced, decision_for, note_seconds


def _room_for(graph: Graph) -> int:
    return held_bytes(current_budget(graph.budgets), devices_of(graph))


def request_of(value: Value, retain_graph: bool) -> BackwardRequest:
    """The backward pass from a scalar."""
    return BackwardRequest((value,), (None,), retain_graph, False, None)


class Engine:
    """The realizer: carries out what is asked for."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    @contextmanager
    def _serving(self) -> Iterator[None]:
        """A run is its own: whatever PyTorch or the user does around it has no part in it."""
        leave_ended()
        with self._recorder.running(), ordinary_state(), without_dynamo():
            yield

    # What is asked for.

    def read(self, lazy: Any, why: str) -> None:
        """Bind a lazy tensor whose call has no node yet."""
        log = self._recorder.place.log
        asked = asked_of(log, lazy, backward=False)
        events.forced(why, user_site())
        repetition = None if asked is None else repetition_of(asked, log)
        if repetition is None:
            question = None if asked is None else Question(log, asked)
            self.materialize([lazy._value], why, question)
        else:
            self._repeat(repetition, lazy, None)

    def backward_from(self, lazy: Any, retain_graph: bool) -> None:
        """A backward pass from a scalar lazy tensor whose call has no node yet."""
        log = self._recorder.place.log
        asked = asked_of(log, lazy, backward=True)
        repetition = None if asked is None else repetition_of(asked, log)
        if repetition is None:
            question = None if asked is None else Question(log, asked)
            self.backward(request_of(lazy._value, retain_graph), question)
        else:
            self._repeat(repetition, lazy, retain_graph)

    def materialize(self, values: Sequence[Value], why: str, question: Question | None = None) -> None:
        """Bind pending values to real tensors, and perform the pending effects; `question` learns how."""
        with few_frames(), self._serving(), outside_transforms(), step() as noted:
            self._serve(values, None, noted, question=question)

    def backward(self, request: BackwardRequest, question: Question | None = None) -> None:
        """Run forward and backward, and leave the gradients where PyTorch's backward would."""
        involved = [v for v in (*request.roots, *(request.inputs or ())) if isinstance(v, Value)]
        with few_frames(), self._serving(), step() as noted:
            if not request.retain_graph:
                self._run_earlier_gradients(involved)
            seeds = self._given_seeds(request, involved)
            noted.continues, noted.is_empty = was_bound_last(involved), False
            if not self._serve(involved, request, noted, seeds, question):
                commit(request, seeds, accumulating(request, Graph((), ())))
        self._recorder.new_epoch()

    def grad(self, request: GradRequest) -> tuple[torch.Tensor | None, ...]:
        """The gradients of real tensors, or of values that are made real first."""
        involved = [each for each in (*request.outputs, *request.inputs) if isinstance(each, Value)]
        self.materialize(involved, "autograd.grad")
        roots = [each.real if isinstance(each, Value) else each for each in request.outputs]
        return real_gradients(request, [root for root in roots if root is not None])

    def is_inside(self, values: Sequence[Value], roots: Sequence[torch.Tensor]) -> bool:
        """Whether a run in chunks has hidden one of these values behind these tensors."""
        return bool(places_of(roots, values))

    def _run_earlier_gradients(self, roots: Sequence[Value]) -> None:
        """Calls of `autograd.grad` that somebody waits for come first: a backward pass frees what they go through."""
        found = [node for node in self._recorder.recorded() if node.func is torch.autograd.grad and not node.done]
        if found:
            own, pending = collect(roots, []).positions, set(awaited(self._recorder.pending()))
            beside = [node for node in found if node in pending and node not in own]
            outputs = (node.output(index) for node in beside for index in range(node.num_outputs))
            values = [value for value in outputs if value is not None]
            if values:
                self._serve(values, None, Step())

    def _given_seeds(self, request: BackwardRequest, involved: Sequence[Value]) -> Given:
        try:
            return retried_once(lambda: given_seeds(request), "the seed of a backward pass was made")
        except BaseException:
            give_up(collect(involved, self._recorder.effects).nodes)
            raise

    def before_step(self, parameters: Sequence[torch.Tensor]) -> None:
        """An optimizer is about to change parameters: run what the user holds and is pending on them, if it fits."""
        depending, refusal = self._recorder.depending_on(parameters), None
        try:
            self.run_what_fits(depending, "optimizer step")
        except BudgetError as error:  # Nobody has asked for these values: whoever reads one sees it then.
            events.count("plan::not kept", site=user_site())
            refusal = error
            error.__traceback__ = error.__context__ = None  # Its frames hold what was to run.
        if any(value.real is None for value in depending):
            note_change(parameters, user_site())
            self._recorder.leave_behind(parameters, refusal)

    def run_what_fits(self, values: Sequence[Value], why: str) -> None:
        """Run values before what they are made from changes: the smallest first, into the share for what is held."""
        due = list[Value]()
        room = _room_for(collect(values, [])) if values else 0
        for value in sorted(values, key=lambda value: value.prepass.num_bytes):
            room -= value.prepass.num_bytes
            if room >= 0:
                due.append(value)
        if due:
            events.forced(why, user_site())
            self.materialize(due, why)

    def is_passed_by(self, value: Value) -> bool:
        """Whether gradients of results that a run in chunks has given pass through this value, out of its sight."""
        return is_passed_by(value)

    def batches_of(self, values: Sequence[Value]) -> list[BatchInfo | None]:
        """Trace and type the program behind pending values; nothing is run."""
        try:
            program = program_of(collect(values, []), Demand())
        except NotSplittable:
            return [None] * len(values)
        dims = program.facts(Wanted(tuple(range(len(values))))).batch_dims
        return [BatchInfo(dims[n], program.num_samples) if n in dims else None for n in range(len(values))]

    def stream(self, value: Value, budget: Budget) -> Iterator[torch.Tensor]:
        """The chunks of a value; in one piece if it cannot be cut."""
        task = self.task([value], None, budget)
        decision = None if task is None else decision_for(task.streamed)
        if task is None or decision is None or decision.how == "whole":
            if decision is not None and decision.fallback is not None:
                count_fallback(decision.fallback)
            self.materialize([value], "stream")
            assert value.real is not None
            yield value.real.detach()
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
        pending = Pending(self._recorder.effects, awaited(self._recorder.pending()))
        return task_for(values, pending, request, budget, device, detailed)

    # Decision → run → bind → commit.

    def _serve(
        self, values: Sequence[Value], request: BackwardRequest | None, noted: Step, seeds: Given = (),
        question: Question | None = None,
    ) -> bool:  # fmt: skip
        """Compute values, and differentiate them if that is requested; False: nothing was to be done."""
        task = self.task(values, request, detailed=any_forced())
        if task is None:
            return False
        if task.job.budget.is_default:
            warn_of_closed_scope(task.whole.graph, values)
        noted.follows = request is None and was_bound_last(v for node in task.own.graph.nodes for v in node.values())
        required = None if question is None else task.required()
        try:
            self._run(task, noted, seeds)
            decision = None if task.leaves_rest else noted.decision
            if question is not None and required and decision is not None and decision.how == "whole":
                question.learn(task, decision, required)
            forget_writes(task.whole.graph.nodes)
        except Exception as error:
            if not (task.is_plain and is_out_of_memory(error)):
                raise
            # It ran as it is, without a decision: from now on it has one.
            note_failure(error)
            following = self.task(values, request)
            assert following is not None
            self._run(following, noted, seeds, failed=True)
        return True

    def _repeat(self, repetition: Repetition, lazy: Any, retain_graph: bool | None) -> None:
        """Carry out a prepared run; unless `retain_graph` is None, a backward pass follows."""
        try:
            with step() as noted:
                self._carry_out_again(repetition, lazy, retain_graph, noted)
        except Exception as error:
            shorten(error)
            raise

    def _carry_out_again(self, repetition: Repetition, lazy: Any, retain_graph: bool | None, noted: Step) -> None:
        """Run by what was prepared; an error leaves everything as it was (Rule 4)."""
        run, runs = repetition.run, self._recorder.place.runs
        noted.decision, noted.is_empty = run.decision, False  # It has no fallback, or it was not prepared.
        if retain_graph is None:
            noted.follows = was_bound_last(repetition.inputs())
        mark = runs.begin()
        try:
            if run.is_unlimited:
                repetition.carry_out(lazy, retain_graph)
            else:
                run_kept_small(run.decision, run.devices[0], partial(repetition.carry_out, lazy, retain_graph))
        except BaseException as error:
            if isinstance(error, Exception) and is_out_of_memory(error):
                note_failure(error)
                self._run_smaller(lazy._value, noted, retain_graph)
                return
            if lazy._held is None:
                give_up(collect([lazy._value], []).nodes)
            raise
        finally:
            runs.end(mark)
        noted.num_calls += len(run.calls)
        events.count_all(run.counts)
        self._recorder.new_epoch()

    def _run_smaller(self, value: Value, noted: Step, retain_graph: bool | None) -> None:
        """Memory ran out in a prepared run: from now on there is a decision."""
        request = None if retain_graph is None else request_of(value, retain_graph)
        with self._serving():
            task = self.task([value], request)
            assert task is not None
            self._run(task, noted, () if request is None else given_seeds(request), failed=True)

    def _run(self, task: Task, noted: Step, seeds: Given = (), failed: bool = False) -> None:
        carry_out = lambda decision: self._carry_out(task, decision, noted, seeds)  # noqa: E731
        run = lambda decision: run_kept_small(decision, task.job.device, partial(carry_out, decision))  # noqa: E731
        try:
            if task.is_plain:
                decision = decide(task.job)
                noted.tries(decision)
                run(decision)
            else:
                if task.others:
                    decision_of(task)  # Refused before anything runs.
                run_until_it_fits(task.job, run, noted.tries, failed)
        except BaseException as error:
            if not (task.is_plain and is_out_of_memory(error)):
                # What was asked for has failed; writes that it does not need stay due.
                asked = collect([*task.own.wanted], []).nodes
                give_up(asked or task.own.graph.nodes)
            raise

    def _carry_out(self, task: Task, decision: Decision, noted: Step, seeds: Given) -> None:
        """Run a task by a decision; an error leaves everything as it was (Rule 4)."""
        is_whole, request = decision.how == "whole", task.request
        graph = (task.whole if is_whole else task.own).graph
        if decision.fallback is not None:
            count_fallback(decision.fallback)
        if is_whole and request is not None:
            check_again(graph, request.roots)
        changing = [] if request is None else accumulating(request, graph)
        # A split run changes no gradient before its commit, which is PyTorch's own addition: no copies.
        kept = changing if is_whole else [tensor for tensor in changing if tensor.grad is None]
        # One statement: an interrupt between the ends of two would leave one part done and the other taken back.
        with (
            restored_on_error(written_leaves(graph), is_from_user),
            gradients_restored_on_error(kept, is_from_user),
            undone_on_error(is_from_user) as bindings,
        ):
            with without_saved_tensors_hooks():  # Calls that were recorded did not see them.
                if is_whole:
                    self._whole(task, decision, bindings)
                else:
                    self._split(task, decision, noted, seeds, bindings)
            if request is not None:
                commit(request, seeds, (), can_be_repeated=len(kept) == len(changing))
        noted.num_calls += len(graph.nodes)
        events.count("runs")
        events.count(f"runs::{decision.how}")
        self._recorder.new_epoch()

    def _whole(self, task: Task, decision: Decision, bindings: list[Binding]) -> None:
        evaluation = task.whole
        results, done = run_whole(evaluation.graph, evaluation.needed, evaluation.effects, task.required)
        self._bind(done, results, task, bindings)
        for root in task.job.demand.roots:
            task.job.graph.outputs[root].backward_peak_bytes = task.backward_peak_bytes(decision)

    def _split(
        self, task: Task, decision: Decision, noted: Step, given: Given, bindings: list[Binding]
    ) -> None:  # fmt: skip
        for other in task.others:
            self._perform(other)
        job, graph, seeds = task.job, task.own.graph, seeds_of(task, decision, given)
        graph.check_fresh()
        results = run_split(decision, graph, seeds)
        noted.phase_seconds = results.phase_seconds
        note_seconds(job, decision, results.seconds)
        if job.demand.roots and task.request is None:
            history_of(job).ran(guessed=decision.wanted.gradients)
        bound = attached(job, decision, results, seeds)
        write_effects(graph, results.written, task.own.effects)
        for index, dim in results.batch_dims.items():
            graph.outputs[index].batch = dim  # A later program that starts from it can be cut, too.
        note_recorded_gradients(graph)
        self._bind(graph.nodes, bound, task, bindings)
        views = [value for value in task.own.derived if value.storage.real]
        if views:
            apart = collect(views, [])
            self._bind(apart.nodes, run_whole(apart, set(views), set())[0], task, bindings)

    def _bind(
        self, nodes: Sequence[Node], results: dict[Value, torch.Tensor], task: Task, bindings: list[Binding]
    ) -> None:  # fmt: skip
        remember(results)
        bindings.append(Binding(nodes, results, task.given_bytes))
        bindings[-1].apply()

    def _perform(self, task: Task) -> None:
        """Run another program for its effects alone."""
        try:
            self._run(task, Step())
        except BudgetError:  # Statistics that cannot be updated inside the budget are not left out in silence.
            raise
        except Exception:  # Whoever asks for its value will see the error.
            events.count("effects::dropped", site=task.own.graph.nodes[-1].site)
