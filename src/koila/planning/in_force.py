"""The decisions in force: made once for each job, looked up by every later step, replaced by faster or smaller ones.

*Takes* a `Job`. *Gives* the `Decision` by which it runs now. `decide` chooses; here stands what was chosen, why a job
was refused, how plans of other sizes were made, what memory has forced, and which plans a loop has tried.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from weakref import WeakKeyDictionary

import torch

from koila import events
from koila.errors import BudgetError
from koila.ir.cache import Cache
from koila.ir.job import Job, Wanted
from koila.ir.numbers import structure_of
from koila.ir.source import user_site
from koila.planning.decide import Decision, decide
from koila.planning.recipes import Recipe
from koila.planning.search import RECOMPUTING
from koila.planning.trials import SHARES, Trial, Way

MAX_STEPS = 5_000
"""Decisions are kept as long as their plans and joint graphs have fewer steps and nodes in all; each takes about 1.5
KiB."""
ALWAYS = 4
"""So many are kept in any case: the programs of a loop, with its evaluation and its short last batches."""


def _num_steps(decision: Decision) -> int:
    if decision.plan is None:
        return 1
    nodes = len(decision.plan.facts.joint.module.graph.nodes)
    return nodes + sum(len(schedule.steps) for schedule in decision.plan.schedules)


_decisions: Cache[Decision] = Cache("decision_cache", MAX_STEPS, _num_steps, ALWAYS)
_forced: Cache[Decision] = Cache("forced_decisions", MAX_STEPS, _num_steps, ALWAYS)
"""Decisions that replaced one that ran out of memory."""
_tries: Cache[int] = Cache("decision_tries", 256)
"""How often a decision was made that an error of the moment may have caused."""
_TRIES = 3


def decision_for(job: Job) -> Decision:
    """The decision in force for a job; made if there is none."""
    limited = job.budget.chunk_size is not None or job.budget.allowed_bytes is not None
    if len(_forced):
        found = _look_up(_forced, job)
        if found is not None:
            return found
    if not limited:
        return decide(job)  # Nothing to choose, and nothing to remember.
    found = _look_up(_decisions, job)
    if found is not None:
        return _tried(job, found)
    found = _searched(job)
    _carry(job, found)
    tries = (_tries.get(job.key) or 0) + 1
    if found.is_final or tries >= _TRIES:
        _keep(job, found)
    else:
        _tries.add(job.key, tries)
    return found


# What is known of other budgets: a plan that fits a smaller one fits a larger one, too.


_siblings: WeakKeyDictionary[Decision, Hashable] = WeakKeyDictionary()
"""By decision that is in force at any budget, its job whatever the budget."""
_measured: WeakKeyDictionary[Decision, float] = WeakKeyDictionary()
"""How long a step by a decision took that stayed."""


def _without_size(job: Job) -> Hashable:
    return job.within(replace(job.budget, allowed_bytes=None)).key


def _keep(job: Job, decision: Decision) -> None:
    """From now on a job runs by this decision, and jobs with larger budgets know of it."""
    _store(_decisions, job, decision)
    if decision.plan is not None and _may_be_tried(job):
        _siblings[decision] = _without_size(job)


def _that_fit(job: Job, like: Decision) -> list[Decision]:
    """The decisions of other budgets for a job that fit this one and compute the same."""
    if not _may_be_tried(job):
        return []
    allowed, key = job.budget.allowed_bytes or 0, _without_size(job)
    siblings = [each for each, known in list(_siblings.items()) if known == key]
    return [each for each in siblings if each.wanted == like.wanted and each is not like and _fits(each, job, allowed)]


def _fits(decision: Decision, job: Job, allowed_bytes: int) -> bool:
    """Whether a job may run by a decision within so many bytes."""
    assert decision.facts is not None and decision.projection is not None
    return decision.projection.peak_bytes <= allowed_bytes and decision.facts.joint.holds_for(job.graph)


def _measured_elsewhere(job: Job, best: Decision) -> Decision | None:
    """Of the decisions for smaller budgets, the one that was measured to be the fastest."""
    known = [each for each in _that_fit(job, best) if each in _measured]
    return min(known, key=_measured.__getitem__, default=None)


# Other plans that fit, tried in the steps of a loop.


_trials: WeakKeyDictionary[Decision, Trial[Decision]] = WeakKeyDictionary()
"""By the decision that is running, what was tried for its program; a trial that held its key would keep it for good."""
_WORTH_A_TRY = 1.5
"""Plans that are expected to take longer than this, over the best one, are not tried."""


def note_seconds(job: Job, decision: Decision, seconds: float) -> None:
    """A step by a decision took so long."""
    if decision.plan is None or not _may_be_tried(job):
        return
    if decision not in _trials:
        _trials[decision] = Trial(len(decision.plan.facts.joint.module.graph.nodes) * _NODE_SECONDS)
    _trials[decision].note(seconds)


def _may_be_tried(job: Job) -> bool:
    """Whether other plans may run for a job: where bytes were named, and measuring may change its plan.

    Where a limit of the process binds, a search and the blocks of another plan would take what the run needs; on an
    accelerator nobody waits for the end of a step, so nothing is known of its time.
    """
    budget = job.budget
    is_named = budget.allowed_bytes is not None and not budget.is_default and not budget.process
    return budget.tune and is_named and job.device.type == "cpu" and not torch.are_deterministic_algorithms_enabled()


_NODE_SECONDS = 1e-3
"""About how long a search takes for each node of a program."""


def are_trials_over() -> bool:
    """Whether the decisions that have run are those that stay."""
    return all(trial.is_over for trial in _trials.values())


def _tried(job: Job, running: Decision) -> Decision:
    """The decision in force, or the next one that is tried for its program."""
    trial = _trials.get(running)
    if trial is None or not trial.is_due:
        return running
    way, best, following = trial.next_way(running), trial.best, None
    assert best is not None
    while way is not None and following is None:
        following = _otherwise(job, best, way)
        way = trial.give_up() if following is None else way
    del _trials[running]
    _measured[best] = trial.best_seconds
    chosen = best if following is None else following
    trial.best = None if chosen is best else best
    _trials[chosen] = trial
    if chosen is not running:
        events.count("plan::tried" if following is not None else "plan::measured faster")
        _keep(job, chosen)
    return chosen


def _otherwise(job: Job, best: Decision, way: Way) -> Decision | None:
    """Another decision for the same job that may be faster than the best one so far; None if there is none."""
    assert best.seconds is not None
    found = _measured_elsewhere(job, best) if way == "known" else _searched_otherwise(job, best, way)
    if found is None or found.projection == best.projection or (found.seconds or 0) > _WORTH_A_TRY * best.seconds:
        return None
    return replace(found, budget=job.budget, reasons=(*found.reasons, "tried because it may be faster than expected"))


def _searched_otherwise(job: Job, best: Decision, way: Way) -> Decision | None:
    """What a search finds for another question about the same job."""
    assert best.projection is not None
    if way == "larger chunks" and best.chunk_size >= best.num_samples:
        return None
    if way in SHARES:
        asked = job.within(replace(job.budget, allowed_bytes=int(SHARES[way] * best.projection.peak_bytes)))
    elif way == "larger chunks":
        asked = replace(job, smallest_chunk=2 * best.chunk_size)
    else:
        asked = replace(job, levers=RECOMPUTING)
    try:
        found = decide(asked)
    except BudgetError:
        return None
    alike = (found.how, found.wanted) == (best.how, best.wanted) and found.projection is not None
    return found if alike else None


_refusals: Cache[BudgetError] = Cache("refusal_cache", 64)
"""By job, why it was refused: a job that is asked for again is not searched again."""


def _searched(job: Job) -> Decision:
    refused = _refusals.get(job.key)
    if refused is not None:
        events.count("plan::refused again")
        raise _asked_here(refused)
    try:
        with events.waiting(f"looking for a plan for {len(job.graph.nodes)} calls"):
            return decide(replace(job, carried=_carried(job)))
    except BudgetError as error:
        refused = error.with_traceback(None)  # Frames hold the tensors of whoever asked.
    _refusals.add(job.key, refused)
    raise _asked_here(refused)


def _asked_here(error: BudgetError) -> BudgetError:
    """The error with the line of the user's that asks now."""
    return BudgetError(
        error.fact, where=f"{user_site()} asks for it; {error.where}", hint=error.hint,
        needed_bytes=error.needed_bytes, allowed_bytes=error.allowed_bytes,
    )  # fmt: skip


_recipes: Cache[dict[Wanted, Recipe]] = Cache(
    "recipe_cache", 16_384, lambda recipes: 64 + sum(recipe.num_moves for recipe in recipes.values()), 4
)
"""By structure and budget, how the latest plans were made."""


def _structure(job: Job) -> Hashable:
    return structure_of(job.graph), job.demand, job.budget


def _carried(job: Job) -> dict[Wanted, Recipe] | None:
    """What a decision at other sizes tells about this one."""
    return None if job.budget.allowed_bytes is None else _recipes.get(_structure(job))


def _carry(job: Job, decision: Decision) -> None:
    """Let decisions at other sizes know how this one was made."""
    if decision.recipe is not None:
        key = _structure(job)
        _recipes.add(key, {**(_recipes.get(key) or {}), decision.wanted: decision.recipe})


def _look_up(cache: Cache[Decision], job: Job) -> Decision | None:
    """The decision for a job; one whose trace holds for other numbers only tells which numbers to look for."""
    found = cache.get(job.key)
    if found is None or found.facts is None or found.facts.joint.holds_for(job.graph):
        return found
    return cache.get((job.key, found.facts.joint.pinned_in(job.graph)))


def _store(cache: Cache[Decision], job: Job, decision: Decision) -> None:
    other = cache.get(job.key)
    joint = None if other is None or other.facts is None else other.facts.joint
    holds = joint is None or joint.holds_for(job.graph)
    if decision.plan is not None:
        decision.plan.facts.forget()
    cache.add(job.key if joint is None or holds else (job.key, joint.pinned_in(job.graph)), decision)


_changes: list[int] = [0]


def num_changes() -> int:
    """How often decisions in force were replaced or forgotten."""
    return _changes[0]


any_forced: Callable[[], bool] = partial(bool, _forced.entries)
"""Whether any decision was replaced because memory ran out. Every prepared run asks."""


def put_in_force(job: Job, decision: Decision) -> None:
    """From the next step on, a job like this one runs by this decision."""
    _changes[0] += 1
    _store(_forced, job, decision)


def forget_decisions() -> None:
    """Decide anew: the rules or the calibration have changed."""
    _changes[0] += 1
    _decisions.clear()
    _forced.clear()
    _tries.clear()
    _refusals.clear()
    _recipes.clear()
    _siblings.clear()
    _trials.clear()
    _measured.clear()
