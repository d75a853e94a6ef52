"""The decision: how a job runs, made once, before anything runs.

*Takes* a `Job` and the calibration. *Gives* a frozen `Decision`, or a `BudgetError` with the smallest budget that would
do. Nothing is run, no tensor is touched, nothing is written: the same job gets the same decision.

The order of preference: the program as it is, with eager's own kernels, if that fits; else in chunks with everything
that is needed, that the user holds, and that a backward pass would want; else without what is only held; else without
what is only guessed. What is guessed or held never causes a refusal.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from koila import events
from koila._budget import Budget
from koila._bytes import format_bytes
from koila.analysis.program import NotSplittable, program_of
from koila.analysis.split import Facts
from koila.errors import BudgetError
from koila.ir.job import Job, Wanted
from koila.ir.source import Site
from koila.planning.cut import Cut, Cutter, Estimate, Refused
from koila.planning.devices import planning_for
from koila.planning.machine import use_calibration
from koila.planning.peak import Projection
from koila.planning.plan import Plan
from koila.planning.recipes import Recipe
from koila.planning.whole_peak import whole_peak

How = Literal["whole", "split"]
HELD_SHARE = 4
"""Values that the user holds and nobody asked for take one part in so many of a byte budget at the most."""


@dataclass(frozen=True, eq=False)
class Decision:
    """How a job runs."""

    how: How
    """`whole`: by eager's own kernels and autograd; `split`: by a plan."""
    wanted: Wanted
    """What the run computes."""
    budget: Budget
    """The budget that it keeps to."""
    num_samples: int
    """The batch size; 0 if the program has none."""
    plan: Plan | None = None
    """The plan of a split run."""
    facts: Facts | None = None
    """How the program can be cut, for a split run."""
    estimate: Estimate | None = None
    """Its bytes and its time; None where nothing asked for them."""
    reasons: tuple[str, ...] = ()
    """Why it is what it is, in the user's words."""
    fallback: str | None = None
    """Why it runs whole although the budget asks for a cut."""
    is_final: bool = True
    """Whether it stays: one that follows from an error while tracing or planning is made anew a few times."""
    program: Hashable = None
    """Under which measuring corrects its projection."""
    recipe: Recipe | None = None
    """How a search made its plan, for other sizes."""
    sites: tuple[Site, ...] = ()
    """The user's line of each recorded call, where bytes were projected."""

    @property
    def projection(self) -> Projection | None:
        """The bytes at the peak by kind; None where nothing asked for them."""
        return None if self.estimate is None else self.estimate.projection

    @property
    def seconds(self) -> float | None:
        """How long it is expected to take; only ratios matter. None where nothing was planned."""
        return None if self.estimate is None else self.estimate.seconds

    @property
    def projected_bytes(self) -> int | None:
        """What the run will allocate at its peak, where a byte budget asked for it."""
        projection = None if self.budget.allowed_bytes is None else self.projection
        return None if projection is None else projection.peak_bytes

    @property
    def chunk_size(self) -> int:
        """Samples per chunk; the whole batch for a run that is not cut."""
        return self.num_samples if self.plan is None else self.plan.chunk_size


def decide(job: Job) -> Decision:
    """How a job runs, on its device.

    Raises:
        BudgetError: No way to run it fits its budget.
    """
    use_calibration()
    with planning_for(str(job.device), job.num_threads), job.graph.nodes[0].context.enter_dtype():
        try:
            return _choose(job)
        except Refused as refused:
            # Its frames hold the tensors of whoever asked, and the last of them holds it.
            raise refusal(job, refused.with_traceback(None)) from None


def _choose(job: Job) -> Decision:
    budget = job.budget
    if budget.chunk_size is not None:
        return _decide_chunks(job, budget.chunk_size)
    if budget.allowed_bytes is None:
        return _whole(job, None, "no budget asks for a cut")
    projection = whole_peak(job)
    if _with_backward(job, projection.peak_bytes) <= budget.allowed_bytes and job.previous is None:
        return _whole(job, projection, "all of it fits")
    try:
        return _decide_bytes(job, budget.allowed_bytes)
    except NotSplittable as reason:
        return _uncut(job, projection, reason)


_BACKWARD_LATER = 2.5
"""How many times what a forward pass takes is enough for it and the backward pass that may follow, in most programs."""


def _with_backward(job: Job, peak_bytes: int) -> float:
    """What an unsplit run needs, with the backward pass through what it leaves behind where no projection knows it.

    In chunks nothing is left behind, it is computed again: that is better than to be refused in the backward pass.
    """
    is_left = not job.demand.roots and any(value.requires_grad for value in job.whole_graph.outputs)
    return _BACKWARD_LATER * peak_bytes + job.history[1] if is_left else peak_bytes


def _whole(job: Job, projection: Projection | None, reason: str, because: NotSplittable | None = None) -> Decision:
    return Decision(
        "whole", job.wanted, job.budget, job.graph.num_samples,
        estimate=None if projection is None else Estimate(None, projection), reasons=(reason,),
        fallback=None if because is None else str(because), is_final=because is None or because.is_final,
        sites=() if projection is None else job.whole_graph.sites,
    )  # fmt: skip


def _decide_chunks(job: Job, chunk_size: int) -> Decision:
    if not job.graph.num_samples:
        events.count("whole::no batch is known")
        return _whole(job, None, "no batch is known: no input that it starts from carries one")
    if chunk_size >= job.graph.num_samples:
        return _whole(job, None, "the batch is no larger than a chunk")
    try:
        cutter = _cutter(job)
        wanted = next(_variants(job, None))
        cut = cutter.chunks(wanted, chunk_size)
    except NotSplittable as reason:
        return _whole(job, None, f"it cannot be cut: {reason}", reason)
    return _split(job, cut, (f"chunks of {cut.plan.chunk_size}: the chunk size that was asked for",))


def _uncut(job: Job, projection: Projection, reason: NotSplittable) -> Decision:
    """What cannot be cut runs whole if that fits, or if nobody named a budget; else it is refused (Rule 2)."""
    fits = projection.peak_bytes <= (job.budget.allowed_bytes or 0)
    if job.previous is not None or not (fits or job.budget.is_default):
        where = f"{projection.largest}; it runs whole: {reason}"
        raise Refused(projection.peak_bytes, where)
    return _whole(job, projection, f"it cannot be cut: {reason}", reason)


def _cutter(job: Job) -> Cutter:
    if job.must_run_whole is not None:
        raise NotSplittable(job.must_run_whole)
    if job.wanted.is_nothing:
        raise NotSplittable("only views are wanted")
    return Cutter(job, program_of(job.graph, job.demand))


def _variants(job: Job, allowed_bytes: int | None) -> Iterator[Wanted]:
    """What a run may compute beside what it must, from all of it to nothing."""
    seen: set[Wanted] = set()
    for wanted in (each for each in (job.guessed, job.wanted) if each is not None):
        for extra in (_fitting(job, wanted, allowed_bytes), ()):
            found = replace(wanted, outputs=tuple(sorted({*wanted.outputs, *extra})))
            if found not in seen:
                seen.add(found)
                yield found


def _fitting(job: Job, wanted: Wanted, allowed_bytes: int | None) -> tuple[int, ...]:
    """Of the values that the user holds, the smallest that fit into their share.

    Without a backward pass in this run, values that require grad stay pending: a later backward pass then goes through
    the whole program at once, instead of through a border at each of them.
    """
    outputs = job.graph.outputs
    held = [index for index in job.held if wanted.gradients or not outputs[index].requires_grad]
    if allowed_bytes is None:
        return tuple(held)
    room, found = allowed_bytes // HELD_SHARE, []
    for index in held:
        room -= outputs[index].prepass.num_bytes
        if room >= 0:
            found.append(index)
    return tuple(found)


def _decide_bytes(job: Job, allowed_bytes: int) -> Decision:
    cutter = _cutter(job)
    for wanted in _variants(job, allowed_bytes):
        least = wanted == job.wanted
        cut = cutter.within(wanted, allowed_bytes, thorough=least or job.guessed == wanted)
        if cut is not None:
            return _split(job, cut, _reasons(job, cut))
    refused = _smallest(job, cutter)
    if not job.budget.is_default and refused.needed_bytes > (job.budget.most_bytes or 0):
        raise refused
    # What is only the default, or what the process has grown by, causes no refusal: it is met as far as possible.
    left = "what is free" if job.budget.is_default else "what the growth of the process leaves"
    events.count(f"budget::over {left}")
    cut = cutter.within(job.wanted, refused.needed_bytes, thorough=True)
    assert cut is not None
    return _split(job, cut, (*_reasons(job, cut), f"it needs more than {left}"))


def _smallest(job: Job, cutter: Cutter) -> Refused:
    """The smallest budget that is enough for a step: for what is asked now and for the backward that may follow."""
    refused = cutter.smallest(job.wanted)
    if job.demand.roots and not job.wanted.gradients and not job.budget.is_default:
        backward = cutter.smallest(replace(job.wanted, gradients=True))
        refused = max(refused, backward, key=lambda each: each.needed_bytes)
    return refused


def _split(job: Job, cut: Cut, reasons: tuple[str, ...]) -> Decision:
    arena = cut.plan.arena
    if arena is not None:
        what = f"{arena.num_values} results lie in one buffer of {format_bytes(arena.num_bytes)}"
        reasons = (*reasons, f"{what}: new pages are handed out once per run")
    return Decision(
        "split", cut.wanted, job.budget, job.graph.num_samples, cut.plan, cut.facts, cut.estimate, reasons,
        program=cut.program, recipe=cut.recipe, sites=job.graph.sites,
    )  # fmt: skip


def _reasons(job: Job, cut: Cut) -> tuple[str, ...]:
    plan, found = cut.plan, []
    if plan.chunk_size < plan.facts.num_samples:
        found.append(f"chunks of {plan.sizes_text}: the largest with which the fastest plan found fits")
    again = sum(plan.recomputed.values())
    if again:
        found.append(f"{again} calls computed again per chunk: cheaper than the bytes of their values")
    if plan.offloaded:
        found.append("values between phases wait in a file: they do not fit beside the rest")
    left = set(job.held) - set(cut.wanted.outputs)
    if left:
        sizes = [job.graph.outputs[index].prepass for index in sorted(left)]
        texts = ", ".join(f"{prepass} ({format_bytes(prepass.num_bytes)})" for prepass in sizes)
        found.append(f"not kept, although the program still holds it: {texts}; koila.keep(value) makes it a result")
    return tuple(found)


def refusal(job: Job, refused: Refused) -> BudgetError:
    """The error for a budget that cannot be met; exactly the one that it names would be accepted."""
    needed, allowed = refused.needed_bytes, job.budget.allowed_bytes or 0
    site = "" if refused.recorded is None else f", {job.graph.nodes[refused.recorded].site}"
    kept = [job.graph.outputs[index] for index in job.wanted.outputs if job.graph.outputs[index].keep]
    held = f"; kept by koila.keep: {', '.join(repr(value.prepass) for value in kept)}" if kept else ""
    return BudgetError(
        f"needs {needed} bytes ({format_bytes(needed)}) at the smallest, allowed {allowed} ({format_bytes(allowed)})"
        + (f" on {job.device}" if job.device.type != "cpu" else ""),
        where=f"at the peak: {refused.largest}{site}{held}",
        hint=f"budget={needed}; koila.explain(value, backward=True) shows what cannot be cut",
        needed_bytes=needed,
        allowed_bytes=allowed,
    )
