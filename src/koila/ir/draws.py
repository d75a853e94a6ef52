"""Random numbers as source values: drawn once, when they are recorded, by eager's own kernel.

*Takes* a `Draw`: a random operator whose consumption of the generator does not depend on data. *Gives* a `Source`
that holds the numbers in their smallest exact form, and `Supply`, which hands sources to a call that is replayed.

After the draw the generator stands where eager's would (DESIGN.md section 3). A Bernoulli mask is kept as one bit per
element on its device, and is drawn into bytes where a self-test on that device shows that the stream does not depend on
the dtype. Dropout of an accelerator is one operator, which draws and multiplies: its mask is drawn by the operator
itself, or by `bernoulli_` where a self-test shows that this is the same. Attention of an accelerator draws inside of
its kernel, too: its mask serves a run in chunks, and the state of its generator a run of eager's own kernel. Nothing is
ever drawn block by block.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch

from koila._free import give_back
from koila._scopes import Mark
from koila._torch import FakeTensor, OpOverload, RunMode, current_mode, schema_of
from koila.ir.attention import OPERATORS, attended, attention_mask, draws_mask
from koila.ir.dropout import LAYOUTS, dropout_mask, dropped, is_drawn
from koila.ir.generators import GeneratorState
from koila.ir.prepass import Draw, PrePass, contiguous, empty, prepass_of
from koila.ir.tree import leaves, map_leaves

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

    def replayed(self) -> torch.Tensor:
        """What a call is given that is made again as it was recorded."""
        return self.whole()

    def replayed_prepass(self) -> PrePass:
        """The layout of `replayed()`."""
        return self.prepass()


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
        first, table = start // 8 * 8, _bytes_of_bits(self._bits.device)
        pieces = torch.empty((stop - first + 7) // 8 * 8, dtype=torch.bool, device=self._bits.device)
        for begin in range(first, stop, _BLOCK):
            block = self._bits[begin // 8 : (min(begin + _BLOCK, stop) + 7) // 8].int()
            place = (begin - first) // 8
            torch.index_select(table, 0, block, out=pieces.view(torch.int64)[place : place + block.numel()])
        return pieces[start - first : stop - first]


class AttentionSource(BitSource):
    """The mask of attention that draws it inside of the kernel, and the state of the generator before."""

    __slots__ = ("_state",)

    def __init__(self, mask: torch.Tensor, state: torch.Tensor) -> None:
        super().__init__(mask)
        self._state = state

    def replayed(self) -> torch.Tensor:
        """The state: eager's own kernel draws the same mask from it."""
        return self._state

    def replayed_prepass(self) -> PrePass:
        return prepass_of(self._state)


_GATHER = 0x0102040810204080
"""Times eight bytes that are 0 or 1, as one number: its last byte has them as bits."""


@cache
def _bytes_of_bits(device: torch.device) -> torch.Tensor:
    """By a byte, the eight bytes that are its bits, as one number."""
    places = torch.arange(8, dtype=torch.uint8, device=device)
    packed = torch.arange(256, dtype=torch.uint8, device=device).unsqueeze(1)
    return packed.bitwise_right_shift(places).bitwise_and_(1).view(torch.int64).view(-1)


def _numel(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _pack(mask: torch.Tensor) -> torch.Tensor:
    """The bits of a mask."""
    flat = mask.reshape(-1)
    blocks = [_pack_block(flat[begin : begin + _BLOCK]) for begin in range(0, flat.numel(), _BLOCK)]
    if len(blocks) == 1:
        return blocks[0]
    return torch.cat(blocks) if blocks else flat.to(torch.uint8)


def _pack_block(mask: torch.Tensor) -> torch.Tensor:
    """The bits of a few elements: a multiplication for eight of them, which lie in memory from the lowest byte on."""
    block = mask.to(torch.uint8)
    if block.numel() % 8:
        block = torch.cat([block, block.new_zeros(-block.numel() % 8)])
    return block.view(torch.int64).mul(_GATHER).view(torch.uint8)[7::8].clone()


# Self-tests on the device at hand.


@cache
def _stream_ignores_dtype(dtype: torch.dtype, device: torch.device) -> bool:
    """Self-test: the same seed gives the same mask in bytes as in `dtype`, and leaves the same generator state."""
    for shape, order in LAYOUTS:
        seen = []
        for kind in (dtype, torch.uint8):
            generator = torch.Generator(device).manual_seed(1)
            noise = torch.empty(shape, dtype=kind, device=device).permute(order)
            noise.bernoulli_(0.7, generator=generator)
            seen.append((noise.to(torch.uint8), generator.get_state()))
        if not all(torch.equal(first, second) for first, second in zip(*seen, strict=True)):
            return False
    return True


# Drawing.


def draw(spec: Draw) -> Source:
    """Run the random operator, and advance its generator, as eager would.

    If an accelerator runs out of memory, what nobody uses is given back, and the numbers are drawn once more.
    """
    device = _device_of(spec)
    if device.type == "cpu":
        return _draw(spec)
    generator = GeneratorState(device, dict(spec.kwargs).get("generator"))
    try:
        with generator.restored_on_error():
            return _draw(spec)
    except torch.OutOfMemoryError:
        give_back()
    with generator.restored_on_error():
        return _draw(spec)


def _device_of(spec: Draw) -> torch.device:
    given = next((leaf.device for leaf in leaves(spec.args) if isinstance(leaf, PrePass)), None)
    return given or torch.device(dict(spec.kwargs).get("device") or "cpu")


def _draw(spec: Draw) -> Source:
    with torch.no_grad():
        if spec.target is aten.native_dropout.default:
            return BitSource(dropout_mask(*spec.args[:2]))
        if spec.target in OPERATORS:
            state = GeneratorState(_device_of(spec)).read()
            return AttentionSource(attention_mask(spec.target, spec.args, dict(spec.kwargs)), state)
        if spec.target is aten.bernoulli_.float:
            prepass = spec.args[0]
            dtype = torch.uint8 if _stream_ignores_dtype(prepass.dtype, prepass.device) else None
            return BitSource(aten.bernoulli_.float(empty(prepass, dtype), *spec.args[1:], **dict(spec.kwargs)))
        args = map_leaves(spec.args, lambda leaf: empty(leaf) if isinstance(leaf, PrePass) else leaf)
        return Source(spec.target(*args, **dict(spec.kwargs)))


class Supply(RunMode):
    """While active, random operators take their numbers from the given tensors, in order.

    Args:
        tensors: The numbers.
        mark: Held by whoever makes the call. An interrupt can keep a mode from being left: without its maker it does
            nothing.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], mark: Mark) -> None:
        super().__init__()
        self._next: Iterator[torch.Tensor] = iter(tensors)
        self._mark = weakref.ref(mark)

    @property
    def has_ended(self) -> bool:
        """Whether its maker is gone."""
        return self._mark() is None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_random(func) or self.has_ended:
            return func(*args, **(kwargs or {}))
        if draws_mask(func, args, kwargs or {}):
            return _attended(func, args, kwargs or {}, next(self._next))
        if func not in BY_LAYOUT:
            return func(*args, **(kwargs or {}))
        if func is aten.native_dropout.default and not is_drawn(*args, **(kwargs or {})):
            return func(*args, **(kwargs or {}))
        numbers = next(self._next)
        if func is aten.native_dropout.default:
            return dropped(args[0], numbers, args[1]), numbers
        if schema_of(func).is_mutable:
            return aten.copy_.default(args[0], _as_bytes(numbers))
        return numbers.clone()


@cache
def _is_random(func: OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _as_bytes(numbers: torch.Tensor) -> torch.Tensor:
    """The same numbers; a mask as bytes, 0 or 1, of which kernels make floats ten times sooner than of bools."""
    is_real_mask = type(numbers) is torch.Tensor and numbers.dtype is torch.bool
    return numbers.view(torch.uint8) if is_real_mask else numbers


def leave_ended() -> None:
    """Leave modes that an interrupt kept from being left: compilers refuse to work inside of one."""
    while isinstance(mode := current_mode(), Supply) and mode.has_ended:
        mode.__exit__(None, None, None)


def _attended(func: Any, args: Any, kwargs: Any, numbers: torch.Tensor) -> Any:
    """Attention with a mask by formulas; with the state of a generator, by eager's own kernel."""
    if numbers.dtype == torch.bool:
        return attended(func, args, kwargs, numbers)
    if isinstance(numbers, FakeTensor):
        return func(*args, **kwargs)
    generator = GeneratorState(args[0].device)
    with generator.restored():
        generator.write(numbers)
        return func(*args, **kwargs)
