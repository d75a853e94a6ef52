"""Generators of random numbers: their states, read and set alike on every device.

*Takes* a device, or a generator. *Gives* its state, and scopes after which it is as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class GeneratorState:
    """The state of a generator: of one that is given, else of the default one of a device."""

    def __init__(self, device: torch.device, generator: torch.Generator | None = None) -> None:
        self._generator = generator
        self._module: Any = torch if device.type == "cpu" else torch.get_device_module(device)
        self._where = () if device.type == "cpu" else (device,)

    def read(self) -> torch.Tensor:
        """The state now."""
        return self._module.get_rng_state(*self._where) if self._generator is None else self._generator.get_state()

    def write(self, state: torch.Tensor) -> None:
        """Set it."""
        if self._generator is None:
            self._module.set_rng_state(state, *self._where)
        else:
            self._generator.set_state(state)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A scope after which the generator is as it was."""
        before = self.read()
        try:
            yield
        finally:
            self.write(before)

    @contextmanager
    def restored_on_error(self) -> Iterator[None]:
        """A scope after which the generator is as it was, if the body raises."""
        before = self.read()
        try:
            yield
        except BaseException:
            self.write(before)
            raise
