"""Offload: values that wait in a file (on a CPU) or in the host's memory (on an accelerator), not in memory.

*Takes* steps and plans. *Gives* what it costs to offload a value and fetch it, the steps that do so, and the room that
copies on their way may take.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import TYPE_CHECKING

from koila.planning.devices import current_rules
from koila.planning.rates import FRESH, copy_seconds, fresh_bytes
from koila.planning.step import Kind, Step, Work

if TYPE_CHECKING:
    from koila.planning.plan import Plan


def can_offload(step: Step) -> bool:
    """Whether the value of a step can be offloaded: it is one tensor that fills its storage."""
    return len(step.places) == 1 and step.fills_storage and not step.is_view


def offload_step(number: int, step: Step, value: int, num_bytes: int) -> Step:
    """The step that offloads the value that `step` gave and that now has the number `value`; it gives a handle."""
    work: Work | None = None if step.work is None else step.work.offloaded()
    return Step(
        number, (value,), (0,), seconds=copy_seconds(num_bytes), makes_memory=False, holds_operands=True,
        fills_storage=False, kind=Kind.OFFLOAD, work=work,
    )  # fmt: skip


def fetch_step(number: int, step: Step, handle: int, num_bytes: int) -> Step:
    """The step that fetches the value that `step` gave."""
    fresh = fresh_bytes(num_bytes)
    work: Work | None = None if step.work is None else step.work.fetched()
    return Step(
        number, (handle,), (num_bytes,), (current_rules().slack_bytes(num_bytes),), fresh_bytes=fresh,
        seconds=copy_seconds(num_bytes) + fresh / FRESH, makes_memory=False, holds_operands=True, kind=Kind.FETCH,
        work=work,
    )  # fmt: skip


def copying_bytes(plan: Plan, free_bytes: int) -> int:
    """What copies between an accelerator and the host may hold: room for two of the largest, as far as it is free."""
    rules = current_rules()
    if rules.type == "cpu":
        return 0
    largest = max(_offloaded_sizes(plan), default=0)
    return max(0, min(2 * (largest + rules.value_bytes + rules.slack_bytes(largest)), free_bytes)) if largest else 0


def _offloaded_sizes(plan: Plan) -> Iterator[int]:
    """The bytes of each value that a plan offloads at once: a chunk of what is kept, or a value inside of a chunk."""
    for phase in plan.phases:
        for sink in phase.sinks:
            if sink.key in plan.offloaded:
                yield ceil(sink.value_bytes * plan.chunk_size / max(1, plan.facts.num_samples))
        for schedule in phase.loops.values():
            offloads = (step for step in schedule.steps if step.kind is Kind.OFFLOAD)
            storages = schedule.storages
            yield from (storages.num_bytes[each] for step in offloads for each in storages.of[step.operands[0]])
