"""Steps: what a schedule is a list of. No tensors here, only sizes.

*Takes* sizes, seconds and value numbers. *Gives* `Step`: which values one step reads, which bytes of its own it makes
and which it shares, what it needs while it runs, and how long it takes. Everything the planner decides follows from
these fields; what the step really calls is in `work`, which only the builder, the code generator and the lever that
cuts regions look into.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

Place = int | tuple[int, int]
"""Where a result lies: in so many bytes of its own, or in the storage of (operand, place of that operand)."""


class Kind(Enum):
    """What a step does."""

    RUN = "run"
    """It calls an operator."""
    HAND_ON = "hand on"
    """It hands a value to a sink: to be merged, gathered, kept or stored. It gives nothing."""
    ADD_PRODUCT = "add product"
    """It adds a matrix product to the sum of a sink, in place. It gives nothing."""
    OFFLOAD = "offload"
    """It copies a value to a file and gives a handle."""
    FETCH = "fetch"
    """It gives a copy in memory of a value that was offloaded."""
    SUB_PLAN = "sub-plan"
    """It runs a plan of its own; it may add to the sums of sinks."""


Move = tuple[Kind, int]
"""Run the step that gives a value (`RUN`, whatever its own kind is), offload its value, or fetch it."""


class Work(Protocol):
    """What a step calls, as far as the planner knows it: it says what stands at a peak, and goes with its step."""

    @property
    def label(self) -> str:
        """The name of the operator."""

    @property
    def recorded(self) -> int | None:
        """The number of the recorded call that it comes from; None in a backward pass."""

    def shape(self, place: int) -> tuple[int, ...]:
        """The shape of a result."""

    def offloaded(self) -> Work:
        """What the step calls that offloads the result."""

    def fetched(self) -> Work:
        """What the step calls that fetches the result."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a schedule."""

    value: int
    """The number of the value that it gives; no other step of the schedule has the same."""
    operands: tuple[int, ...]
    """The numbers of the values that it reads, each once."""
    places: tuple[Place, ...] = ()
    """For each result, the bytes of its own that it lies in, or whose storage it shares."""
    slack_bytes: tuple[int, ...] = ()
    """For each result, by how much the allocator may make its block larger; nothing is as much as no bytes."""
    inside_bytes: int = 0
    """Bytes that it allocates and frees while it runs."""
    retained_bytes: int = 0
    """Bytes that stay alive with its first result, beyond what `places` says."""
    seconds: float = 0.0
    """The expected time."""
    fresh_bytes: int = 0
    """Bytes of results so large that they are made of new pages every time."""
    may_overwrite: tuple[int, ...] = ()
    """The operands, by position, whose memory its kernel can write the result into if nobody needs them afterwards."""
    makes_memory: bool = True
    """Whether it certainly makes memory of its own: a reshape may give a view where sizes alone do not tell."""
    holds_operands: bool = False
    """Whether somebody may hold its operands afterwards: whoever it hands them on to, or code that is not PyTorch's."""
    is_view: bool = False
    """Whether PyTorch calls its only result a view."""
    fills_storage: bool = True
    """Whether its only result is all of its storage, each element once."""
    kind: Kind = Kind.RUN
    sinks: tuple[int, ...] = ()
    """The sinks that it hands a value on to, or adds to, by their index in the schedule."""
    starts_merge: bool = True
    """For HAND_ON: whether a merge can start with the value itself, without a copy."""
    is_repeat: bool = False
    """Whether it computes again what an earlier step has computed."""
    work: Any = None
    """What it calls: a `Work`; the planner asks it for nothing else."""

    @property
    def has_effects(self) -> bool:
        """Whether it adds to a sum or hands a value on: it stands in a schedule once, whoever needs its value again."""
        return bool(self.sinks)

    @property
    def gives_value(self) -> bool:
        """Whether later steps may read its value."""
        return self.kind not in (Kind.HAND_ON, Kind.ADD_PRODUCT)

    def owned_bytes(self, place: int) -> int:
        """The bytes that a result of its own adds to the memory, with what stays alive beside it."""
        size = self.places[place]
        assert isinstance(size, int), "the result lies in an operand's storage"
        # A product that is added to a sum has no storage of its own.
        if self.kind is Kind.ADD_PRODUCT:
            return 0
        beside = self.retained_bytes if place == 0 else 0
        return size + beside + (self.slack_bytes[place] if self.slack_bytes else 0)


class Destination(Enum):
    """What becomes of the values that a sink receives."""

    STORE = "store"
    """The value itself is held: a section that runs once."""
    GATHER = "gather"
    """Each chunk's value is copied to its place in the whole value."""
    MERGE = "merge"
    """The chunks' values are merged into one."""
    STREAM = "stream"
    """Each chunk's value is handed out to the caller, who holds one at a time."""
    KEEP = "keep"
    """Each chunk's value is held itself, as a piece of the whole value."""

    @property
    def stays(self) -> bool:
        """Whether the value itself is still there when the schedule ends."""
        return self in (Destination.STORE, Destination.KEEP)


@dataclass(frozen=True, slots=True)
class Sink:
    """Where a schedule hands values on to."""

    key: Hashable
    """What the value is; the planner does not look into it."""
    destination: Destination
    value_bytes: int = 0
    """Bytes of the whole value."""
    state_bytes: int = 0
    """Bytes of the merge while it goes on."""
    is_plain_sum: bool = False
    """Whether it is a merge by addition in the value's own dtype."""
    is_sum: bool = False
    """Whether it is a merge by addition, in the value's own dtype or in a wider one."""
