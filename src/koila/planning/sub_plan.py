"""Sub-plans: a part of a schedule that runs in chunks along another axis than the batch, as one step.

*Takes* a plan of its own. *Gives* the target of a step; `koila.execution.split_run` runs it.
"""

from __future__ import annotations

from dataclasses import dataclass

from koila.analysis.marks import Slot
from koila.planning.plan import Plan


@dataclass(frozen=True, eq=False)
class SubPlan:
    """A plan inside a schedule. Its results are a tuple."""

    plan: Plan
    into: tuple[tuple[int, int], ...]
    """(result, index of the sink) of sums that are added to the schedule's own sums."""
    transient_bytes: int
    """What it allocates at its peak beside its results."""
    seconds: float
    """The expected time of a call."""
    slots: tuple[Slot, ...] = ()
    """The floats that vary from step to step of a training loop."""

    @property
    def axis(self) -> str:
        """What it is cut along."""
        return f"{len(self.plan.chunks)} chunks of {self.plan.chunk_size} of {self.plan.facts.num_samples}"

    def __str__(self) -> str:
        return f"region of {len(self.plan.facts.joint.module.graph.nodes)} calls in {self.axis}"
