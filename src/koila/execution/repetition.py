"""Carrying out a prepared run: its calls are made, its results bound; until the commit it can be taken back (Rule 4).

*Takes* a `PreparedRun` and the log whose entries it was prepared for. *Gives* values bound to real tensors, and
gradients committed. An error leaves the entries in the log, so that they are pending as before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from koila import events
from koila._scopes import Mark
from koila.capture.gradients import BackwardRequest
from koila.capture.log import Entry, Log
from koila.capture.template import PENDING, Template
from koila.execution.commit import Binding, commit, gradients_restored_on_error, is_from_user, restored_on_error
from koila.execution.prepared import PreparedRun, Question
from koila.execution.steps import remember
from koila.ir.ambient import current_context
from koila.ir.draws import Supply
from koila.ir.node import Node, Storage, Value, function_name
from koila.ir.prepass import Output, PrePass
from koila.ir.source import Site
from koila.ir.tree import leaves
from koila.planning.failures import is_out_of_memory


class Repetition:
    """A prepared run on its way."""

    def __init__(self, run: PreparedRun, log: Log) -> None:
        self.run, self._log, self._given = run, log, run.given_bytes
        self._entries = log.entries
        self._written = run.written_tensors(log.entries) if run.written else []
        self._storages: dict[int, Storage] = {}
        self._has_nodes = False
        self._binding: Binding | None = None

    def inputs(self) -> Iterator[Value]:
        """Inputs that are values."""
        return (self._entries[entry].captured[place] for entry, place in self.run.bound)

    def carry_out(self, request_of: Callable[[], BackwardRequest] | None) -> None:
        """Make the calls and bind the results, then do a backward pass if one is requested; an error undoes all."""
        changing = [] if request_of is None else self.run.changing(self._entries)
        try:
            # One statement: an interrupt between the ends of two would leave one part done and the other taken back.
            with restored_on_error(self._written, is_from_user), gradients_restored_on_error(changing, is_from_user):
                self._carry_out(request_of)
        except BaseException as error:
            if not is_from_user(error):
                self._take_back()
            raise

    def _carry_out(self, request_of: Callable[[], BackwardRequest] | None) -> None:
        with self._log.lock:  # Another thread that reads a result waits for it.
            if not self._written:
                tensors, failed = self._make_calls()
            else:
                with restored_on_error(self._written):
                    tensors, failed = self._make_calls()
            remember(self._bind_nodes(tensors, failed) if failed else self._bind_all(tensors))
            self._log.take()
        if request_of is not None:
            commit(request_of(), (None,), (), can_be_repeated=True)

    def _make_calls(self) -> tuple[list[Any], set[int]]:
        if not self.run.context.nested and self.run.context is current_context():
            return _make_calls(self.run, self._entries)
        with self.run.context.enter_region(), self.run.context.enter():
            return _make_calls(self.run, self._entries)

    def _bind_all(self, tensors: Sequence[torch.Tensor]) -> list[Value]:
        return [self._bind(number, tensors[number]) for number in self.run.needed]

    def _bind(self, number: int, real: torch.Tensor) -> Value:
        _, wrapper, output = self._result(number)
        is_base = output.shares is None and output.shares_output is None
        prepass: PrePass = wrapper._prepass
        if prepass.requires_grad is not real.requires_grad:  # A write has changed it.
            prepass = prepass.with_grad(real.requires_grad)
        value = Value(prepass, self._own(number) if is_base else self._storage(number), None, 0)
        value.real, value.budget, value.is_base = real, self._given, is_base
        if real.requires_grad and real.numel() == 1:
            value.backward_peak_bytes = self.run.backward_peak_bytes
        if not is_base:
            value.is_view, value.family = output.is_view, self._family(number)
        value.holders = (weakref.ref(wrapper),)
        wrapper._held = value
        return value

    def _result(self, number: int) -> tuple[Entry, Any, Output]:
        place, index = self.run.places[number]
        entry = self._entries[place]
        return entry, entry.results[index], entry.template.inference.outputs[index]

    def _shared(self, number: int) -> Value | torch.Tensor | int | None:
        """In whose memory a value lies: an input's, or another value's by number; None if it has its own."""
        entry, _, output = self._result(number)
        if output.shares_output is not None:
            return int(entry.template.first) + output.shares_output
        if output.shares is None:
            return None
        kind, place = entry.template.operands[output.shares]
        if kind == PENDING:
            return int(entry.template.positions[output.shares])
        found: Value | torch.Tensor = entry.captured[place]
        return found

    def _storage(self, number: int) -> Storage:
        """What values that share memory have in common."""
        shared = self._shared(number)
        while isinstance(shared, int):
            number, shared = shared, self._shared(shared)
        if shared is None:
            return self._own(number)
        found = self._log.storage_of(shared, register=True)
        assert found is not None
        return found

    def _own(self, number: int) -> Storage:
        return self._storages.setdefault(number, Storage(real=True))

    def _family(self, number: int) -> int:
        """Which values of the same memory are views of one another; see `Value.family`."""
        shared: Value | torch.Tensor | int | None = number
        while isinstance(shared, int):
            entry, _, output = self._result(shared)
            following = self._shared(shared)
            if following is not None and not output.is_view:
                return entry.sequence
            shared = following
        return shared.family if isinstance(shared, Value) else 0

    def _bind_nodes(self, tensors: Sequence[Any], failed: set[int]) -> list[Value]:
        """Some calls have failed that nobody required: they stay pending, so all of them get nodes."""
        entries = self._entries = list(self._entries)
        self._log.flush()
        self._has_nodes = True
        nodes: dict[int, Node] = {node.sequence: node for ref in self._log.tape if (node := ref()) is not None}
        made = (entries[call.entry].sequence for call in self.run.calls if call.entry not in failed)
        done = [nodes[sequence] for sequence in made if sequence in nodes]
        bound = ((number, self._result(number)[1]._held) for number in self.run.needed)
        results: dict[Value, torch.Tensor] = {v: tensors[n] for n, v in bound if tensors[n] is not None}
        self._binding = Binding(done, results, self._given)
        self._binding.apply()
        return list(results)

    def _take_back(self) -> None:
        """Everything is pending again."""
        if self._binding is not None:
            self._binding.undo()
        if not self._has_nodes:
            for number in self.run.needed:
                self._result(number)[1]._held = None
            self._log.put_back(self._entries)


def repetition_of(question: Question, log: Log) -> Repetition | None:
    """How a question is answered by a prepared run; None: it cannot, and watches how it is answered."""
    run = question.run
    if run is not None and run.applies(log.entries, question.is_backward):
        return Repetition(run, log)
    question.watch(log.entries)
    return None


def _make_calls(run: PreparedRun, entries: Sequence[Entry]) -> tuple[list[Any], set[int]]:
    """The tensors that are needed, by number, and the entries of calls that failed and were not required."""
    tensors: list[Any] = [None] * len(run.places)
    failed: set[int] = set()
    for call in run.calls:
        entry = entries[call.entry]
        try:
            result = _make_call(entry.template, entry, tensors)
        except Exception as error:
            name, site = function_name(entry.template.func), Site(entry.code, entry.offset)
            if call.entry in run.required or is_out_of_memory(error):
                error.add_note(f"{name} was recorded at {site}")
                raise
            failed.add(call.entry)
            # Whoever asks for its value will see the error (Rule 6: until then it is counted).
            events.count(f"pending::failed::{type(error).__name__.lstrip('_')}", site=site)
        else:
            _assign(entry.template, result, tensors)
            del result
        for number in call.dying:
            tensors[number] = None
    return tensors, failed


def _make_call(template: Template, entry: Entry, tensors: list[Any]) -> Any:
    if not entry.draws:
        return template.call(template.func, template.constants, template.positions, entry.captured, tensors)
    mark = Mark()
    with Supply([draw.replayed() for draw in entry.draws], mark):
        return template.call(template.func, template.constants, template.positions, entry.captured, tensors)


def _assign(template: Template, result: Any, tensors: list[Any]) -> None:
    """Put a call's results under their numbers; an operand that it returns itself has one already, None has none."""
    if template.kind is not None:
        found = [leaf for leaf in leaves(result) if isinstance(leaf, torch.Tensor)]
        tensors[template.first : template.first + len(found)] = found
    elif template.makers:
        tensors[template.first] = result
