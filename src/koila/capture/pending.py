"""What each thread has recorded and not run yet.

*Takes* nodes as they are recorded. *Gives* the pending program of the calling thread: its effects, its nodes in order,
and what hangs on them. Calls that repeat a known program have no nodes before somebody asks here; see `Log`.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Protocol

import torch

from koila._scopes import Ongoing
from koila._torch import storage_key
from koila.capture.log import Log
from koila.errors import BudgetError
from koila.ir.node import Node, Storage, Value
from koila.ir.prepass import is_plain

MAX_EAGER_CALLS = 100
"""So many calls that ran eagerly are noted by name."""
_left: deque[Log] = deque()
"""The logs of threads that have ended; the next thread that asks takes over what they have pending."""


class Rerun(Protocol):
    """A program that ran in chunks and will run again for its gradients: it reads its inputs a second time."""

    def before_write(self, address: int, unseen: bool) -> None:
        """The storage at this address may be written from now on, with or without a version telling."""


class _Life:
    """Lives as long as its thread."""

    __slots__ = ("__weakref__",)


class _Place(threading.local):
    """Where a thread stands in its program, and what it has recorded."""

    def __init__(self) -> None:
        self.log = Log()
        self.eager_calls: list[tuple[str, str]] = []
        """Calls that could not be recorded since the last `koila.lazy`, with the reason; the first of them only."""
        self.started: tuple[CodeType, int, int] | None = None
        """Where `koila.lazy` was called last, as the code and the offset in it, and how many results were recorded
        before."""
        self.not_carried: weakref.WeakSet[Value] = weakref.WeakSet()
        """Values that are not run before the next batch: that would free nothing, or failed once; see `carried`."""
        self.addresses: set[int] = set()
        """Where the real operands lie of the first `num_noted` calls of the tape, and of entries behind it."""
        self.num_noted = 0
        self.reruns: dict[int, weakref.ref[Rerun]] = {}
        """Programs that a later backward pass will run again, by identity."""
        self.runs = Ongoing()
        """Runs that are going on, one inside the other: what they write is in order already."""
        self.traces = Ongoing()
        """Programs that are being traced: modules that are looked through then are the tracer's."""
        self._life = _Life()
        weakref.finalize(self._life, _leave, self.log).atexit = False

    def take_over(self) -> None:
        """What threads recorded that have ended is this thread's from now on."""
        while _left:
            log = _left.popleft()
            self.log.effects += log.effects
            self.log.tape += log.tape


def _leave(log: Log) -> None:
    """The thread of a log has ended."""
    log.flush()
    _left.append(log)


def address_of(operand: Value | torch.Tensor) -> int | None:
    """The address of a real operand's storage; None for what has no memory of its own, as inside `torch.vmap`."""
    real = operand.real if isinstance(operand, Value) else operand
    try:
        return None if real is None or not is_plain(real) else storage_key(real.untyped_storage())
    except RuntimeError:
        return None


class Recorder:
    """What each thread has recorded and not run yet; a value may be recorded in one thread and run in another."""

    def __init__(self) -> None:
        self.place = _Place()
        self.is_hidden_from_dynamo = False
        """Whether Dynamo is loaded and was told to skip koila: then calls may come from compiled code."""

    @property
    def log(self) -> Log:
        """What this thread has recorded, all of it as nodes."""
        log = self.place.log
        if log.entries:
            log.flush()
        return log

    @property
    def is_idle(self) -> bool:
        """Whether this thread has recorded nothing that anybody could still ask for, as far as that is known."""
        log = self.place.log
        return not (log.entries or log.tape)

    def new_epoch(self) -> None:
        """A run has happened: the next recorded call starts a new program."""
        place = self.place
        log = place.log
        if log.entries:
            log.flush()
        log.new_epoch()
        if place.addresses or place.num_noted:
            place.addresses, place.num_noted = set(), 0

    def num_recorded(self) -> int:
        """How many results this thread has recorded in its life."""
        log = self.place.log
        return log.num_before + log.count

    def note_eager(self, name: str, why: str) -> None:
        """A call could not be recorded and runs at once."""
        if len(self.place.eager_calls) < MAX_EAGER_CALLS:
            self.place.eager_calls.append((name, why))

    @property
    def effects(self) -> list[Node]:
        """Writes to real tensors that this thread recorded and nobody has done: they run with its next run."""
        if _left:
            self.place.take_over()
        log = self.log
        if log.effects:
            log.forget_done_effects()
        return log.effects

    def recorded(self) -> Iterator[Node]:
        """Nodes that this thread recorded and that anything still refers to, in order; some may have run."""
        return (node for reference in self.log.tape if (node := reference()) is not None)

    def pending(self) -> list[Node]:
        """Those of them that have not run, and whose run has not failed: they run with the next run."""
        return [node for node in self.recorded() if not node.done and not node.failed]

    def depending_on(self, tensors: Sequence[torch.Tensor]) -> list[Value]:
        """Pending values that the user holds and that are made from these tensors."""
        changed, found = {id(tensor) for tensor in tensors}, list[Value]()
        dependent: set[Node] = set()
        for node in self.recorded():
            if any(id(o) in changed for o in node.operands) or any(v.node in dependent for v in node.values()):
                dependent.add(node)
                found += node.waiting()
        return found

    def leave_behind(self, tensors: Sequence[torch.Tensor], refusal: BudgetError | None = None) -> None:
        """Pending calls that read these tensors do not run before the tensors change: there is no room for results, or
        a budget refused them."""
        changed = {id(tensor) for tensor in tensors}
        for node in self.recorded():
            if not node.done and any(id(operand) in changed for operand in node.operands):
                node.left_behind, node.refusal = True, refusal

    def held_without_grad(self) -> list[Value]:
        """Those of `held` that do not require grad; nothing is done for calls that lead to others only."""
        log = self.place.log
        if log.entries and not log.is_history:
            log.flush()
        nodes = (node for reference in log.tape if (node := reference()) is not None)
        return [value for node in nodes for value in node.waiting() if not value.requires_grad]

    def held(self) -> list[Value]:
        """Values that this thread recorded, that have no data yet, and that the user still holds; in order."""
        return [value for node in self.recorded() for value in node.waiting()]

    @contextmanager
    def apart(self) -> Iterator[None]:
        """What this thread records inside has nothing to do with what it recorded before, and is forgotten after it."""
        state = vars(self.place)
        before = dict(state)
        state.clear()
        self.place.__init__()  # type: ignore[misc]
        try:
            yield
        finally:
            self.forget()
            state.clear()
            state.update(before)

    def forget(self) -> None:
        """Nothing that this thread has recorded is pending any more: no effect is done, nothing is run by `settle`."""
        self.forget_effects()
        self.log.tape.clear()
        self.place.started = None
        self.new_epoch()

    def forget_effects(self) -> None:
        """The writes that this thread has pending will not be done."""
        for node in self.effects:
            node.due = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """A run of this thread goes on."""
        runs = self.place.runs
        mark = runs.begin()
        try:
            yield
        finally:
            runs.end(mark)

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """A program is traced in this thread."""
        traces = self.place.traces
        mark = traces.begin()
        try:
            yield
        finally:
            traces.end(mark)

    def note_rerun(self, rerun: Rerun) -> None:
        """A program will run again, as long as anything refers to it."""
        reruns, key = self.place.reruns, id(rerun)
        reruns[key] = weakref.ref(rerun, lambda _: reruns.pop(key, None))

    def warn_reruns(self, tensor: torch.Tensor, unseen: bool) -> None:
        """Tell programs that will run again that a real tensor may be written, with or without its version telling."""
        address = None if self.place.runs else address_of(tensor)
        if address is not None:
            for reference in list(self.place.reruns.values()):
                rerun = reference()
                if rerun is not None:
                    rerun.before_write(address, unseen)

    def is_read(self, tensor: torch.Tensor) -> bool:
        """Whether a call that this thread recorded reads the memory of a real tensor; no during a run."""
        place = self.place
        if place.runs or not is_plain(tensor):
            return False
        log = place.log
        for reference in log.tape[place.num_noted :]:
            node = reference()
            for operand in () if node is None else node.operands:
                _note_address(operand.real if type(operand) is Value else operand, place.addresses)  # type: ignore[arg-type]
        for real in log.reals(log.num_noted):
            _note_address(real, place.addresses)
        place.num_noted, log.num_noted = len(log.tape), len(log.entries)
        return address_of(tensor) in place.addresses

    def storage_of(self, operand: Value | torch.Tensor, register: bool = False) -> Storage | None:
        """The storage of an operand; a real tensor has one only if a pending call writes to it."""
        return self.log.storage_of(operand, register)


def _note_address(real: torch.Tensor | None, addresses: set[int]) -> None:
    if real is not None and real.layout is torch.strided:
        addresses.add(storage_key(real.untyped_storage()))


recorder = Recorder()
