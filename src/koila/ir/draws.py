"""Random numbers as source values: drawn once, when they are recorded, by eager's own kernel.

*Takes* a `Draw`: a random operator whose consumption of the generator does not depend on data. *Gives* a `Source`
that holds the numbers in their smallest exact form, and `Supply`, which hands sources to a call that is replayed.

After the draw the generator stands where eager's would (DESIGN.md section 3). A Bernoulli mask is kept as one bit per
element on its device, and is drawn into bytes where a self-test on that device shows that the stream does not depend on
the dtype. Dropout of an accelerator is one operator, which draws and multiplies: its mask is drawn by the operator
itself, or by `bernoulli_` where a self-test shows that this is the same. Nothing is ever drawn block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from koila._torch import TorchDispatchMode, schema_of, without_modes
from koila.ir.prepass import Draw, PrePass, contiguous, prepass_of
from koila.ir.tree import map_leaves

aten = torch.ops.aten

BY_LAYOUT = {
    aten.bernoulli_.float, aten.uniform_.default, aten.normal_.default, aten.exponential_.default,
    aten.geometric_.default, aten.cauchy_.default, aten.log_normal_.default, aten.random_.default,
    aten.random_.to, getattr(aten.random_, "from"), aten.rand.default, aten.randn.default, aten.randint.default,
    aten.randint.low, aten.randperm.default, aten.rand_like.default, aten.randn_like.default,
    aten.randint_like.default, aten.randint_like.low_dtype, aten.rand.generator, aten.randn.generator,
    aten.randperm.generator, aten.randint.generator, aten.randint.low_generator, aten.bernoulli.p,
    aten.normal.float_float, aten.native_dropout.default,
}  # fmt: skip
"""Random operators that depend on the layout of their arguments only, never on the data."""

_BLOCK = 1 << 20


class Source:
    """Random numbers that stand for a random operator."""

    __slots__ = ("_whole", "dtype", "num_bytes", "shape")

    def __init__(self, whole: torch.Tensor) -> None:
        self._whole: torch.Tensor | None = whole
        self.shape = tuple(whole.shape)
        self.dtype = whole.dtype
        self.num_bytes = whole.numel() * whole.element_size()

    def whole(self) -> torch.Tensor:
        """All of it."""
        assert self._whole is not None
        return self._whole

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """The positions `start:stop` of the first dimension."""
        return self.whole()[start:stop]

    def prepass(self) -> PrePass:
        """The layout of `whole()`."""
        return prepass_of(self.whole())


class BitSource(Source):
    """A Bernoulli mask, eight elements to a byte, in logical order; its tensors are bool."""

    __slots__ = ("_bits",)

    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__(mask)
        self._whole = None
        self.dtype = torch.bool
        self._bits = _pack(mask)
        self.num_bytes = self._bits.numel()

    def whole(self) -> torch.Tensor:
        return self._unpack(0, _numel(self.shape)).view(self.shape)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        row = _numel(self.shape[1:])
        return self._unpack(start * row, stop * row).view(stop - start, *self.shape[1:])

    def prepass(self) -> PrePass:
        return contiguous(self.shape, self.dtype).on(self._bits.device)

    def _unpack(self, start: int, stop: int) -> torch.Tensor:
        first, shifts = start // 8 * 8, _shifts(self._bits.device)
        pieces = torch.empty((stop - first + 7) // 8 * 8, dtype=torch.bool, device=self._bits.device)
        for begin in range(first, stop, _BLOCK):
            block = self._bits[begin // 8 : (min(begin + _BLOCK, stop) + 7) // 8]
            bits = block.unsqueeze(1).bitwise_right_shift(shifts).bitwise_and_(1)
            pieces[begin - first : begin - first + bits.numel()].copy_(bits.view(-1))
        return pieces[start - first : stop - first]


@cache
def _shifts(device: torch.device) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


def _numel(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _pack(mask: torch.Tensor) -> torch.Tensor:
    flat, shifts = mask.reshape(-1), _shifts(mask.device)
    bits = torch.empty((flat.numel() + 7) // 8, dtype=torch.uint8, device=mask.device)
    for begin in range(0, flat.numel(), _BLOCK):
        block = flat[begin : begin + _BLOCK].to(torch.uint8)
        if block.numel() % 8:
            block = torch.cat([block, block.new_zeros(-block.numel() % 8)])
        packed = block.view(-1, 8).bitwise_left_shift(shifts).sum(1, dtype=torch.uint8)
        bits[begin // 8 : begin // 8 + packed.numel()] = packed
    return bits


# Self-tests on the device at hand.


_LAYOUTS = (((4099,), (0,)), ((37, 61), (1, 0)))
"""Shapes, and orders of their dimensions in memory, on which kernels are compared."""


@cache
def _stream_ignores_dtype(dtype: torch.dtype, device: torch.device) -> bool:
    """Self-test: the same seed gives the same mask in bytes as in `dtype`, and leaves the same generator state."""
    for shape, order in _LAYOUTS:
        seen = []
        for kind in (dtype, torch.uint8):
            generator = torch.Generator(device).manual_seed(1)
            empty = torch.empty(shape, dtype=kind, device=device)
            noise = empty.permute(order).bernoulli_(0.7, generator=generator)
            seen.append((noise.to(torch.uint8), generator.get_state()))
        if not all(torch.equal(first, second) for first, second in zip(*seen, strict=True)):
            return False
    return True


Multiply = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]


def _scaled_last(given: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    return given.mul(mask).mul_(scale)


def _scaled_mask(given: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    return mask.to(given.dtype).mul_(scale).mul_(given)


@dataclass(frozen=True, slots=True)
class Dropout:
    """What a self-test found out about the dropout operator of a device."""

    multiply: Multiply | None
    """Makes its result from its input, its mask and the scale, to the last bit; None if nothing known does."""
    is_bernoulli: bool = False
    """Whether its mask is what `bernoulli_` draws."""


@cache
def dropout_of(dtype: torch.dtype, device: torch.device, probability: float) -> Dropout:
    """Self-test of the dropout operator: how it multiplies, and how it draws."""
    found, is_bernoulli = [_scaled_last, _scaled_mask], True
    with without_modes(), torch.no_grad(), _generator_restored(device) as state:
        for shape, order in _LAYOUTS:
            begun = state()
            given = torch.linspace(-3, 3, _numel(shape), device=device).to(dtype).view(shape).permute(order)
            result, mask = aten.native_dropout.default(given, probability, True)
            found = [each for each in found if torch.equal(each(given, mask, 1 / (1 - probability)), result)]
            after = state()
            state(begun)
            drawn = _mask_of(prepass_of(given), probability)
            is_bernoulli = is_bernoulli and torch.equal(drawn, mask) and torch.equal(state(), after)
            state(after)
    return Dropout(found[0] if found else None, is_bernoulli)


def _mask_of(prepass: PrePass, probability: float) -> torch.Tensor:
    return _empty(prepass, torch.bool).bernoulli_(1 - probability)


@contextmanager
def _generator_restored(device: torch.device) -> Iterator[Callable[..., torch.Tensor]]:
    """A function that reads or sets the state of a device's own generator, which is as it was afterwards."""

    module = torch if device.type == "cpu" else torch.get_device_module(device)
    where = () if device.type == "cpu" else (device,)

    def state(new: torch.Tensor | None = None) -> torch.Tensor:
        if new is not None:
            module.set_rng_state(new, *where)
        return module.get_rng_state(*where)

    before = state()
    try:
        yield state
    finally:
        state(before)


def dropped(given: torch.Tensor, mask: torch.Tensor, probability: float) -> torch.Tensor:
    """The result of dropout with this mask."""
    multiply = dropout_of(given.dtype, given.device, probability).multiply
    assert multiply is not None  # Else it was not recorded.
    return multiply(given, mask, 1 / (1 - probability))


# Drawing.


def _empty(prepass: PrePass, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty_strided(prepass.shape, prepass.stride, dtype=dtype or prepass.dtype, device=prepass.device)


def draw(spec: Draw) -> Source:
    """Run the random operator, and advance its generator, as eager would."""
    with torch.no_grad():
        if spec.target is aten.native_dropout.default:
            return BitSource(_dropout_mask(*spec.args[:2]))
        if spec.target is aten.bernoulli_.float:
            prepass = spec.args[0]
            dtype = torch.uint8 if _stream_ignores_dtype(prepass.dtype, prepass.device) else None
            return BitSource(aten.bernoulli_.float(_empty(prepass, dtype), *spec.args[1:], **dict(spec.kwargs)))
        args = map_leaves(spec.args, lambda leaf: _empty(leaf) if isinstance(leaf, PrePass) else leaf)
        return Source(spec.target(*args, **dict(spec.kwargs)))


def _dropout_mask(prepass: PrePass, probability: float) -> torch.Tensor:
    if dropout_of(prepass.dtype, prepass.device, probability).is_bernoulli:
        return _mask_of(prepass, probability)
    return aten.native_dropout.default(_empty(prepass), probability, True)[1]


def is_drawn(given: Any, p: float, train: bool | None) -> bool:
    """Whether dropout with these arguments draws random numbers."""
    return train is not False and 0 < p < 1


class Supply(TorchDispatchMode):
    """While active, random operators take their numbers from the given tensors, in order."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._next: Iterator[torch.Tensor] = iter(tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags or func not in BY_LAYOUT:
            return func(*args, **(kwargs or {}))
        if func is aten.native_dropout.default and not is_drawn(*args, **(kwargs or {})):
            return func(*args, **(kwargs or {}))
        numbers = next(self._next)
        if func is aten.native_dropout.default:
            return dropped(args[0], numbers, args[1]), numbers
        if schema_of(func).is_mutable:
            return args[0].copy_(numbers)
        return numbers.clone()
