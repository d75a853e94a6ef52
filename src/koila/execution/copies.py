"""Copies between an accelerator and the host, on a stream of their own, beside the kernels of a run.

*Takes* values of a device, and how many bytes may be held for copies that are on their way. *Gives* handles of copies
in pinned host memory, and the values again. A value that is copied down is held until the run's stream has waited for
the copy: its memory then goes to kernels that come after it, and nobody needs to record a stream. Up to `room_bytes`
are held so; beyond them the run's stream waits for the oldest copy, the host never. What will be fetched next is begun
ahead, in the same room. Pinned bytes are bounded by a share of the host's memory; beyond that ordinary memory is used,
for which the host must wait. (Shown on the simulated device of the tests, whose copies are late; untested on hardware.)
"""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from koila import events
from koila._free import free_bytes
from koila.planning.devices import rules_for

PINNED_SHARE = 0.5
"""So much of what is free on the host may be pinned by one run."""


@dataclass(frozen=True, eq=False)
class HostCopy:
    """A value that waits on the host."""

    place: torch.Tensor
    ready: Any
    """The event after which it is there; None if it is there already."""


@dataclass(frozen=True, eq=False)
class _OnItsWay:
    """Memory of the device that a copy reads or writes."""

    value: torch.Tensor
    done: Any
    """The event after which the copy has finished."""
    num_bytes: int


class Copies:
    """The copies of one run between the host and one device.

    Args:
        device: The device.
        room_bytes: So many bytes of the device may be held for copies that are on their way.
        pinned_bytes: So many bytes of the host may be pinned.
    """

    def __init__(self, device: torch.device, room_bytes: int = 0, pinned_bytes: int | None = None) -> None:
        self._device, self._room_bytes = device, room_bytes
        self._pinned_bytes = int(PINNED_SHARE * free_bytes()) if pinned_bytes is None else pinned_bytes
        self._stream, self._rules = _side_stream(device), rules_for(device.type)
        self._held_bytes = 0
        self._leaving: deque[_OnItsWay] = deque()
        self._coming: dict[HostCopy, _OnItsWay] = {}

    def down(self, value: torch.Tensor) -> HostCopy:
        """Begin to copy a value to the host."""
        place = self._place_for(value)
        if self._stream is None or not place.is_pinned():
            return self._copied(place.copy_(value, non_blocking=place.is_pinned()), None)
        current = torch.accelerator.current_stream(self._device)
        self._stream.wait_stream(current)
        with self._stream:
            place.copy_(value, non_blocking=True)
        done = self._stream.record_event()
        self._leaving.append(self._holding(value, done))
        while self._leaving and self._held_bytes > self._room_bytes:
            self._let_go(self._leaving.popleft())
        return self._copied(place, done)

    def up(self, copy: HostCopy) -> torch.Tensor:
        """The value on the device again; kernels of the current stream may read it."""
        begun = self._coming.pop(copy, None)
        if begun is not None:
            self._let_go(begun)
            return begun.value
        if copy.ready is not None:
            torch.accelerator.current_stream(self._device).wait_event(copy.ready)
        return torch.empty_like(copy.place, device=self._device).copy_(copy.place, non_blocking=True)

    def begin_up(self, copy: HostCopy) -> None:
        """Begin to copy a value that will be asked for, if there is room for it."""
        if self._stream is None or copy.ready is None or copy in self._coming:
            return
        if self._held_bytes + self._size(copy.place) > self._room_bytes:
            return
        value = torch.empty_like(copy.place, device=self._device)
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))  # Its memory was in use before.
        with self._stream:
            value.copy_(copy.place, non_blocking=True)
        self._coming[copy] = self._holding(value, self._stream.record_event())
        events.count("offload::fetched ahead")

    def finish(self) -> None:
        """What comes on the current stream from now on comes after all copies."""
        for each in (*self._leaving, *self._coming.values()):
            self._let_go(each)
        self._leaving.clear()
        self._coming.clear()

    def _holding(self, value: torch.Tensor, done: Any) -> _OnItsWay:
        held = _OnItsWay(value, done, self._size(value))
        self._held_bytes += held.num_bytes
        return held

    def _let_go(self, held: _OnItsWay) -> None:
        torch.accelerator.current_stream(self._device).wait_event(held.done)
        self._held_bytes -= held.num_bytes

    def _size(self, value: torch.Tensor) -> int:
        num_bytes = value.untyped_storage().nbytes()
        return num_bytes + self._rules.value_bytes + self._rules.slack_bytes(num_bytes)

    def _place_for(self, value: torch.Tensor) -> torch.Tensor:
        """Pinned memory, or ordinary memory if so much may not or cannot be pinned."""
        num_bytes = value.numel() * value.element_size()
        if num_bytes <= self._pinned_bytes:
            with suppress(RuntimeError):
                return torch.empty_like(value, device="cpu", pin_memory=True)
        events.count("offload::not pinned")
        return torch.empty_like(value, device="cpu")

    def _copied(self, place: torch.Tensor, ready: Any) -> HostCopy:
        """The handle of a copy; what it has pinned counts until it is gone."""
        made = HostCopy(place, ready)
        if place.is_pinned():
            num_bytes = place.numel() * place.element_size()
            self._pinned_bytes -= num_bytes
            weakref.finalize(made, self._unpinned, num_bytes).atexit = False
        return made

    def _unpinned(self, num_bytes: int) -> None:
        self._pinned_bytes += num_bytes


@cache
def _side_stream(device: torch.device) -> Any:
    """The stream for the copies of a device; None if it has no streams."""
    try:
        return torch.Stream(device)
    except (RuntimeError, NotImplementedError):
        return None
