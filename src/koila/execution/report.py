"""The report of a run: what was projected, what was measured, and what it took.

*Takes* what the engine notes while it runs. *Gives* a frozen `Report`, printable.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from koila._bytes import format_bytes
from koila.planning.plan import Plan


@dataclass(frozen=True)
class Report:
    """One run."""

    how: str = "nothing ran"
    """`whole`, `split`, or that nothing ran."""
    num_samples: int = 0
    """The batch size."""
    chunk_size: int = 0
    """Samples per chunk; 0 for a whole run."""
    num_chunks: int = 0
    """Chunks per phase."""
    allowed_bytes: int | None = None
    """The budget, if there was one."""
    projected_bytes: int | None = None
    """What the run was expected to allocate at its peak, if a budget asked for it."""
    measured_bytes: int | None = None
    """What it allocated at its peak, inside `koila.measure()`."""
    seconds: float = 0.0
    phase_seconds: tuple[float, ...] = ()
    """The time of each phase."""
    recomputed: dict[str, int] = field(default_factory=dict)
    """Operators that a chunk runs more than once, with how often they are run again."""
    regions: tuple[str, ...] = ()
    """Parts that were cut along another axis."""
    offloaded: int = 0
    """Values that were kept in a file."""
    fallbacks: tuple[str, ...] = ()
    """What could not be done as asked, and why."""
    retries: int = 0
    """How often memory ran out and a smaller plan was taken."""

    def __str__(self) -> str:
        lines = [f"{self.how}: {self.num_samples} samples in {self.seconds:.3f} s"]
        if self.chunk_size:
            lines[0] += f", {self.num_chunks} chunks of {self.chunk_size}, {len(self.phase_seconds)} phases"
        sizes = {"allowed": self.allowed_bytes, "projected": self.projected_bytes, "measured": self.measured_bytes}
        known = [f"{name} {format_bytes(size)}" for name, size in sizes.items() if size is not None]
        lines += ["  " + ", ".join(known)] if known else []
        lines += [f"  phase {n}: {seconds:.3f} s" for n, seconds in enumerate(self.phase_seconds)]
        again = ", ".join(f"{name} ×{times}" for name, times in sorted(self.recomputed.items()))
        lines += [f"  computed again: {again}"] if again else []
        lines += [f"  {region}" for region in self.regions]
        lines += [f"  {self.offloaded} values kept in a file"] if self.offloaded else []
        lines += [f"  fell back: {reason}" for reason in self.fallbacks]
        lines += [f"  memory ran out {self.retries} times"] if self.retries else []
        return "\n".join(lines)


class Notes:
    """What is noted about the run that goes on."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.how, self.num_samples, self.retries = "nothing ran", 0, 0
        self.plan: Plan | None = None
        self.allowed_bytes: int | None = None
        self.projected_bytes: int | None = None
        self.measured_bytes: int | None = None
        self.phase_seconds: list[float] = []
        self.fallbacks: list[str] = []
        self.program: Any = None
        """What the projection was made for."""
        self.tune = True

    def report(self) -> Report:
        """What was noted."""
        plan = self.plan
        return Report(
            how=self.how, num_samples=self.num_samples, allowed_bytes=self.allowed_bytes,
            chunk_size=0 if plan is None else plan.chunk_size, num_chunks=0 if plan is None else len(plan.chunks),
            projected_bytes=self.projected_bytes, measured_bytes=self.measured_bytes,
            seconds=time.perf_counter() - self.started, phase_seconds=tuple(self.phase_seconds),
            recomputed={} if plan is None else dict(plan.recomputed), regions=() if plan is None else plan.regions,
            offloaded=0 if plan is None else len(plan.offloaded), fallbacks=tuple(self.fallbacks),
            retries=self.retries,
        )  # fmt: skip


class Measure:
    """What `koila.measure()` has seen."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        """One for each run, in order."""

    @property
    def peak_bytes(self) -> int:
        """The largest peak of them."""
        return max((report.measured_bytes or 0 for report in self.reports), default=0)


_scopes: list[Measure] = []


@contextmanager
def measure() -> Iterator[Measure]:
    """A scope in which the memory of every run is measured; it makes runs slower.

    Yields:
        A `Measure`: `reports` of the runs so far, `peak_bytes` of all of them.

    >>> import torch, koila
    >>> with koila.measure() as seen:
    ...     total = (koila.lazy(torch.ones(4, 256)) * 2).sum().item()
    >>> seen.peak_bytes
    4100
    """
    scope = Measure()
    _scopes.append(scope)
    try:
        yield scope
    finally:
        _scopes.remove(scope)


def measuring() -> list[Measure]:
    """The scopes that want to know."""
    return _scopes
