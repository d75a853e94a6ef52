"""Factories that take a tensor for its shape only: constants that no longer depend on it.

*Takes* the arguments of `zeros_like`, `new_zeros` and the like. *Gives* `aten.full`, whose chunks are remade instead
of cut out of a whole value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _filled(
    like: Tensor, size: Sequence[int], value: Any, dtype: Any, layout: Any, device: Any, pin_memory: Any
) -> Tensor:
    return aten.full.default(
        list(size),
        value,
        dtype=like.dtype if dtype is None else dtype,
        layout=like.layout if layout is None else layout,
        device=like.device if device is None else device,
        pin_memory=pin_memory,
    )


def filled_like(value: Any) -> Callable[..., Tensor]:
    """zeros_like, ones_like: a constant of the same shape, which no longer depends on the tensor."""

    def decomposition(
        self: Tensor,
        *,
        dtype: Any = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: Any = None,
        memory_format: Any = None,
    ) -> Tensor:
        return _filled(self, self.shape, value, dtype, layout, device, pin_memory)

    return decomposition


def full_like(
    self: Tensor,
    fill_value: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Tensor:
    """A constant of the same shape."""
    return _filled(self, self.shape, fill_value, dtype, layout, device, pin_memory)


def new_filled(value: Any) -> Callable[..., Tensor]:
    """new_zeros, new_ones: a constant of a given size."""

    def decomposition(
        self: Tensor,
        size: Sequence[int],
        *,
        dtype: Any = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: Any = None,
    ) -> Tensor:
        return _filled(self, size, value, dtype, layout, device, pin_memory)

    return decomposition


def new_full(
    self: Tensor,
    size: Sequence[int],
    fill_value: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Tensor:
    """A constant of a given size."""
    return _filled(self, size, fill_value, dtype, layout, device, pin_memory)
