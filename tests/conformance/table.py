"""What a cut buys: bytes and work of one training step at the whole batch, at half of it and at one sample.

*Takes* a program and its batch. *Gives* a `Row`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import koila
from koila.planning.tracker import StorageTracker
from tests.conformance.trial import Program, _lazy_inputs, counted, isolated, seed


@dataclass(frozen=True)
class Step:
    """One training step at one chunk size."""

    transient_bytes: int
    """Peak of what the step allocated, above what is left of it: gradients and results."""
    num_executed: int
    """Recorded calls of a whole run (forward), or operators of a run in chunks (forward and backward)."""
    num_split: int
    """Runs in chunks."""
    whole: tuple[str, ...]
    """Why a run was not cut."""


@dataclass(frozen=True)
class Row:
    """One architecture."""

    whole: Step
    half: Step
    one: Step

    @property
    def is_split(self) -> bool:
        """Whether a chunk of one ran in chunks, all of it."""
        return bool(self.one.num_split) and not self.one.whole

    @property
    def is_smaller(self) -> bool:
        """Whether it also took less than the whole batch."""
        return self.is_split and self.one.transient_bytes < self.whole.transient_bytes


def _step(program: Program, batches: Sequence[int | None], chunk_size: int) -> None:
    seed()
    with koila.budget(chunk_size=chunk_size):
        outputs = program.call(_lazy_inputs(program.inputs, batches))
        assert program.loss is not None
        program.loss(outputs).backward()
    koila.settle()


def _measured(build: Callable[[], Program], batches: Sequence[int | None], chunk_size: int) -> Step:
    with isolated():
        _step(build(), batches, chunk_size)  # Traces and plans.
    with isolated():
        program = build()
        with StorageTracker() as tracker:
            _step(program, batches, chunk_size)
            left_bytes = tracker.current_bytes
        executed = koila.metrics.counter_value("nodes_executed")
        split = koila.metrics.counter_value("runs::split")
        return Step(tracker.peak_bytes - left_bytes, executed, split, tuple(counted("fallback")))


def row(build: Callable[[], Program], batches: Sequence[int | None], num_samples: int) -> Row:
    """The three steps of one architecture."""
    return Row(*(_measured(build, batches, size) for size in (num_samples, num_samples // 2, 1)))


def lines(rows: dict[str, Row]) -> Iterator[str]:
    """The table, and how many of its rows are split for real."""
    split, smaller = (sum(getattr(found, name) for found in rows.values()) for name in ("is_split", "is_smaller"))
    yield f"\nsplit for real: {split} of {len(rows)} architectures, {smaller} of them with a smaller transient peak"
    yield "  one training step in float32: transient KiB, then nodes executed, with chunks of whole, half and one"
    for name, found in rows.items():
        steps = (found.whole, found.half, found.one)
        sizes = " ".join(f"{step.transient_bytes / 1024:8.0f}" for step in steps)
        executed = " ".join(f"{step.num_executed:6d}" for step in steps)
        note = "" if found.is_split else f"  not split: {'; '.join(found.one.whole)}"
        yield f"  {name:24s} {sizes}   {executed}   {found.one.num_split} runs in chunks{note}"
