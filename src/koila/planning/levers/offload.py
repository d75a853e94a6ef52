"""Offload: values that wait in a file (on a CPU) or in the host's memory (on an accelerator), not in memory.

*Takes* steps. *Gives* what it costs to offload a value and fetch it, and the steps that do so.
"""

from __future__ import annotations

from koila.planning.devices import current_rules
from koila.planning.rates import FRESH, copy_seconds, fresh_bytes
from koila.planning.step import Kind, Step, Work


def can_offload(step: Step) -> bool:
    """Whether the value of a step can be offloaded: it is one tensor that fills its storage."""
    return len(step.places) == 1 and step.fills_storage and not step.is_view


def offload_seconds(num_bytes: int) -> float:
    """What it costs to offload so many bytes and to fetch them again."""
    rules = current_rules()
    return 2 * num_bytes / rules.offload_rate + 10 * rules.call_seconds


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
