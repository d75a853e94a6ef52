"""Steps: what is noted while something that was asked for is computed.

*Takes* what the engine does. *Gives* one `StepEnd` event for each step; reporting makes reports of them. Nothing here
is read by the engine to decide anything.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from koila import events
from koila._scopes import Scopes
from koila.execution.device_counters import DeviceCounters
from koila.ir.node import Value
from koila.planning.calibration import correct
from koila.planning.decide import Decision
from koila.planning.in_force import forget_decisions
from koila.planning.tracker import WorkspaceTracker

_step_end: Callable[[tuple[Any, ...]], events.StepEnd] = partial(tuple.__new__, events.StepEnd)
"""A `StepEnd` from its fields, without the Python layer of `NamedTuple`."""


class Step:
    """One step on its way."""

    decision: Decision | None = None
    phase_seconds: tuple[float, ...] = ()
    num_failures = 0
    """How often memory ran out."""
    fallbacks: tuple[str, ...] = ()
    num_calls = 0
    continues = follows = False
    is_empty = True
    """Whether nothing ran."""
    _scopes: tuple[Any, ...] = ()
    """Who wants it measured."""
    _tracker: WorkspaceTracker | None = None
    _counters: DeviceCounters | None = None

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self._spent = spent = events.spent_seconds()
        self.traced, self.planned = spent["trace_seconds"], spent["plan_seconds"]

    def tries(self, decision: Decision) -> None:
        """A decision is tried."""
        self.decision, self.is_empty = decision, False
        if decision.fallback is not None:
            self.fallbacks = (*self.fallbacks, decision.fallback)

    def __enter__(self) -> Step:
        if _measures.open():
            self._measure(_measures.all)
        _thread.step = weakref.ref(self)
        if self._tracker is not None:
            self._tracker.__enter__()
        return self

    def _measure(self, scopes: tuple[Any, ...]) -> None:
        if scopes:
            self._scopes, self._tracker, self._counters = scopes, WorkspaceTracker(), DeviceCounters()

    def __exit__(self, *error: object) -> None:
        if self._tracker is not None:
            self._tracker.__exit__(*error)
        _thread.step = _no_step
        if not self.is_empty:
            seconds, measured = time.perf_counter() - self.started, None
            events.spend("run_seconds", seconds)
            if self._tracker is not None and self._counters is not None:
                measured = self._counters.peak_bytes() or self._tracker.peak_bytes
                _learn(self, measured)
            events.emit(self._end(seconds, measured))

    def _end(self, seconds: float, measured_bytes: int | None) -> events.StepEnd:
        """What was noted."""
        spent = self._spent
        return _step_end((
            self.decision, seconds, spent["trace_seconds"] - self.traced, spent["plan_seconds"] - self.planned,
            self.phase_seconds, measured_bytes, self.num_failures, self.fallbacks, self.num_calls, self.continues,
            self.follows, self._scopes,
        ))  # fmt: skip


def _no_step() -> None:
    return None


class _Thread(threading.local):
    def __init__(self) -> None:
        self.step: Callable[[], Step | None] = _no_step
        """The step that goes on. A weak reference: an interrupt may come before the line that ends it, and then it has
        ended when nobody holds it any more."""
        self.bound: list[weakref.ref[Value]] = []
        """The values that the last step bound."""


_thread = _Thread()
_measures = Scopes[Any]("measures")


def step() -> AbstractContextManager[Step]:
    """A scope for one step; a step within a step (a hook that forces a value) is part of it."""
    outer = _thread.step()
    return Step() if outer is None else nullcontext(outer)


def memory_ran_out() -> None:
    """Memory ran out in the step that goes on."""
    found = _thread.step()
    if found is not None:
        found.num_failures += 1


def is_measuring() -> bool:
    """Whether somebody measures the memory of runs."""
    return bool(_measures.open())


@contextmanager
def measuring(scope: Any) -> Iterator[None]:
    """A scope in which every step of this thread is measured; the steps' events name it."""
    with _measures.inside(scope):
        yield


def remember(values: Iterable[Value]) -> None:
    """These values were bound by the step that goes on."""
    _thread.bound = list(map(weakref.ref, values))


def was_bound_last(values: Iterable[Value]) -> bool:
    """Whether one of the values was bound by the step before."""
    bound = [value for reference in _thread.bound if (value := reference()) is not None]
    return bool(bound) and not set(bound).isdisjoint(values)


def _learn(step: Step, measured_bytes: int) -> None:
    """A peak above the projection corrects the next plan, unless plans are frozen."""
    decision = step.decision
    if decision is None or decision.how != "split" or decision.projected_bytes is None:
        return
    if measured_bytes > decision.projected_bytes:
        events.count("projection::too low")
        if decision.budget.tune:
            events.count("plan::changed by measuring")
            correct(decision.program, measured_bytes - decision.projected_bytes)
            forget_decisions()
