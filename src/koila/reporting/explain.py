"""`koila.explain`: what will happen, in what order, how much memory and time it takes, and why.

*Takes* a job and the decision about it. *Gives* an `Explanation` with the user's lines in it: text for people, and a
page with pictures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike

import torch
from torch import fx

from koila._budget import Budget
from koila._bytes import format_bytes
from koila.analysis.program import NotSplittable
from koila.analysis.split import Facts
from koila.ir.graph import Graph
from koila.ir.job import Job
from koila.planning.decide import Decision, decide
from koila.planning.peak import Projection
from koila.planning.plan import Plan
from koila.planning.timeline import plan_timeline, story_timeline
from koila.planning.whole_peak import whole_peak, whole_story
from koila.reporting.curve import curve, curve_text, program_seconds, relative_time
from koila.reporting.page import page
from koila.reporting.picture import notebook
from koila.reporting.saving import write_text
from koila.reporting.view import View, operator_name, rows, timeline, type_name
from koila.reporting.words import counted

WORTHWHILE = 10
"""What is less than one part in so many of the peak is not worth an advice."""
MANY = 3
"""Of more values than that, only the first are named."""


@dataclass(frozen=True)
class Explanation:
    """How a program would run in chunks."""

    num_samples: int
    """The batch size; 0 if the program runs whole."""
    num_phases: int
    counts: dict[str, int]
    """How many values of the joint graph are Sliced, Merged, Whole."""
    phases: tuple[str, ...]
    """For each phase, what had to be finished before it."""
    gathers: tuple[str, ...]
    """Each value that had to be gathered: its size, the operator that asked, the user's line."""
    kept: tuple[str, ...]
    """Each value that is kept whole between phases."""
    whole_because: str | None
    """Why the program cannot be cut, if it cannot."""
    how: str = "split"
    """How it runs: `whole` or `split`; a run that is not cut is explained as it would be cut."""
    reasons: tuple[str, ...] = ()
    """Why it runs as it does."""
    chunk_size: int = 0
    """Samples per chunk; the whole batch for a run that is not cut."""
    allowed_bytes: int | None = None
    """The budget; None if there is none."""
    projected_bytes: int = 0
    """What the run will allocate at its peak."""
    whole_bytes: int = 0
    """What the program needs as it is, without any cut."""
    relative_time: float | None = None
    """The expected time over that of the program as it is; an estimate."""
    peak: str = ""
    """The largest value at the peak, with the user's line."""
    kinds: tuple[tuple[str, int], ...] = ()
    """What stands at the peak: (kind, bytes)."""
    regions: tuple[str, ...] = ()
    """Parts that are cut along another axis than the batch."""
    advice: tuple[str, ...] = ()
    """What would make it cheaper."""
    view: View = field(default=View(), repr=False, compare=False)
    """What a page shows of it."""

    @property
    def title(self) -> str:
        """What happens, in one sentence."""
        if self.how == "whole":
            samples = f"all {self.num_samples} samples" if self.num_samples else "the program"
            return f"runs {samples} at once, with eager's own kernels"
        if self.chunk_size >= self.num_samples:
            how = "computes some values again" if not self.regions else "cuts a part of the program along another axis"
            return f"runs all {self.num_samples} samples at once, and {how}"
        chunks = -(-self.num_samples // self.chunk_size)
        return f"runs in {chunks} chunks of {self.chunk_size} of the {self.num_samples} samples"

    def __str__(self) -> str:
        return "\n".join([self.title, *self._body(), *self._others()])

    def _body(self) -> Iterator[str]:
        yield from self._facts()
        yield from self._order()
        yield from self._values()
        yield from self.advice

    def _facts(self) -> Iterator[str]:
        allowed = "" if self.allowed_bytes is None else f" of {format_bytes(self.allowed_bytes)} allowed"
        eager = f"; the whole batch at once needs {format_bytes(self.whole_bytes)}" if self.how == "split" else ""
        yield f"  memory: at most {format_bytes(self.projected_bytes)}{allowed}{eager}"
        if self.how == "split" and self.relative_time is not None:
            yield f"  time: about {self.relative_time:.2f} × that of the whole batch at once (an estimate)"
        yield from (f"  why: {reason}" for reason in self.reasons)
        if self.kinds:
            yield "  at the peak: " + ", ".join(f"{kind} {format_bytes(size)}" for kind, size in self.kinds)
        yield f"  at the peak: {self.peak}"

    def _order(self) -> Iterator[str]:
        if self.whole_because is not None:
            yield f"it cannot be cut: {self.whole_because}"
            return
        counts = ", ".join(f"{number} {name}" for name, number in self.counts.items())
        were = "in this order" if self.how == "split" else "if it were cut"
        yield f"{were}: {counted(self.num_phases, 'phase')} (a phase is a loop over the chunks); values: {counts}"
        yield from (f"  phase {number + 1}: {reason}" for number, reason in enumerate(self.phases))

    def _values(self) -> Iterator[str]:
        if self.whole_because is None:
            yield from [f"  gathered: {text}" for text in self.gathers] or ["  gathered: nothing"]
            yield from (f"  kept: {text}" for text in self.kept)
            yield from (f"  cut along another axis: {text}" for text in self.regions)

    def _others(self) -> Iterator[str]:
        if self.view.alternatives:
            yield "memory and time of other budgets (estimates):"
            yield from curve_text(self.view.alternatives)

    def save(self, path: str | PathLike[str]) -> None:
        """Write one HTML page: the memory step by step, the program with its types, and other plans.

        Args:
            path: A file whose name ends in `.html`.
        """
        text = "\n".join(line.removeprefix("  ") for line in self._body())
        write_text(path, {".html": lambda: page(f"koila {self.title}", text, self.view, self.allowed_bytes)})

    def _repr_html_(self) -> str:
        """What a notebook shows: the memory as a picture, and the text."""
        return notebook(str(self), self.view, self.allowed_bytes)


def explanation(job: Job, decision: Decision, alternatives: bool = False) -> Explanation:
    """A decision as a person reads it; a run that is not cut is explained as it would be cut, where it can be.

    Args:
        job: The program and what is asked of it.
        decision: How it runs.
        alternatives: Make plans for other budgets, too; each takes as long as the first.
    """
    plan, because = _cut(job, decision)
    projection = decision.projection or whole_peak(job)
    found = Explanation(
        0, 0, {}, (), (), (), because, decision.how, decision.reasons, decision.chunk_size,
        decision.budget.allowed_bytes, projection.peak_bytes, whole_peak(job).peak_bytes,
        relative_time(decision, program_seconds(job)), _peak(job, decision, projection),
        kinds=projection.kinds, view=_view(job, decision, plan, projection),
    )  # fmt: skip
    if plan is not None:
        found = _with_plan(found, plan, job.graph)
    found = replace(found, num_samples=decision.num_samples, advice=tuple(_advice(found, decision)))
    return replace(found, view=replace(found.view, alternatives=curve(job, decision))) if alternatives else found


def _cut(job: Job, decision: Decision) -> tuple[Plan | None, str | None]:
    """The plan by which a job runs, or would run if it were cut; or why it cannot be."""
    if decision.plan is not None:
        return decision.plan, None
    try:
        cut = decide(job.within(Budget(chunk_size=1)))
    except NotSplittable as reason:
        return None, str(reason)
    return (cut.plan, None) if cut.plan is not None else (None, cut.fallback or cut.reasons[0])


def _with_plan(found: Explanation, plan: Plan, graph: Graph) -> Explanation:
    facts = plan.facts
    nodes = {node.name: node for node in facts.joint.module.graph.nodes}
    gathers = tuple(
        f"{_describe(nodes[name], graph)}, because {_operator(nodes.get(user), user)} needs all of it"
        for name, user in facts.gathers
    )
    kept = tuple(_describe(item.node, graph) for phase in plan.phases for item in phase.kept)
    reasons = tuple(_reason(plan, number, graph) for number in range(len(plan.phases)))
    return replace(
        found,
        num_phases=len(plan.phases),
        counts=_counts(facts),
        phases=reasons,
        gathers=gathers,
        kept=kept,
        regions=tuple(dict.fromkeys(plan.regions)),
    )


def _view(job: Job, decision: Decision, plan: Plan | None, projection: Projection) -> View:
    if decision.plan is not None:
        graph, stretches = job.graph, plan_timeline(decision.plan)
    else:
        story = whole_story(job)
        graph, stretches = job.whole_graph, () if story is None else story_timeline(story)
    parts, points = timeline(stretches, projection.peak_bytes, graph.sites)
    return View(parts, points, () if plan is None else rows(plan, job.graph.sites))


def _peak(job: Job, decision: Decision, projection: Projection) -> str:
    graph = job.whole_graph if decision.plan is None else job.graph
    site = "in backward" if projection.recorded is None else f"at {graph.nodes[projection.recorded].site}"
    return f"{projection.largest}, {site}"


def _advice(found: Explanation, decision: Decision) -> Iterator[str]:
    if found.how == "whole" and found.whole_because is None and decision.budget.allowed_bytes is None:
        half = format_bytes(found.whole_bytes // 2).replace(" ", "")
        yield f'to save memory, give it a budget: koila.lazy(..., budget="{half}")'
    if found.gathers:
        yield "to save memory, teach koila to cut an operator of yours that gathers (koila.rule)"
    if dict(found.kinds).get("kept values", 0) * WORTHWHILE > found.projected_bytes and decision.budget.offload is None:
        yield "to save memory, let values that are kept wait in a file: koila.budget(..., offload=True)"
    if decision.plan is not None and (again := sum(decision.plan.recomputed.values())):
        yield f"to save time, allow more memory: {counted(again, 'call')} computed again per chunk"
    elif decision.plan is not None and found.chunk_size < found.num_samples:
        yield "to save time, allow more memory: larger chunks would fit"


def _reason(plan: Plan, number: int, graph: Graph) -> str:
    if number == 0:
        return "what needs nothing else of the batch"
    ended = plan.phases[number - 1].targets
    return "waits for " + _several([_describe(item.node, graph) for item in ended])


def _several(texts: Sequence[str]) -> str:
    return "; ".join(texts[:MANY]) + (f" and {len(texts) - MANY} more" if len(texts) > MANY else "")


def _counts(facts: Facts) -> dict[str, int]:
    names = Counter(type_name(item) for item in facts.items if item.kind not in ("finish", "gather", "slice"))
    return dict(sorted(names.items()))


def _operator(node: fx.Node | None, name: str) -> str:
    return operator_name(node) if node is not None else name


def _describe(node: fx.Node, graph: Graph) -> str:
    value = node.meta.get("val")
    shape = ""
    if isinstance(value, torch.Tensor):
        shape = f" {list(value.shape)} ({format_bytes(value.numel() * value.element_size())})"
    recorded = node.meta.get("recorded")
    place = f" at {graph.nodes[recorded].site}" if recorded is not None else " in backward"
    return f"{operator_name(node)}{shape}{place}"
