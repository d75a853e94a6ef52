"""The curve of time and memory: what other budgets would give.

*Takes* a job and the decision about it. *Gives* `Alternative`s, from the program as it is to the smallest budget. Each
is a decision of its own, made as a run would make it; nothing is run. There is one search per budget, so a long program
takes a while.
"""

from __future__ import annotations

from dataclasses import replace

from koila._bytes import format_bytes
from koila.analysis.program import NotSplittable, program_of
from koila.errors import BudgetError
from koila.ir.job import Job
from koila.planning.cost import node_seconds
from koila.planning.decide import Decision, decide
from koila.planning.whole_peak import whole_peak
from koila.reporting.view import Alternative
from koila.reporting.words import counted

SHARES = (0.75, 0.5, 0.35, 0.25, 0.15, 0.1)
"""The budgets that are tried, as shares of what the program needs as it is."""


def curve(job: Job, decision: Decision) -> tuple[Alternative, ...]:
    """Plans for smaller and smaller budgets, largest first, with the chosen one among them."""
    whole_bytes, once = whole_peak(job).peak_bytes, program_seconds(job)
    found = [Alternative(None, whole_bytes, 1.0, "all samples at once, by eager's own kernels", decision.plan is None)]
    if decision.plan is not None:
        found.append(_alternative(decision, once, is_chosen=True))
    for share in SHARES:
        try:
            found.append(_alternative(_decide(job, int(whole_bytes * share)), once))
        except BudgetError as refused:
            found += _smallest(job, refused, once)
            break
    return tuple(sorted(_distinct(found), key=lambda each: -(each.projected_bytes or 0)))


def program_seconds(job: Job) -> float | None:
    """The expected time of the program as it is; None if it cannot be traced. Only ratios matter."""
    try:
        joint = program_of(job.graph, job.demand).joint
    except NotSplittable:
        return None
    return sum(node_seconds(node) for node in joint.module.graph.nodes if node.op == "call_function")


def relative_time(decision: Decision, once: float | None) -> float | None:
    """The expected time of a decision over that of the program as it is."""
    if decision.plan is None:
        return 1.0
    return None if decision.seconds is None or not once else decision.seconds / once


def _decide(job: Job, allowed_bytes: int) -> Decision:
    return decide(job.within(replace(job.budget, chunk_size=None, allowed_bytes=allowed_bytes, is_default=False)))


def _smallest(job: Job, refused: BudgetError, once: float | None) -> list[Alternative]:
    """The smallest budget that a refusal names."""
    needed = refused.needed_bytes
    try:
        return [] if needed is None else [_alternative(_decide(job, needed), once)]
    except BudgetError:  # What cannot be cut is refused with what it needs as it is.
        return []


def _alternative(decision: Decision, once: float | None, is_chosen: bool = False) -> Alternative:
    plan, projection = decision.plan, decision.projection
    text = "all samples at once"
    if plan is not None:
        again, phases = sum(plan.recomputed.values()), len(plan.phases)
        if phases and len(plan.chunks) > 1:
            text = f"{len(plan.chunks)} chunks of {plan.chunk_size}, {counted(phases, 'phase')}"
        text += f", {counted(again, 'call')} computed again" if again else ""
        text += f", {counted(len(plan.regions), 'part')} cut along another axis" if plan.regions else ""
        text += ", some values in a file" if plan.offloaded else ""
    return Alternative(
        decision.budget.allowed_bytes, None if projection is None else projection.peak_bytes,
        relative_time(decision, once), text, is_chosen,
    )  # fmt: skip


def _distinct(found: list[Alternative]) -> list[Alternative]:
    """Each way to run once; the chosen one stays."""
    kept: dict[tuple[int | None, str], Alternative] = {}
    for each in found:
        kept.setdefault((each.projected_bytes, each.text), each)
    return list(kept.values())


def curve_text(alternatives: tuple[Alternative, ...]) -> list[str]:
    """A line for each plan: bytes, time and how it runs."""
    lines = []
    for each in alternatives:
        size = "?" if each.projected_bytes is None else format_bytes(each.projected_bytes)
        time = "" if each.relative_time is None else f"about {each.relative_time:.2f} × the time"
        lines.append(f"{size:>12}  {time:<22}  {each.text}{'  ← this one' if each.is_chosen else ''}")
    return lines
