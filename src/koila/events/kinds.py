"""Events: what the stages tell while a program runs (Rule 6)."""

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias


@dataclass(frozen=True, slots=True)
class RunStart:
    """A plan begins to run."""

    program: str
    """What is run: the name or the hash of the program."""
    num_nodes: int
    """The nodes of the program."""
    num_samples: int
    """The size of the whole batch, in samples."""
    chunk_size: int
    """The size of a chunk, in samples."""
    num_phases: int
    """The phases of the plan."""


@dataclass(frozen=True, slots=True)
class PhaseStart:
    """A phase of the running plan begins."""

    index: int
    """Which phase, from 0."""
    num_chunks: int
    """The chunks of this phase."""


@dataclass(frozen=True, slots=True)
class ChunkEnd:
    """A chunk of the running phase is done."""

    phase: int
    """Which phase, from 0."""
    index: int
    """Which chunk of the phase, from 0."""
    num_samples: int
    """The size of this chunk, in samples."""


@dataclass(frozen=True, slots=True)
class RunEnd:
    """The run is done and committed."""

    seconds: float
    """How long the run took, in seconds."""
    num_chunks: int
    """The chunks of all phases."""


class StepEnd(NamedTuple):
    """Something that was asked for is there: a value that was read, or a backward pass."""

    decision: Any
    """The `Decision` by which it ran; None if nothing had to be run but PyTorch's own backward."""
    seconds: float
    """How long it took in all, in seconds."""
    trace_seconds: float
    """How much of that was tracing."""
    plan_seconds: float
    """How much of that was planning."""
    phase_seconds: tuple[float, ...]
    """The time of each phase of a split run."""
    measured_bytes: int | None
    """What was allocated at the peak, inside `koila.measure()`."""
    retries: int
    """How often memory ran out."""
    fallbacks: tuple[str, ...]
    """What could not be done as asked, and why."""
    num_calls: int
    """The recorded calls that were run."""
    continues: bool
    """Whether it is the second half of the step before: a backward pass after the value was read."""
    follows: bool
    """Whether it starts from what the step before computed, without a backward pass: an accuracy after a loss."""
    scopes: tuple[Any, ...] = ()
    """Who wanted it measured."""


@dataclass(frozen=True, slots=True)
class Fallback:
    """Something was done in a weaker way than asked for (Rule 6)."""

    what: str
    """What was weakened: an operator, a plan, a delegate."""
    reason: str
    """Why."""
    site: str | None = None
    """The user's file:line."""


@dataclass(frozen=True, slots=True)
class Forced:
    """A lazy value had to be computed before a run was asked for (Rule 6)."""

    why: str
    """What asked for the value: item, print, nonzero."""
    site: str | None = None
    """The user's file:line."""


Event: TypeAlias = RunStart | PhaseStart | ChunkEnd | RunEnd | StepEnd | Fallback | Forced
