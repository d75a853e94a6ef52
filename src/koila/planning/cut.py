"""Cutting: the plan of a program for a selection of its results, and all the bytes that belong to it.

*Takes* a traced program, what is wanted of it, and a chunk size or a byte limit. *Gives* a `Cut`: a plan and what it
will allocate, what stands outside the plan included.
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property

from koila import events
from koila.analysis.program import NotSplittable, Program, without_collection
from koila.analysis.split import Facts
from koila.errors import BudgetError
from koila.ir.job import Job, Wanted
from koila.planning.calibration import correction_bytes
from koila.planning.carrying import Carrying
from koila.planning.devices import current_device, current_rules, planning_for
from koila.planning.layouts import layout_of
from koila.planning.levers.offload import copying_bytes
from koila.planning.peak import Projection, project
from koila.planning.placement import arena_for
from koila.planning.plan import Plan, make_plan
from koila.planning.recipes import Recipe
from koila.planning.search import ALL, Search
from koila.planning.sizing import expected_seconds
from koila.planning.whole_peak import drawn_bytes, leaf_bytes


@dataclass(frozen=True, eq=False)
class Estimate:
    """The bytes and the time of a run, worked out when somebody asks: a chunk size that was asked for needs neither."""

    plan: Plan | None
    """None: it runs whole."""
    own: Projection | None = None
    """What the plan, or the whole run, takes by itself, where it is known."""
    outside_bytes: int = 0
    """What is alive beside it."""
    after_bytes: int = 0
    """What is alive once it has run."""
    copying_bytes: int = 0
    """What copies to and from the host may hold beside the plan's own values while they are on their way."""
    device: str = field(default_factory=current_device)

    @cached_property
    def _alone(self) -> Projection:
        if self.own is not None:
            return self.own
        assert self.plan is not None
        return project(self.plan)

    @cached_property
    def projection(self) -> Projection:
        """The bytes at the peak by kind, with all that belongs to the run."""
        alone, room = self._alone, self.copying_bytes
        beside = max(self.outside_bytes, self.after_bytes - alone.peak_bytes)
        kinds = (("objects and drawn numbers", beside), ("copies on their way", room))
        found = (*alone.kinds, *(kind for kind in kinds if kind[1]))
        return replace(alone, peak_bytes=alone.peak_bytes + beside + room, kinds=found)

    @cached_property
    def seconds(self) -> float | None:
        """How long a plan is expected to take; only ratios matter."""
        if self.plan is None:
            return None
        with planning_for(self.device):
            return expected_seconds((self.plan, self._alone))


@dataclass(frozen=True, eq=False)
class Cut:
    """How a program runs in chunks."""

    wanted: Wanted
    """The results that it computes."""
    plan: Plan
    facts: Facts
    """How the program can be cut: the plan's own, unless the plan leaves it uncut."""
    estimate: Estimate
    program: Hashable
    """Under which measuring corrects the projection."""
    recipe: Recipe | None = None
    """How a search has made the plan, for other sizes of the program."""


class Refused(Exception):
    """No plan fits; the smallest would need so many bytes."""

    def __init__(self, needed_bytes: int, largest: str, recorded: int | None = None) -> None:
        super().__init__(f"needs {needed_bytes} bytes")
        self.needed_bytes, self.largest, self.recorded = needed_bytes, largest, recorded


class Cutter:
    """The cuts of one job's program; what its searches found on the way goes with it."""

    def __init__(self, job: Job, program: Program) -> None:
        self.job, self.program = job, program
        self._searches: dict[Wanted, Search] = {}

    def key(self, wanted: Wanted) -> Hashable:
        """Under which measuring corrects the projections of this program."""
        return (self.program.key, wanted)

    def chunks(self, wanted: Wanted, chunk_size: int) -> Cut:
        """The plan for a chunk size, as the program has it; no lever is pulled."""
        started = time.perf_counter()
        with without_collection():
            facts = self.program.facts(wanted)
        if not facts.is_split:
            raise NotSplittable("nothing in it can be cut along the batch")
        try:
            with without_collection():
                plan = make_plan(layout_of(facts), chunk_size, wanted.streamed)
        except (MemoryError, BudgetError):
            raise
        except Exception as error:
            raise _illegal(error) from error
        _count(started)
        return self._cut(wanted, *self._in_arena(plan, None), facts)

    def within(self, wanted: Wanted, allowed_bytes: int, thorough: bool) -> Cut | None:
        """The fastest plan found within so many bytes, or None; a thorough search takes longer to give up."""
        outside, after = self.outside_bytes(wanted), self.after_bytes(wanted)
        if after > allowed_bytes:
            return None
        started, search = time.perf_counter(), self._search(wanted)
        carrying = Carrying(search)
        recipe = self.job.carried.get(wanted) if self.job.carried is not None else None
        try:
            with without_collection():
                found = None if recipe is None else carrying.like(recipe, allowed_bytes - outside)
                if found is not None:
                    events.count("plan::carried over")
                else:
                    found = search.find(allowed_bytes - outside, thorough)
        except (MemoryError, BudgetError):
            raise
        except Exception as error:
            raise _illegal(error) from error
        _count(started)
        if found is None:
            return None
        placed = self._in_arena(*found, allowed_bytes - outside)
        cut = self._cut(wanted, *placed, search.facts)
        room = copying_bytes(cut.plan, allowed_bytes - cut.estimate.projection.peak_bytes)
        return replace(cut, estimate=replace(cut.estimate, copying_bytes=room), recipe=carrying.recipe(found, recipe))

    def smallest(self, wanted: Wanted) -> Refused:
        """The smallest budget that would do, and what stands in the way."""
        try:
            with without_collection():
                _, projection = self._search(wanted).smallest()
        except (MemoryError, BudgetError):
            raise
        except Exception as error:
            raise _illegal(error) from error
        needed = max(projection.peak_bytes + self.outside_bytes(wanted), self.after_bytes(wanted))
        return Refused(needed, projection.largest, projection.recorded)

    def _search(self, wanted: Wanted) -> Search:
        if wanted not in self._searches:
            levers = ALL if self.job.levers is None else self.job.levers
            levers = levers if self.job.budget.offload is None else levers | {"offload"}
            program = self.program  # A search that held this cutter would wait for a full collection.
            uncut, whole = (lambda: program.uncut_facts(wanted)), (lambda: program.whole_facts(wanted))
            least = self.job.smallest_chunk
            self._searches[wanted] = Search(program.facts(wanted), levers, uncut, whole, wanted.streamed, least)
        return self._searches[wanted]

    def _cut(self, wanted: Wanted, plan: Plan, projection: Projection | None, facts: Facts) -> Cut:
        estimate = Estimate(plan, projection, self.outside_bytes(wanted), self.after_bytes(wanted))
        return Cut(wanted, plan, facts, estimate, self.key(wanted))

    def _in_arena(
        self, plan: Plan, projection: Projection | None, allowed_bytes: int | None = None
    ) -> tuple[Plan, Projection | None]:
        """The plan with results in one buffer where that is worthwhile and fits; what fits without is not refused."""
        budget = self.job.budget
        arena = arena_for(plan.schedules, budget.process or budget.is_default)
        if arena is None:
            return plan, projection
        changed = replace(plan, arena=arena)
        with_arena = project(changed)
        if allowed_bytes is not None and with_arena.peak_bytes > allowed_bytes:
            events.count("arena::too large for the budget")
            return plan, projection
        return changed, with_arena

    # What the plan does not see.

    def outside_bytes(self, wanted: Wanted) -> int:
        """Random numbers that were drawn, seeds, eager history, objects, copies of what the commit writes."""
        graph, joint = self.program.graph, self.program.joint
        held, _ = self.job.history
        rules = current_rules()
        objects = rules.value_bytes * len(joint.module.graph.nodes) + rules.library_bytes
        # The commit can be taken back: running statistics are copied before they are written.
        written = 2 * leaf_bytes(graph.leaves[index] for index in joint.written) if wanted.effects else 0
        roots = self.program.demand.roots if wanted.gradients else ()
        seeds = sum(graph.outputs[root].prepass.num_bytes for root in roots)
        return drawn_bytes(graph) + held + objects + written + seeds + correction_bytes(self.key(wanted))

    def after_bytes(self, wanted: Wanted) -> int:
        """What is alive when the gradients have come to leaves that eager code made, and it differentiates on."""
        held, backward = self.job.history
        if not wanted.gradients or not backward:
            return 0
        return held + backward + leaf_bytes(self.program.graph.leaves[index] for index in self.program.joint.wrt)


def _illegal(error: Exception) -> NotSplittable:
    """A chunk that is illegal on fake tensors is found before anything runs (Rule 3)."""
    text = str(error).splitlines()[0] if str(error) else ""
    return NotSplittable(f"its chunks are illegal: {type(error).__name__}: {text}", is_final=False)


def _count(started: float) -> None:
    events.count("plans")
    events.spend("plan_seconds", time.perf_counter() - started)
