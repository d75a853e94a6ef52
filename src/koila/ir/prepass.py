"""PrePass: what is known about a value before it is computed.

*Takes* fake or real tensors. *Gives* interned `PrePass` records (equal records are the same object, so that a record
is a cheap key) and `Inference`, the answer of shape inference for one call: results, aliases, writes, random draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload


class PrePass:
    """Shape, strides, offset, dtype, device, layout and requires_grad of a value; compare with `is`."""

    __slots__ = ("device", "dtype", "layout", "offset", "requires_grad", "shape", "stride")

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout
    requires_grad: bool

    def __init__(self, key: tuple[Any, ...]) -> None:
        self.shape, self.stride, self.offset, self.dtype, self.device, self.layout, self.requires_grad = key

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements."""
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count

    def with_grad(self, requires_grad: bool) -> PrePass:
        """The same record with another requires_grad."""
        key = (self.shape, self.stride, self.offset, self.dtype, self.device, self.layout, requires_grad)
        return _intern(key)

    def on(self, device: torch.device) -> PrePass:
        """The same record on another device."""
        return _intern((self.shape, self.stride, self.offset, self.dtype, device, self.layout, self.requires_grad))

    def __repr__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


_interned: dict[tuple[Any, ...], PrePass] = {}


def _intern(key: tuple[Any, ...]) -> PrePass:
    found = _interned.get(key)
    if found is None:
        found = _interned[key] = PrePass(key)
    return found


def prepass_of(tensor: torch.Tensor) -> PrePass:
    """The record of a real or fake tensor.

    >>> prepass_of(torch.zeros(2, 3)) is prepass_of(torch.ones(2, 3))
    True
    """
    strided = tensor.layout == torch.strided
    return _intern(
        (
            tuple(tensor.shape),
            tensor.stride() if strided else (),
            tensor.storage_offset() if strided else 0,
            tensor.dtype,
            tensor.device,
            tensor.layout,
            tensor.requires_grad,
        )
    )


def contiguous(shape: tuple[int, ...], dtype: torch.dtype) -> PrePass:
    """The record of a plain CPU tensor."""
    return prepass_of(torch.empty(shape, dtype=dtype, device="meta")).on(torch.device("cpu"))


@dataclass(frozen=True, slots=True)
class Draw:
    """One random operator inside a call, independent of the data: it can be drawn when it is recorded."""

    target: OpOverload
    args: tuple[Any, ...]
    """Arguments; a tensor is replaced by its PrePass (only its layout matters)."""
    kwargs: tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Output:
    """One tensor in the result of a call."""

    prepass: PrePass
    same_as: int | None = None
    """The operand that is returned itself, as in-place operators do."""
    shares: int | None = None
    """The operand whose storage the result lives in."""
    shares_output: int | None = None
    """The earlier result whose storage the result lives in."""
    is_view: bool = False
    """Whether autograd sees a differentiable view."""


@dataclass(frozen=True, slots=True)
class Inference:
    """What shape inference says about one call."""

    structure: Any
    """The result with every tensor replaced by its `Output`; other results stand for themselves."""
    outputs: tuple[Output, ...]
    writes: tuple[int, ...] = ()
    """Operands that the call writes to."""
    write_grads: tuple[bool, ...] = ()
    """Whether each written operand requires grad afterwards."""
    hidden_writes: tuple[int, ...] = ()
    """Those of `writes` that no schema admits (running statistics): on a real tensor they wait for the run."""
    draws: tuple[Draw, ...] = ()
    forced: str | None = None
    """Why the call cannot be recorded and needs its operands' data."""
    ordered: bool = False
    """Whether it acts on autograd's graph (hooks, requires_grad_): order matters although no data is written."""
