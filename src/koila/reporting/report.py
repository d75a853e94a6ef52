"""Reports: what a step was expected to take, what it took, and what was done.

*Takes* the `StepEnd` events of the engine. *Gives* a frozen, printable `Report` for each step: `item()` and the
`backward()` after it are one. A report can be saved as JSON, read again, and saved as an HTML page.
"""

from __future__ import annotations

import json
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any

from koila import events
from koila._bytes import format_bytes
from koila.errors import KoilaError
from koila.execution.steps import measuring
from koila.planning.decide import Decision
from koila.reporting.page import page
from koila.reporting.picture import notebook
from koila.reporting.saving import write_text
from koila.reporting.view import View, decision_view
from koila.reporting.words import counted

NUM_REPORTS = 100
"""So many reports are kept."""
MINOR_SHARE = 4
"""What starts from the results of a step and has fewer than one in so many of its calls is no run of its own."""
FORMAT = "koila report 1"
"""The first entry of a saved report."""
NO_PLAN = """no picture: without a budget in bytes nothing was projected, or the plan is gone
  try: koila.explain(loss, backward=True, html="explain.html") before the run draws any program"""


class _Planned:
    """The picture of a run, made when it is asked for; the plan is not kept alive for it."""

    def __init__(self, decision: Decision) -> None:
        self._decision = weakref.ref(decision)

    def __call__(self) -> View:
        decision = self._decision()
        return View() if decision is None else decision_view(decision)


@dataclass(frozen=True)
class Report:
    """One step."""

    how: str = "nothing ran"
    """`whole`, `split`, or that nothing ran."""
    num_samples: int = 0
    """The batch size."""
    chunk_size: int = 0
    """Samples per chunk; 0 for a whole run."""
    num_chunks: int = 0
    """Chunks per phase."""
    allowed_bytes: int | None = None
    """The budget, if there was one."""
    projected_bytes: int | None = None
    """What the run was expected to allocate at its peak, if a budget asked for it."""
    measured_bytes: int | None = None
    """What it allocated at its peak, inside `koila.measure()`."""
    seconds: float = 0.0
    """How long it took in all."""
    trace_seconds: float = 0.0
    """How much of that was tracing: only for a program that is new."""
    plan_seconds: float = 0.0
    """How much of that was planning: only for a decision that is new."""
    num_calls: int = 0
    """The recorded calls that were run."""
    phase_seconds: tuple[float, ...] = ()
    """The time of each phase."""
    recomputed: dict[str, int] = field(default_factory=dict)
    """Operators that a chunk runs more than once, with how often they are run again."""
    regions: tuple[str, ...] = ()
    """Parts that were cut along another axis."""
    offloaded: int = 0
    """Values that were kept in a file."""
    fallbacks: tuple[str, ...] = ()
    """What could not be done as asked, and why."""
    retries: int = 0
    """How often memory ran out and a smaller plan was taken."""
    make_view: Callable[[], View] = field(default=View, repr=False, compare=False)
    """Makes what a page shows. It is there for the last run, and as long as the plan is in use."""

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        found = {each.name: getattr(self, each.name) for each in fields(self) if each.compare}
        return {"format": FORMAT, **found, "view": self.make_view().to_dict()}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Report:
        """The report that `to_dict` gave."""
        view = View.from_dict(data["view"])
        known = {each.name: data[each.name] for each in fields(Report) if each.compare}
        lists = {name: tuple(value) for name, value in known.items() if isinstance(value, list)}
        return Report(**{**known, **lists}, make_view=lambda: view)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the report to a file.

        Args:
            path: One that ends in `.json`, which `Report.load` reads, or in `.html`, a page for a browser.

        Raises:
            KoilaError: It ends in neither.
        """
        write_text(path, {".html": self._page, ".json": lambda: json.dumps(self.to_dict())})

    @staticmethod
    def load(path: str | PathLike[str]) -> Report:
        """Read a report that was saved as `.json`.

        Raises:
            KoilaError: The file is no saved report.
            OSError: It cannot be read.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            if data["format"] != FORMAT:
                raise ValueError(f"its format is {data['format']!r}, not {FORMAT!r}")
            return Report.from_dict(data)
        except (ValueError, KeyError, TypeError) as error:
            raise KoilaError(
                f"{str(path)!r} is no saved report: {error}", hint='koila.last_report().save("run.json") writes one'
            ) from error

    def _page(self) -> str:
        view = self.make_view()
        text = str(self) if view.points else f"{self}\n{NO_PLAN}"
        return page("koila: a report of one run", text, view, self.allowed_bytes)

    def _repr_html_(self) -> str:
        """What a notebook shows: the memory as a picture, and the text."""
        return notebook(str(self), self.make_view(), self.allowed_bytes)

    def __reduce__(self) -> tuple[Any, ...]:
        return Report.from_dict, (self.to_dict(),)

    def __str__(self) -> str:
        lines = [f"{self.how}: {self.num_samples} samples in {self.seconds:.3f} s"]
        if self.chunk_size:
            cut = f"{self.num_chunks} chunks of {self.chunk_size}" if self.num_chunks > 1 else "all at once, by a plan"
            lines[0] += f", {cut}, {counted(len(self.phase_seconds), 'phase')}"
        sizes = {"allowed": self.allowed_bytes, "projected": self.projected_bytes, "measured": self.measured_bytes}
        known = [f"{name} {format_bytes(size)}" for name, size in sizes.items() if size is not None]
        lines += ["  " + ", ".join(known)] if known else []
        lines += [f"  phase {n + 1}: {seconds:.3f} s" for n, seconds in enumerate(self.phase_seconds)]
        again = ", ".join(f"{name} ×{times}" for name, times in sorted(self.recomputed.items()))
        lines += [f"  computed again: {again}"] if again else []
        lines += [f"  {region}" for region in self.regions]
        lines += [f"  {counted(self.offloaded, 'value')} kept in a file"] if self.offloaded else []
        lines += [f"  fell back: {reason}" for reason in self.fallbacks]
        lines += [f"  memory ran out {counted(self.retries, 'time')}"] if self.retries else []
        first = {"traced": self.trace_seconds, "planned": self.plan_seconds}
        once = [f"{name} in {seconds:.3f} s" for name, seconds in first.items() if seconds]
        lines += [f"  {', '.join(once)}, once for this program"] if once else []
        return "\n".join(lines)


def _report(end: events.StepEnd) -> Report:
    found = Report(
        measured_bytes=end.measured_bytes, seconds=end.seconds, trace_seconds=end.trace_seconds,
        plan_seconds=end.plan_seconds, phase_seconds=end.phase_seconds, fallbacks=end.fallbacks, retries=end.retries,
        num_calls=end.num_calls,
    )  # fmt: skip
    return found if end.decision is None else _with_decision(found, end.decision)


def _with_decision(report: Report, decision: Decision) -> Report:
    plan = decision.plan
    found = replace(
        report, how=decision.how, num_samples=decision.num_samples, allowed_bytes=decision.budget.allowed_bytes,
        projected_bytes=decision.projected_bytes, make_view=_Planned(decision),
    )  # fmt: skip
    if plan is None:
        return found
    return replace(
        found, chunk_size=plan.chunk_size, num_chunks=len(plan.chunks), recomputed=dict(plan.recomputed),
        regions=plan.regions, offloaded=len(plan.offloaded),
    )  # fmt: skip


def _joined(first: Report, second: Report) -> Report:
    """A value that was read, and the backward pass after it, as one step."""
    main = second if second.how != "nothing ran" else first
    measured = [each for each in (first.measured_bytes, second.measured_bytes) if each is not None]
    return replace(
        main, seconds=first.seconds + second.seconds, trace_seconds=first.trace_seconds + second.trace_seconds,
        plan_seconds=first.plan_seconds + second.plan_seconds, num_calls=first.num_calls + second.num_calls,
        phase_seconds=first.phase_seconds + second.phase_seconds, retries=first.retries + second.retries,
        fallbacks=tuple(dict.fromkeys(first.fallbacks + second.fallbacks)),
        measured_bytes=max(measured) if measured else None,
    )  # fmt: skip


_Ends = tuple[events.StepEnd, ...]
"""The ends of a step and of those that continue it."""


def _report_of(ends: _Ends) -> Report:
    found, *others = map(_report, ends)
    for other in others:
        found = _joined(found, other)
    return found


def _holds_plan(end: events.StepEnd) -> bool:
    return end.decision is not None and end.decision.plan is not None


class Reports:
    """The last reports, oldest first; a listener of the engine's steps.

    A report is made when somebody reads it, or at once where that would keep a plan alive until then.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all steps."""
        self._steps: deque[_Ends | Report] = deque(maxlen=NUM_REPORTS)
        self._last: _Ends | Report = Report()
        self._num_calls = 0
        """The calls of the last step that is a run of its own."""
        self._decision: Decision | None = None
        """That step's; it is kept so that the last report can be drawn."""
        self._waiting: deque[events.StepEnd] = deque()
        """Ends of steps that nobody has looked at; all of them are runs without a plan."""

    @property
    def all(self) -> list[Report]:
        """The last reports, oldest first."""
        self._look()
        return [_made(step) for step in self._steps]

    @property
    def last(self) -> Report:
        """The last step that a person would call a run: not the reading of an accuracy after it."""
        self._look()
        return _made(self._last)

    def __call__(self, event: events.Event) -> None:
        assert type(event) is events.StepEnd
        waiting, decision = self._waiting, event.decision
        waiting.append(event)
        if event.scopes or len(waiting) >= NUM_REPORTS or (decision is not None and decision.plan is not None):
            self._look()

    def _look(self) -> None:
        """Take the steps that wait."""
        while self._waiting:
            self._take(self._waiting.popleft())

    def _take(self, event: events.StepEnd) -> None:
        step: _Ends | Report = _report(event) if _holds_plan(event) else (event,)
        num_calls = event.num_calls
        joins = event.continues and bool(self._steps)
        if joins:
            before = self._steps.pop()
            if isinstance(before, tuple) and isinstance(step, tuple):
                step = (*before, event)
            else:
                step = _joined(_made(before), _made(step))
            num_calls = _made(step).num_calls
        self._steps.append(step)
        if not event.follows or num_calls * MINOR_SHARE >= self._num_calls:
            self._last, self._num_calls = step, num_calls
            self._decision = event.decision or self._decision
        for scope in event.scopes:
            scope.add(_made(step), joins)


def _made(step: _Ends | Report) -> Report:
    return step if isinstance(step, Report) else _report_of(step)


reports = Reports()


class Measure:
    """What `koila.measure()` has seen."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        """One for each step, in order."""

    def add(self, report: Report, joins: bool) -> None:
        """A step has ended, which may be the second half of the one before."""
        if joins and self.reports:
            self.reports.pop()
        self.reports.append(report)

    @property
    def peak_bytes(self) -> int:
        """The largest peak of them."""
        return max((report.measured_bytes or 0 for report in self.reports), default=0)


@contextmanager
def measure() -> Iterator[Measure]:
    """A scope in which the memory of every run is measured; it makes runs slower.

    On an accelerator its own counter is asked, whose peak then begins anew with each run.

    Yields:
        A `Measure`: `reports` of the runs so far, `peak_bytes` of all of them.

    >>> import torch, koila
    >>> with koila.measure() as seen:
    ...     total = (koila.lazy(torch.ones(4, 256)) * 2).sum().item()
    >>> seen.peak_bytes
    4100
    """
    scope = Measure()
    with measuring(scope):
        yield scope
