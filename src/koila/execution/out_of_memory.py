"""When memory runs out in the middle of a run: how it shows, what can be given back, and the smaller decision.

*Takes* a job, its decision, and a function that runs it. *Gives* the results of the first decision that did not run out
of memory; it stays in force for the next steps of the program. In the end a `BudgetError` with the facts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

from koila import events
from koila._budget import Budget, default_bytes, free_bytes
from koila._bytes import format_bytes
from koila._free import give_back
from koila.errors import BudgetError
from koila.events import Wait
from koila.execution.process_memory import try_without_heap
from koila.execution.steps import memory_ran_out
from koila.ir.failures import is_out_of_memory
from koila.ir.job import Job
from koila.ir.source import user_site
from koila.planning.decide import Decision, decide
from koila.planning.in_force import decision_for, put_in_force
from koila.planning.whole_peak import whole_peak

T = TypeVar("T")
_TRIES = 8
"""So many decisions are tried in one run."""


def run_until_it_fits(
    job: Job, run: Callable[[Decision], T], noted: Callable[[Decision], None] | None = None, failed: bool = False
) -> T:
    """Run a job by its decision; if memory runs out all the same, by smaller and smaller ones.

    Args:
        job: The job.
        run: Runs it by a decision, or raises with nothing changed.
        noted: Told each decision before it is tried.
        failed: Whether memory ran out with the first decision before; it is then left out.

    Raises:
        BudgetError: Memory ran out with every decision that was tried.
    """
    # Planning needs memory itself.
    decision = retried_once(lambda: decision_for(job), f"a program of {len(job.graph.nodes)} calls was planned")
    failed = failed or _is_too_large(job, decision)
    wait = Wait("memory ran out; trying smaller plans")
    try:
        for number, following in enumerate(_attempts(job, decision)):
            if number == 0 and failed:
                wait.resume()
                continue
            if noted is not None:
                noted(following)
            try:
                result = run(following)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                wait.resume()
                note_failure(error)
            else:
                if following is not decision:
                    put_in_force(job, following)
                return result
    finally:
        wait.suspend()
    raise _exhausted(job, decision)


def _is_too_large(job: Job, decision: Decision) -> bool:
    """Whether an accelerator has less than a decision needs that was made for what was free at an earlier step."""
    if job.device.type == "cpu" or not decision.budget.is_default or decision.projection is None:
        return False
    return decision.projection.peak_bytes > min(map(free_bytes, job.devices))


def retried_once(act: Callable[[], T], what: str) -> T:
    """Do something that needs a little memory; if it runs out, once more after giving back what can be given back.

    Raises:
        BudgetError: It ran out again.
    """
    for is_last in (False, True):
        try:
            return act()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            note_failure(error)
            if is_last:
                break
    raise BudgetError(
        f"memory ran out while {what}; nothing was run",
        where=f"asked for at {user_site()}",
        hint="free memory before the run",
    )


def _attempts(job: Job, decision: Decision) -> Iterator[Decision]:
    """The decision, smaller ones as long as there are any, and the last once more: what ran out may be back."""
    for _ in range(_TRIES):
        yield decision
        if try_without_heap(decision):
            yield decision
        following = _smaller(job, decision)
        if following is None:
            yield decision
            return
        decision = following


def _smaller(job: Job, decision: Decision) -> Decision | None:
    """A decision with fewer bytes than one that ran out of memory; None if there is none."""
    budget = _less(job, decision)
    if budget is None:
        return None
    try:
        found = decide(replace(job.within(budget), previous=decision))
    except BudgetError:
        return None
    return found if found.how == "split" and _is_smaller(found, decision) else None


def _less(job: Job, decision: Decision) -> Budget | None:
    if decision.how == "split" and decision.budget.allowed_bytes is None:
        assert decision.plan is not None
        chunk = decision.plan.chunk_size // 2
        return replace(decision.budget, chunk_size=chunk) if chunk >= decision.plan.facts.granule else None
    peak = decision.projection.peak_bytes if decision.projection is not None else whole_peak(job).peak_bytes
    allowed = peak // 2
    if job.device.type != "cpu":
        # An accelerator says exactly what it has: the first smaller plan fits into that.
        free = min(default_bytes(0, device) for device in job.devices)
        allowed = free if free < peak else allowed
    return replace(decision.budget, chunk_size=None, allowed_bytes=max(1, allowed), is_default=True)


def _is_smaller(found: Decision, than: Decision) -> bool:
    if than.how == "whole" or found.projection is None or than.projection is None:
        return True
    return found.projection.peak_bytes < than.projection.peak_bytes or found.chunk_size < than.chunk_size


def note_failure(error: Exception) -> None:
    """Give back what can be given back, and say so (Rule 6)."""
    events.count("retries", site=user_site())
    memory_ran_out()
    error.__traceback__ = None  # Its frames hold the tensors of the run that failed.
    give_back()


def _exhausted(job: Job, decision: Decision) -> BudgetError:
    peak = decision.projection.peak_bytes if decision.projection is not None else None
    first = "" if peak is None else f" (projected {format_bytes(peak)} for the first of them)"
    allowed = decision.budget.allowed_bytes
    return BudgetError(
        f"memory ran out with every plan that was tried{first}; gradients and buffers are as they were",
        where=f"a program of {len(job.graph.nodes)} calls, first recorded at {job.graph.nodes[0].site}",
        hint="free memory, or name what the run may use: koila.budget(...)",
        allowed_bytes=allowed or 0,
    )
