"""Steps: what is noted while something that was asked for is computed.

*Takes* what the engine does. *Gives* one `StepEnd` event for each step; reporting makes reports of them. Nothing here
is read by the engine to decide anything.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from koila import events
from koila._scopes import Scopes
from koila.execution.device_counters import DeviceCounters
from koila.ir.node import Value
from koila.planning.calibration import correct
from koila.planning.decide import Decision, forget_decisions
from koila.planning.tracker import WorkspaceTracker


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

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.traced, self.planned = events.spent_seconds("trace_seconds"), events.spent_seconds("plan_seconds")

    def tries(self, decision: Decision) -> None:
        """A decision is tried."""
        self.decision, self.is_empty = decision, False
        if decision.fallback is not None:
            self.fallbacks = (*self.fallbacks, decision.fallback)

    def end(self, measured_bytes: int | None, scopes: tuple[Any, ...]) -> events.StepEnd:
        """What was noted."""
        return events.StepEnd(
            self.decision, time.perf_counter() - self.started, events.spent_seconds("trace_seconds") - self.traced,
            events.spent_seconds("plan_seconds") - self.planned, self.phase_seconds, measured_bytes,
            self.num_failures, self.fallbacks, self.num_calls, self.continues, self.follows, scopes,
        )  # fmt: skip


class _Last(threading.local):
    def __init__(self) -> None:
        self.values: list[weakref.ref[Value]] = []
        """The values that the last step of this thread bound."""


_last = _Last()
_steps = Scopes[Step]("steps")
_measures = Scopes[Any]("measures")


class step:
    """A scope for one step; a step within a step (a hook that forces a value) is part of it."""

    def __enter__(self) -> Step:
        self._outer = _steps.innermost
        if self._outer is not None:
            return self._outer
        self._scopes = _measures.all
        self._step = Step()
        self._tracker = WorkspaceTracker() if self._scopes else None
        self._counters = DeviceCounters() if self._scopes else None
        self._mark = _steps.enter(self._step)
        if self._tracker is not None:
            self._tracker.__enter__()
        return self._step

    def __exit__(self, *error: Any) -> None:
        if self._outer is not None:
            return
        if self._tracker is not None:
            self._tracker.__exit__(*error)
        _steps.leave(self._mark)
        if not self._step.is_empty:
            events.spend("run_seconds", time.perf_counter() - self._step.started)
            on_devices = 0 if self._counters is None else self._counters.peak_bytes()
            measured = on_devices or (None if self._tracker is None else self._tracker.peak_bytes)
            _learn(self._step, measured)
            events.emit(self._step.end(measured, self._scopes))


def memory_ran_out() -> None:
    """Memory ran out in the step that goes on."""
    found = _steps.innermost
    if found is not None:
        found.num_failures += 1


@contextmanager
def measuring(scope: Any) -> Iterator[None]:
    """A scope in which every step of this thread is measured; the steps' events name it."""
    with _measures.inside(scope):
        yield


def remember(values: Iterable[Value]) -> None:
    """These values were bound by the step that goes on."""
    _last.values = [weakref.ref(value) for value in values]


def was_bound_last(values: Iterable[Value]) -> bool:
    """Whether one of the values was bound by the step before."""
    bound = [value for reference in _last.values if (value := reference()) is not None]
    return bool(bound) and not set(bound).isdisjoint(values)


def _learn(step: Step, measured_bytes: int | None) -> None:
    """A peak above the projection corrects the next plan, unless plans are frozen."""
    decision = step.decision
    if decision is None or decision.how != "split" or measured_bytes is None or decision.projected_bytes is None:
        return
    if measured_bytes > decision.projected_bytes:
        events.count("projection::too low")
        if decision.budget.tune:
            events.count("plan::changed by measuring")
            correct(decision.program, measured_bytes - decision.projected_bytes)
            forget_decisions()
