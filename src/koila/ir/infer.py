"""Shape inference: what one call would return, without computing it.

*Takes* a torch function and arguments in which pending values stand for tensors. *Gives* an `Inference`, by running
the function on fake tensors and watching: storages tell aliases, versions tell writes, tags tell random operators.
Nothing here knows any operator by name except those that hide what they do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from enum import Enum, auto
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from koila._scopes import Scopes
from koila._torch import (
    FAKE_LOGGER,
    FakeTensorMode,
    OpOverload,
    RunMode,
    in_turn,
    is_autograd_view,
    is_collective,
    negative_view,
    ordinary_dispatch,
    saved_tensors_hooks,
    schema_of,
    storage_key,
    write_count,
)
from koila._torch.functions import is_pytorchs_own
from koila.ir.attention import OPERATORS, is_known
from koila.ir.cache import Cache
from koila.ir.draws import BY_LAYOUT
from koila.ir.dropout import dropout_of
from koila.ir.dtypes import is_refused
from koila.ir.meta_kernels import is_slow, known_result
from koila.ir.node import Value, function_name
from koila.ir.numbers import Number
from koila.ir.owned import OwnedCall
from koila.ir.prepass import QUANTISED, Draw, Inference, Output, PrePass, prepass_of, with_bits
from koila.ir.real_layouts import is_laid_out_otherwise, with_real_layout
from koila.ir.resize import OPERAND_SIZED, resized
from koila.ir.tree import leaves, map_leaves

aten = torch.ops.aten

SHAPE_CACHE_SIZE = 4_096
"""Entries of the shape cache; change `shape_cache.max_size` to configure it."""

shape_cache: Cache[Inference] = Cache("shape_cache", SHAPE_CACHE_SIZE)


HIDDEN_WRITERS = {F.batch_norm, torch.batch_norm, F.instance_norm, torch.instance_norm}
"""Functions that update running statistics, which users do not see as a write: it waits for the run."""

SILENT_NORMS = {aten.native_batch_norm.default, aten.cudnn_batch_norm.default, aten.miopen_batch_norm.default}
"""Operators that update the running statistics, in training, although their schemas do not say so."""

WRONG_FAKES = {F.multilabel_margin_loss}
"""Functions whose fake kernel disagrees with the real one about the shape of the result."""

ELEMENT_BY_ELEMENT = {torch.Tensor.apply_, torch.Tensor.map_, torch.Tensor.map2_}
"""Functions that read memory which fake tensors do not have: they end the process."""

POOLS_ALONE = {F.max_pool1d, torch.max_pool1d}
"""Functions with a kernel of their own where no gradient is needed, which fake tensors never take."""

PLAIN = (
    bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
    torch.Size, torch.qscheme,
)  # fmt: skip
"""Results that cannot hide a tensor."""


class _NeedsData(Exception):
    """The call cannot be inferred; the message says why."""


_REFUSED_NUMBERS: dict[Any, Callable[..., bool]] = {
    aten.smooth_l1_loss.default: lambda found, wanted, reduction=1, beta=1.0: beta < 0,
}
"""Numbers that kernels refuse while neither fake kernels nor decompositions do."""


class _Watch(RunMode):
    """Notes random draws and writes that schemas hide."""

    def __init__(self, on_meta: bool, called: Any) -> None:
        super().__init__()
        self.on_meta = on_meta
        self.called = (called, *(getattr(called, name) for name in getattr(called, "overloads", list)()))
        """The function that is inferred; an operator with its overloads."""
        self.draws: list[Draw] = []
        self.hidden_writes: list[int] = []
        """Storages written although the schema does not say so."""
        self.writes: set[int] = set()
        """Storages written as the schema says; not every such operator counts up the version."""
        self.is_plain = self.is_bare = True
        """Whether nothing about the operators had to be watched, and whether PyTorch answers fast for all of them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.is_plain, self.is_bare = self.is_plain and _is_plain(func), self.is_bare and not is_slow(func)
        if is_refused(func, args, kwargs):
            raise _NeedsData("a mixture of dtypes that eager refuses")
        if func in _REFUSED_NUMBERS and _REFUSED_NUMBERS[func](*args, **kwargs):
            raise _NeedsData("a number that its kernel refuses")
        if self.on_meta and _makes_real_tensors(args, kwargs):
            raise _NeedsData("it would compute, and draw random numbers, on a device")
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._note_draw(func, args, kwargs)
        if func in SILENT_NORMS and args[5]:
            self.hidden_writes += [_storage_id(stat) for stat in args[3:5] if stat is not None]
        if schema_of(func).is_mutable:
            given = [*args, *(kwargs.get(each.name) for each in schema_of(func).arguments[len(args) :])]
            for argument, value in zip(schema_of(func).arguments, given, strict=True):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    written = [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]
                    if any(map(_overlaps_itself, written)):
                        raise _NeedsData("a write to elements that share their memory, which most kernels refuse")
                    self.writes |= set(map(_storage_id, written))
        if any(isinstance(leaf, torch.dtype) and leaf in QUANTISED for leaf in (*args, *kwargs.values())):
            raise _NeedsData("quantised data")
        known = known_result(func, args, kwargs) if self.on_meta else None
        return with_real_layout(func, args, func(*args, **kwargs)) if known is None else known

    def _note_draw(self, func: Any, args: Any, kwargs: Any) -> None:
        is_dropout = func is aten.native_dropout.default
        if (is_dropout or func not in BY_LAYOUT) and _consumes_nothing(func, args, kwargs):
            return
        is_known = _is_known(*args[:2]) if is_dropout else func in BY_LAYOUT or self._is_attention(func, args, kwargs)
        if not is_known:
            raise _NeedsData("random numbers that depend on data")
        spec = map_leaves(args, lambda leaf: prepass_of(leaf) if isinstance(leaf, torch.Tensor) else leaf)
        self.draws.append(Draw(func, spec, tuple(kwargs.items())))

    def _is_attention(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether it is attention inside of a function that shows neither its seed nor its mask."""
        return func in OPERATORS and func not in self.called and is_known(func, args, kwargs)


@cache
def _is_plain(func: OpOverload) -> bool:
    """Whether an operator only computes or draws: it writes nothing, and what meta tensors tell of it is right."""
    if schema_of(func).is_mutable or func in SILENT_NORMS:
        return False
    return func not in _REFUSED_NUMBERS and not is_laid_out_otherwise(func)


class _Quick(RunMode):
    """Answers for PyTorch's kernels for meta tensors where these are slow."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = known_result(func, args, kwargs or {})
        return func(*args, **(kwargs or {})) if known is None else known


def _makes_real_tensors(args: Any, kwargs: Any) -> bool:
    """Whether an operator leaves the meta device: it names another one, or it has nothing to take the device from."""
    device = kwargs.get("device")
    if device is not None:
        return torch.device(device) != META
    return not any(isinstance(leaf, torch.Tensor) for leaf in leaves((args, kwargs)))


def _is_known(given: torch.Tensor, probability: float) -> bool:
    """Whether it is known how the result of the dropout operator follows from its mask."""
    if not 0 < probability < 1:
        return False
    return given.is_meta or dropout_of(given.dtype, given.device, probability).multiply is not None


def _consumes_nothing(func: Any, args: Any, kwargs: Any) -> bool:
    """Operators tagged as random that are deterministic with these arguments (attention without dropout)."""
    names = [argument.name for argument in schema_of(func).arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    for name in ("dropout_p", "p", "dropout"):
        if name in names:
            return not given.get(name, 0.0) or given.get("train") is False
    return given.get("training") is False


def _state(fake: torch.Tensor) -> tuple[int, bool]:
    """What a write changes: data, or what autograd knows (`detach_`, `requires_grad_`); see also `_Watch.writes`."""
    return 0 if fake.is_inference() else write_count(fake), fake.requires_grad


def _memory(fake: torch.Tensor) -> tuple[int, int]:
    """Which memory a tensor lies in; `set_` replaces it, and `resize_` may make it larger."""
    return _storage_id(fake), fake.untyped_storage().nbytes()


def _layout(fake: torch.Tensor) -> tuple[Any, ...]:
    return fake.shape, fake.stride(), fake.storage_offset()


def _same(tensor: torch.Tensor) -> torch.Tensor:
    """Instead of the user's hooks on saved tensors, which must not see fake ones.

    A result that is saved by its own call would hold itself for good, were it not detached.
    """
    return tensor.detach()


_silent = Scopes[bool]("silent")


def _is_heard(record: logging.LogRecord) -> bool:
    return not _silent.innermost


# Fake tensors log a traceback for every wrong shape; eager's own error follows anyway.
logging.getLogger(FAKE_LOGGER).addFilter(_is_heard)


def _storage_id(tensor: torch.Tensor) -> int:
    return storage_key(tensor.untyped_storage()) if tensor.layout == torch.strided else id(tensor)


def _fake(prepass: PrePass, is_leaf: bool, device: torch.device) -> torch.Tensor:
    """A fake or meta tensor with that layout; one that requires grad is not a leaf unless the real one is."""
    if prepass.layout != torch.strided:
        raise _NeedsData(f"layout {prepass.layout}")
    if prepass.dtype in QUANTISED:
        raise _NeedsData(f"quantised data: {prepass.dtype}")
    base = torch.empty_strided(prepass.shape, prepass.stride, dtype=prepass.dtype, device=device)
    if is_leaf or not prepass.requires_grad:
        return with_bits(base, prepass.bits).requires_grad_(prepass.requires_grad)
    base.requires_grad_()
    with torch.enable_grad():
        copy = base.clone()
        if copy.stride() != prepass.stride:
            copy = copy.as_strided(prepass.shape, prepass.stride, 0)
        copy = copy.conj() if prepass.bits[0] else copy
        return negative_view(copy) if prepass.bits[1] else copy


def _operand_fake(operand: Value | torch.Tensor, device: torch.device | None) -> torch.Tensor:
    if isinstance(operand, Value):
        prepass = operand.prepass.with_grad(operand.requires_grad)
        is_leaf = operand.real is not None and operand.real.is_leaf
    else:
        prepass, is_leaf = prepass_of(operand), operand.is_leaf
    with torch.inference_mode(prepass.inference):
        return _fake(prepass, is_leaf, device or prepass.device)


def _swap(
    fakes: dict[int, torch.Tensor], operands: Sequence[Value | torch.Tensor], on_meta: bool
) -> Callable[[Any], Any]:
    """What stands for each argument: fake tensors for operands, and the meta device for the one that these are on."""
    real = {(each.prepass if isinstance(each, Value) else each).device for each in operands} if on_meta else set()

    def swap(leaf: Any) -> Any:
        found = fakes.get(id(leaf), leaf)
        return META if isinstance(found, torch.device) and found in real else found

    return swap


META = torch.device("meta")
SLOW_ON_META = ("lstm", "gru", "rnn_tanh", "rnn_relu")
"""Functions that are one operator on the CPU and one for every position on meta tensors."""


@in_turn
def infer(
    func: Callable[..., Any], args: Any, kwargs: Any, operands: Sequence[Value | torch.Tensor], on_meta: bool = False
) -> Inference:
    """Run the call on fake tensors; an inference with `forced` set says that it needs data.

    On meta tensors the same is many times faster, but not always the same: kernels are chosen by the device.
    """
    return _watched(func, args, kwargs, operands, _Watch(on_meta, func))


def _watched(
    func: Callable[..., Any], args: Any, kwargs: Any, operands: Sequence[Value | torch.Tensor], watch: _Watch
) -> Inference:
    if func in WRONG_FAKES:
        return Inference(None, (), forced="its fake kernel gives another shape than the real one")
    if is_collective(func.owner if isinstance(func, OwnedCall) else func):
        # Not even tried on fake tensors: the other processes would see a call that they do not make.
        return _unseen("other processes take part in it", len(operands))
    if func in ELEMENT_BY_ELEMENT:
        return _unseen("a function of the user's is called for each element", len(operands))
    mode = nullcontext() if watch.on_meta else FakeTensorMode(allow_non_fake_inputs=True)
    device = META if watch.on_meta else None
    try:
        with ordinary_dispatch(), mode:
            fakes = {id(operand): _operand_fake(operand, device) for operand in operands}
            swap = _swap(fakes, operands, watch.on_meta)
            fake_args, fake_kwargs = map_leaves(args, swap), map_leaves(kwargs, swap)
            before = {key: _state(fake) for key, fake in fakes.items()}
            places = [(fake, _memory(fake), _layout(fake)) for fake in (fakes[id(operand)] for operand in operands)]
            with watch, _silent.inside(True), torch.autograd.graph.saved_tensors_hooks(_same, _same):
                result = func(*fake_args, **fake_kwargs)
                if func in POOLS_ALONE and not result.requires_grad:
                    result = result.contiguous()
        ordered = [fakes[id(operand)] for operand in operands]
        written = [
            _state(fake) != before[id(operand)] or _storage_id(fake) in watch.writes
            for operand, fake in zip(operands, ordered, strict=True)
        ]
        if any(_memory(fake) != memory for fake, memory, _ in places):
            raise _NeedsData("the memory of an operand is replaced")
        inference = _describe(result, ordered, written, func in HIDDEN_WRITERS, watch.hidden_writes, watch.draws)
        if any(o.prepass.requires_grad for o in inference.outputs) and not any(fake.requires_grad for fake in ordered):
            raise _NeedsData("gradients of tensors that are not among its arguments")
        moved = tuple(index for index, (fake, _, layout) in enumerate(places) if _layout(fake) != layout)
        if moved:
            inference = replace(inference, reshapes=moved)
    except _NeedsData as reason:
        return Inference(None, (), forced=str(reason))
    except Exception as error:  # Whatever fake tensors cannot do, eager decides: it runs or raises its own error.
        return Inference(None, (), forced=f"not inferable: {type(error).__name__}")
    if inference.outputs or inference.writes or _only_asks(func, inference.structure):
        return inference
    return _unseen("it shows neither results nor writes", len(operands))


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether several elements have one place, as in an expanded tensor: kernels ask no more, fake ones nothing."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _unseen(why: str, num_operands: int) -> Inference:
    """A call that acts in a way that fake tensors do not show: made at once, and it may write to all its operands."""
    return Inference(None, (), tuple(range(num_operands)), forced=why)


def _only_asks(func: Any, answer: Any) -> bool:
    """Whether a call without results in tensors is a question of PyTorch's own, which the layout alone answers.

    A function that returns nothing was called for what it does. Nobody knows what a user's function or operator does.
    """
    is_read = getattr(func, "__name__", "") == "__get__"
    return is_pytorchs_own(func) and (is_read or any(leaf is not None for leaf in leaves(answer)))


def _describe(
    result: Any, fakes: list[torch.Tensor], written: list[bool], hides_writes: bool = False,
    hidden_writes: Sequence[int] = (), draws: Sequence[Draw] = (),
) -> Inference:  # fmt: skip
    outputs: list[Output] = []
    storages = {_storage_id(fake): index for index, fake in reversed(list(enumerate(fakes)))}
    earlier: dict[int, int] = {}

    def describe(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            if not isinstance(leaf, PLAIN):
                raise _NeedsData(f"a result of type {type(leaf).__name__}")
            return leaf
        if leaf.layout != torch.strided:
            raise _NeedsData(f"layout {leaf.layout}")
        storage = _storage_id(leaf)
        same = next((index for index, fake in enumerate(fakes) if fake is leaf), None)
        output = Output(prepass_of(leaf), same, storages.get(storage), earlier.get(storage), is_autograd_view(leaf))
        earlier.setdefault(storage, len(outputs))
        outputs.append(output)
        return output

    structure = map_leaves(result, describe)
    seen = [index for index, fake in enumerate(fakes) if _storage_id(fake) in hidden_writes]
    hidden = tuple(index for index in range(len(fakes)) if index in seen or (hides_writes and written[index]))
    writes = tuple(index for index in range(len(fakes)) if written[index] or index in hidden)
    grads = tuple(fakes[index].requires_grad for index in writes)
    return Inference(structure, tuple(outputs), writes, grads, hidden, draws=tuple(draws))


def compute_shape(key: Any, infer_now: Callable[[], Inference]) -> Inference:
    """The cached inference for a key; inferred on a miss."""
    return infer_now() if key is None else shape_cache.get_or_add(key, infer_now)


# Other sizes of a call that is known.


class _Truth(Enum):
    """What meta tensors told about a call."""

    OTHER = auto()
    """Something else than fake tensors did."""
    SAME = auto()
    PLAIN = auto()
    """The same, and nothing had to be watched."""
    BARE = auto()
    """The same, nothing had to be watched, and PyTorch answers fast."""


_told: Cache[_Truth] = Cache("call_cache", 4096)
"""By call without its sizes, what meta tensors told about it at the first."""


def infer_call(
    structure: Any, func: Callable[..., Any], args: Any, kwargs: Any, operands: Sequence[Value | torch.Tensor],
    numbers: tuple[Number, ...] = (),
) -> Inference:  # fmt: skip
    """The inference of a call: from those at other sizes, or on meta tensors, if they told the truth about it there.

    Args:
        structure: The call without its sizes; None if it has none.
        func: The function.
        args: Its arguments.
        kwargs: Its keyword arguments.
        operands: All tensors among the arguments.
        numbers: The sizes that `structure` leaves out.
    """
    ask = lambda: _ask(structure, func, args, kwargs, operands)  # noqa: E731
    if structure is None or not numbers or function_name(func) not in OPERAND_SIZED or any(map(_overlaps, operands)):
        return ask()
    return resized(structure, numbers, ask)


def _overlaps(operand: Value | torch.Tensor) -> bool:
    """Whether two dimensions have the same stride: sizes then decide in which order a result lies in memory."""
    lies = prepass_of(operand) if isinstance(operand, torch.Tensor) else operand.prepass
    strides = [step for step, size in zip(lies.stride, lies.shape, strict=False) if step and size > 1]
    return len(set(strides)) < len(strides)


def _ask(
    structure: Any, func: Callable[..., Any], args: Any, kwargs: Any, operands: Sequence[Value | torch.Tensor]
) -> Inference:
    """The same from PyTorch: on meta tensors, if they told the truth about it at other sizes."""
    devices = {(operand.prepass if isinstance(operand, Value) else operand).device for operand in operands}
    if structure is None or len(devices) != 1 or isinstance(func, OwnedCall) or function_name(func) in SLOW_ON_META:
        return infer(func, args, kwargs, operands)
    device = devices.pop()
    truth = _told.get(structure)
    if truth in (_Truth.PLAIN, _Truth.BARE):
        unwatched = _unwatched(func, args, kwargs, operands, truth is _Truth.BARE)
        if unwatched is not None:
            return _on_device(unwatched, device)
    if truth not in (None, _Truth.OTHER):
        found = infer(func, args, kwargs, operands, on_meta=True)
        if found.forced is None:
            return _on_device(found, device)
    found = infer(func, args, kwargs, operands)
    if truth is None:
        _told.add(structure, _compared(found, device, func, args, kwargs, operands))
    return found


@in_turn
def _compared(
    found: Inference, device: torch.device, func: Callable[..., Any], args: Any, kwargs: Any,
    operands: Sequence[Value | torch.Tensor],
) -> _Truth:  # fmt: skip
    """Whether meta tensors tell the same about a call as fake ones, and whether it need be watched."""
    if found.forced is not None:
        return _Truth.OTHER
    watch = _Watch(True, func)
    if _on_device(_watched(func, args, kwargs, operands, watch), device) != found:
        return _Truth.OTHER
    acts = found.writes or found.reshapes or found.draws or func in POOLS_ALONE
    if acts or not watch.is_plain:
        return _Truth.SAME
    return _Truth.BARE if watch.is_bare else _Truth.PLAIN


@in_turn
def _unwatched(
    func: Callable[..., Any], args: Any, kwargs: Any, operands: Sequence[Value | torch.Tensor], is_bare: bool
) -> Inference | None:
    """The inference on meta tensors of a call that only computes; None if PyTorch refuses it."""
    if saved_tensors_hooks(True) is not None:
        return None
    try:
        with ordinary_dispatch():
            by_operand = {id(operand): _operand_fake(operand, META) for operand in operands}
            fakes = [by_operand[id(operand)] for operand in operands]
            swap = _swap(by_operand, operands, True)
            with nullcontext() if is_bare else _Quick():
                result = func(*map_leaves(args, swap), **map_leaves(kwargs, swap))
        return _describe(result, fakes, [False] * len(fakes))
    except Exception:  # The usual way finds out what it is.
        return None


def _on_device(inference: Inference, device: torch.device) -> Inference:
    """What meta tensors told, for tensors of a device."""

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, Output):
            return replace(leaf, prepass=leaf.prepass.on(device))
        if isinstance(leaf, PrePass):
            return leaf.on(device)
        return device if leaf == META else leaf

    outputs = tuple(map(moved, inference.outputs))
    draws = tuple(Draw(d.target, map_leaves(d.args, moved), map_leaves(d.kwargs, moved)) for d in inference.draws)
    return replace(inference, structure=map_leaves(inference.structure, moved), outputs=outputs, draws=draws)
