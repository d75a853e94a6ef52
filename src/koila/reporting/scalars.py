"""Numbers of every run for TensorBoard, or for whatever else takes scalars.

*Takes* the steps of the engine, as the reports have them. *Gives* calls of `add_scalar`, a series per number.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from koila import events
from koila.reporting.report import Report, reports


class ScalarWriter(Protocol):
    """What takes scalars, such as `torch.utils.tensorboard.SummaryWriter`."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> object:
        """Add one value to a series."""


def scalars(report: Report) -> dict[str, float]:
    """The numbers of a report that make a curve over steps.

    >>> scalars(Report(how="split", seconds=2.0, num_chunks=4))["num_chunks"]
    4
    """
    names = ("seconds", "trace_seconds", "plan_seconds", "num_chunks", "retries")
    found: dict[str, float] = {name: getattr(report, name) for name in names}
    for name in ("allowed_bytes", "projected_bytes", "measured_bytes"):
        value = getattr(report, name)
        if value is not None:
            found[name] = value
    return {**found, "fallbacks": len(report.fallbacks)}


@contextmanager
def log_to(writer: ScalarWriter, prefix: str = "koila") -> Iterator[None]:
    """Write the numbers of every run inside the `with` block: seconds, bytes, chunks, fallbacks.

    A value that is read and the backward pass after it are one run, as in `koila.last_report`; what only reads results
    of a run is none. Runs are counted from 0.

    Args:
        writer: Anything with `add_scalar(name, value, step)`.
        prefix: What the names of the series begin with.

    >>> class Writer:
    ...     def add_scalar(self, name, value, step):
    ...         if name == "koila/num_chunks":
    ...             print(step, name, value)
    >>> import torch, koila
    >>> with log_to(Writer()), koila.budget(chunk_size=2):
    ...     _ = (koila.lazy(torch.ones(4, 2)) * 2).sum().item()
    0 koila/num_chunks 2
    """
    step = -1

    def listen(event: events.Event) -> None:
        nonlocal step
        if isinstance(event, events.StepEnd) and not event.follows:
            step += 0 if event.continues and step >= 0 else 1
            # The reports listen first: the last one is that of this step.
            for name, value in scalars(reports.all[-1]).items():
                writer.add_scalar(f"{prefix}/{name}", value, step)

    unsubscribe = events.subscribe(listen)
    try:
        yield
    finally:
        unsubscribe()
