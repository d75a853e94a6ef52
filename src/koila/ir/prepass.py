"""PrePass: what is known about a value before it is computed.

*Takes* fake or real tensors. *Gives* interned `PrePass` records (equal records are the same object, so that a record
is a cheap key) and `Inference`, the answer of shape inference for one call: results, aliases, writes, random draws.
Records are interned weakly: one that no value and no cache refers to is forgotten.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from koila._torch import OpOverload, negative_view

_Key = tuple[Any, ...]


class PrePass:
    """Shape, strides, dtype, device, layout, requires_grad, batch, inference and bits; compare with `is`.

    Where a tensor starts in its storage is not among them: a batch that is a slice of the data starts elsewhere in
    every step, and is the same program.
    """

    __slots__ = (
        "__weakref__",
        "_key",
        "_plain",
        "batch",
        "bits",
        "device",
        "dtype",
        "inference",
        "layout",
        "make_wrapper",
        "requires_grad",
        "shape",
        "stride",
    )

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout
    requires_grad: bool
    batch: int | None
    """The batch dimension where it is known: `koila.lazy` was told it, or the analysis proved it in a run. None says
    nothing: recording never guesses."""
    inference: bool
    """Whether it is a tensor of `torch.inference_mode`, which autograd refuses later."""
    bits: tuple[bool, bool]
    """Whether its data is to be conjugated and negated when it is read: what `conj()` gives is a view."""

    def __init__(self, key: _Key) -> None:
        self._key = key
        self._plain: PrePass | None = None
        """The same record without a batch, if this one was made from it."""
        self.make_wrapper: Callable[[], Any] | None = None
        """What makes lazy tensors like this; kept here by whoever made one."""
        self.shape, self.stride, self.dtype, self.device, self.layout, *rest = key
        self.requires_grad, self.batch, self.inference, self.bits = rest

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements."""
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count

    @property
    def overlaps(self) -> bool:
        """Whether elements share memory, as in an expanded tensor.

        >>> prepass_of(torch.ones(3).expand(2, 3)).overlaps, prepass_of(torch.ones(2, 3).mT).overlaps
        (True, False)
        """
        reach = 0
        for stride, size in sorted(zip(self.stride, self.shape, strict=True)):
            if size > 1:
                if stride <= reach:
                    return True
                reach += stride * (size - 1)
        return False

    def as_tuple(self) -> tuple[Any, ...]:
        """Everything that the record says, as plain values."""
        return self._key

    def with_grad(self, requires_grad: bool) -> PrePass:
        """The same record with another requires_grad."""
        return _intern((*self._key[:5], requires_grad, *self._key[6:]))

    def with_sizes(self, shape: tuple[int, ...], stride: tuple[int, ...]) -> PrePass:
        """The same record with other sizes and strides."""
        return _intern((shape, stride, *self._key[2:]))

    def on(self, device: torch.device) -> PrePass:
        """The same record on another device."""
        return _intern((*self._key[:3], device, *self._key[4:]))

    def with_batch(self, dim: int | None) -> PrePass:
        """The same record with another batch dimension; None where the value has no such dimension.

        >>> prepass_of(torch.zeros(2, 3)).with_batch(1).batch
        1
        """
        num_dims = len(self.shape)
        found = dim % num_dims if dim is not None and -num_dims <= dim < num_dims else None
        record = _intern((*self._key[:6], found, *self._key[7:]))
        if self.batch is None and found is not None:
            record._plain = self  # Whoever asks for the record of the same tensor again finds it.
        return record

    def without_idle_strides(self) -> PrePass:
        """The same record with the strides that dimensions of one element would have in dense memory.

        >>> prepass_of(torch.empty_strided((1, 3), (7, 1))).without_idle_strides().stride
        (3, 1)
        """
        if 1 not in self.shape or self.layout != torch.strided:
            return self
        found, following = list(self.stride), 1
        for dim in reversed(range(len(found))):
            if self.shape[dim] == 1:
                found[dim] = following
            following = found[dim] * self.shape[dim]
        return _intern((self.shape, tuple(found), *self._key[2:]))

    def __repr__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


_interned: dict[_Key, weakref.KeyedRef[_Key, PrePass]] = {}


def _intern(key: _Key) -> PrePass:
    reference = _interned.get(key)
    found = None if reference is None else reference()
    if found is None:
        found = PrePass(key)
        _interned[key] = weakref.KeyedRef(found, _forget, key)
    return found


def _forget(reference: weakref.KeyedRef[_Key, PrePass]) -> None:
    if _interned.get(reference.key) is reference:
        del _interned[reference.key]


def prepass_of(tensor: torch.Tensor, batch: int | None = None) -> PrePass:
    """The record of a real or fake tensor, which may have a batch in one of its dimensions.

    >>> prepass_of(torch.zeros(2, 3)) is prepass_of(torch.ones(2, 3))
    True
    """
    layout = tensor.layout
    key = (
        tensor.shape,
        tensor.stride() if layout is torch.strided else (),
        tensor.dtype,
        tensor.device,
        layout,
        tensor.requires_grad,
        batch,
        tensor.is_inference(),
        (tensor.is_conj(), tensor.is_neg()),
    )
    reference = _interned.get(key)  # A shape is equal to the tuple of its sizes.
    found = None if reference is None else reference()
    if found is not None:
        return found
    plain = _intern((tuple(tensor.shape), *key[1:6], None, *key[7:]))
    return plain if batch is None else plain.with_batch(batch)


PLAIN_TYPES: set[type] = {torch.Tensor, torch.nn.Parameter}
"""Classes of tensors that mean nothing but their data; `koila.eager`'s is added. A buffer is a plain tensor."""
QUANTISED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
"""Types of data that have a scale and a zero point beside them, of which fake tensors know nothing."""


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is its data in strides: not sparse or nested, and of no class that adds a meaning.

    >>> is_plain(torch.nn.Parameter(torch.ones(2))), is_plain(torch.eye(2).to_sparse())
    (True, False)
    """
    return type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided and not tensor.is_nested


def with_bits(tensor: torch.Tensor, bits: tuple[bool, bool]) -> torch.Tensor:
    """The tensor with the bits of a `PrePass`, of which nothing but the layout is known."""
    if bits[0]:
        tensor = tensor.conj().detach()
    return negative_view(tensor).detach() if bits[1] else tensor


def contiguous(shape: tuple[int, ...], dtype: torch.dtype) -> PrePass:
    """The record of a plain CPU tensor."""
    return prepass_of(torch.empty(shape, dtype=dtype, device="meta")).on(torch.device("cpu"))


def empty(prepass: PrePass, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor with that layout, of that or another type, without content."""
    return torch.empty_strided(prepass.shape, prepass.stride, dtype=dtype or prepass.dtype, device=prepass.device)


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

    @property
    def is_fresh(self) -> bool:
        """Whether its memory is made for it."""
        return self.same_as is None and self.shares is None and self.shares_output is None


@dataclass(frozen=True, slots=True)
class Inference:
    """What shape inference says about one call."""

    structure: Any
    """The result with every tensor replaced by its `Output`; other results stand for themselves."""
    outputs: tuple[Output, ...]
    writes: tuple[int, ...] = ()
    """Operands that the call writes to; those that it may write to if it is `forced`."""
    write_grads: tuple[bool, ...] = ()
    """Whether each written operand requires grad afterwards."""
    hidden_writes: tuple[int, ...] = ()
    """Those of `writes` that no schema admits (running statistics): on a real tensor they wait for the run."""
    reshapes: tuple[int, ...] = ()
    """Those of `writes` whose shape or strides the call changes in place (`transpose_`): views made before it stay."""
    draws: tuple[Draw, ...] = ()
    forced: str | None = None
    """Why the call cannot be recorded and needs its operands' data."""
    ordered: bool = False
    """Whether it acts on autograd's graph (hooks, requires_grad_): order matters although no data is written."""
