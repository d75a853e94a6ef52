"""Carrying out a prepared run: its calls are made, its results bound; until the commit it can be taken back (Rule 4).

*Takes* a `PreparedRun` and the log whose entries it was prepared for. *Gives* values bound to real tensors, and
gradients committed. An error leaves the entries in the log, so that they are pending as before.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from koila import events
from koila._torch import backward_from
from koila.capture.log import Entry, Log
from koila.execution.commit import Binding, copied, copied_gradients, is_from_user, restore, restore_gradients
from koila.execution.prepared import Asked, PreparedRun
from koila.execution.prepared_code import Result
from koila.execution.steps import remember
from koila.ir.ambient import current_context
from koila.ir.failures import is_out_of_memory
from koila.ir.node import Node, Storage, Value, function_name
from koila.ir.prepass import PrePass
from koila.ir.source import Site

LOST = object()
"""Stands for the results of a call that failed and was not required: calls on it fail, too."""


class Repetition:
    """A prepared run on its way, of which it is known that it applies."""

    _has_nodes = False
    _binding: Binding | None = None
    _failed: frozenset[int] = frozenset()
    """Entries whose calls failed and were not required."""

    def __init__(self, run: PreparedRun, log: Log) -> None:
        self.run, self._log, self._entries = run, log, log.entries
        self._code = run.codes[0]

    def inputs(self) -> Iterator[Value]:
        """Inputs that are values."""
        return (self._entries[entry].captured[place] for entry, place in self.run.budgets)

    def carry_out(self, lazy: Any, retain_graph: bool | None) -> None:
        """Make the calls and bind the results; then, unless `retain_graph` is None, do a backward pass from a result.

        An error undoes all of it, unless a hook of the user's raised it in the backward pass.
        """
        run, entries, log = self.run, self._entries, self._log
        buffers = copied(run.written_tensors(entries)) if run.written else ()
        gradients = () if retain_graph is None else copied_gradients(run.changing(entries))
        is_bound = False
        try:
            with log.lock:  # Another thread that reads a result waits for it.
                tensors = self._make_calls()
                remember(self._bind_nodes(tensors) if self._failed else self._bind(tensors))
                log.take()
            is_bound = True
            if retain_graph is not None:
                backward_from(lazy._held.real, retain_graph)
        except BaseException as error:
            if not (is_bound and is_from_user(error)):
                restore(buffers)
                restore_gradients(gradients)
                self._take_back()
            raise

    def _make_calls(self) -> tuple[Any, ...]:
        context = self.run.context
        try:
            if not context.nested and context is current_context():
                return self._code.make_calls(self._entries, self._lost)
            with context.enter_region(), context.enter():
                return self._code.make_calls(self._entries, self._lost)
        except Exception as error:
            failed = self._code.failed_entry(error.__traceback__)
            if failed is not None:
                self._note_place(self._entries[failed], error)
            raise

    def _lost(self, place: int, error: Exception) -> Any:
        """A call has failed that nobody required: whoever asks for its value will see the error."""
        entry = self._entries[place]
        if is_out_of_memory(error):
            self._note_place(entry, error)
            raise error
        self._failed |= {place}
        # Rule 6: until then it is counted.
        events.count(f"pending::failed::{type(error).__name__.lstrip('_')}", site=Site(entry.code, entry.offset))
        return LOST

    def _note_place(self, entry: Entry, error: Exception) -> None:
        error.add_note(f"{function_name(entry.template.func)} was recorded at {Site(entry.code, entry.offset)}")

    def _bind(self, tensors: Sequence[torch.Tensor]) -> list[Value]:
        entries, run = self._entries, self.run
        given, peak = run.given_bytes, run.backward_peak_bytes
        storages: dict[int, Storage] = {}
        found: list[Value] = []
        for result, real in zip(self._code.results, tensors, strict=True):
            wrapper = entries[result.entry].results[result.index]
            prepass: PrePass = wrapper._prepass
            if prepass.requires_grad is not real.requires_grad:  # A write has changed it.
                prepass = prepass.with_grad(real.requires_grad)
            storage = Storage(real=True) if result.is_alone else self._storage(result, storages)
            value = Value(prepass, storage, None, 0)
            value.real = real
            if given is not None:
                value.budget = given
            if peak is not None and real.requires_grad and real.numel() == 1:
                value.backward_peak_bytes = peak
            if result.is_base:
                value.is_base = True
            else:
                value.is_view, value.family = result.is_view, self._family(result)
            value.holders = (weakref.ref(wrapper),)
            wrapper._held = value
            found.append(value)
        return found

    def _storage(self, result: Result, storages: dict[int, Storage]) -> Storage:
        """What values that share memory have in common."""
        if result.shared is None:
            return storages.setdefault(result.root, Storage(real=True))
        entry, place = result.shared
        found = self._log.storage_of(self._entries[entry].captured[place], register=True)
        assert found is not None
        return found

    def _family(self, result: Result) -> int:
        if isinstance(result.family, int):
            return self._entries[result.family].sequence
        if result.family is None:
            return 0
        entry, place = result.family
        shared = self._entries[entry].captured[place]
        return shared.family if isinstance(shared, Value) else 0

    def _bind_nodes(self, tensors: Sequence[Any]) -> list[Value]:
        """Some calls have failed that nobody required: they stay pending, so all of them get nodes."""
        entries = self._entries = list(self._entries)
        self._log.flush()
        self._has_nodes = True
        nodes: dict[int, Node] = {node.sequence: node for ref in self._log.tape if (node := ref()) is not None}
        made = (entries[call.entry].sequence for call in self.run.calls if call.entry not in self._failed)
        done = [nodes[sequence] for sequence in made if sequence in nodes]
        values = (entries[result.entry].results[result.index]._held for result in self._code.results)
        bound = zip(values, tensors, strict=True)
        results: dict[Value, torch.Tensor] = {value: real for value, real in bound if real is not LOST}
        self._binding = Binding(done, results, self.run.given_bytes)
        self._binding.apply()
        return list(results)

    def _take_back(self) -> None:
        """Everything is pending again."""
        if self._binding is not None:
            self._binding.undo()
        if not self._has_nodes:
            for result in self._code.results:
                self._entries[result.entry].results[result.index]._held = None
            self._log.put_back(self._entries)


def repetition_of(asked: Asked, log: Log) -> Repetition | None:
    """How what is asked of the program in a log is answered by a prepared run; None if it is not."""
    node = log.trie.current
    run = None if node is None else node.runs.get(asked)
    return Repetition(run, log) if run is not None and run.applies(log.entries, asked[0]) else None
