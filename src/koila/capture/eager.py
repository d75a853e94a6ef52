"""EagerTensor: the eager execution interceptor.

*Takes* torch calls on a tensor that has its data. *Gives* a result of PyTorch's own engine, or of the graph builder.

Which of them serves a call: while a step is followed (`koila.lazy(..., eager="auto")`, see `koila.capture.at_once`),
PyTorch's engine, as long as the calls are those of the known program; from the first other call on, the graph builder.
Outside of such steps, PyTorch's engine unless another operand is lazy or the result would be large.

Results become `EagerTensor`s by a change of their class. Only a tensor that nobody else refers to is changed: what the
user holds (an operand that is returned, `out=`, a parameter) stays what it is.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import log2
from sys import getrefcount
from typing import Any

import torch

from koila import events
from koila._budget import open_scopes
from koila._torch import (
    C_METHODS,
    DATA_GETTER,
    current_backward,
    is_function_enabled,
    is_function_mode_enabled,
    plain_call,
    without_torch_function,
)
from koila._torch.transforms import active_transform
from koila.capture.advice import leaving_worker
from koila.capture.again import recorded_again
from koila.capture.at_once import here, questions
from koila.capture.bridge import Bridge
from koila.capture.known import KnownCall, Origin
from koila.capture.lazy import LazyTensor, as_input, range_of_batch, refuse
from koila.capture.lookup import READING, implementation
from koila.capture.record import input_value, may_write
from koila.capture.scan import scan_call
from koila.interfaces import BatchedPair, BatchInfo
from koila.ir.failures import is_out_of_memory
from koila.ir.infer import compute_shape, infer
from koila.ir.node import Value, function_name
from koila.ir.prepass import PLAIN_TYPES, PrePass, is_plain, prepass_of
from koila.ir.replay import current_context
from koila.ir.tree import leaves, map_leaves

LARGE_BYTES = 1 << 30
"""A result of at least this many bytes is recorded instead of computed; set `EagerTensor.large_bytes` to change it."""
_T = torch.Tensor
_NO_KWARGS: dict[str, Any] = {}


class EagerTensor(torch.Tensor):
    """A real tensor that decides per call: run now, or hand the call to the graph builder.

    >>> import koila
    >>> type(koila.eager(torch.ones(2)) + 1).__name__
    'EagerTensor'
    >>> type(koila.eager(torch.ones(2)) + koila.lazy(torch.ones(2))).__name__
    'LazyTensor'
    """

    large_bytes = LARGE_BYTES
    _origin: Origin | None = None
    """The result of a known program that it is."""

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        position = here.position
        at = position.at
        if at is not None and not open_scopes():
            for call in at.following.get(func, ()):
                if call.matches(args, kwargs):
                    try:
                        result = plain_call(func, types, args, kwargs or _NO_KWARGS)
                    except Exception as error:
                        position.fail(error, function_name(func))
                        raise
                    origin = call.only
                    if (
                        origin is not None
                        and type(result) is _T
                        and result.shape == origin.shape
                        and result.dtype is origin.dtype
                        and result.requires_grad is origin.requires_grad
                        and getrefcount(result) == _ALONE
                    ):
                        position.at = call
                        origin.part = position.part
                        result.__class__ = EagerTensor
                        result._origin = origin  # type: ignore[attr-defined]
                        return result if not call.ends_run else _ended(result)
                    return _followed(func, call, result)
        return _unmatched(func, types, args, kwargs or {})

    @staticmethod
    def call(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function to which eager tensors are plain ones; tensors that it makes become eager."""
        return _run_now(function, args, kwargs)

    def run(self, partial: tuple[int, int] | None = None, *, detach: bool = False) -> torch.Tensor:
        """The real tensor itself, or some of its samples; see `LazyTensor.run`."""
        wanted = None if partial is None else range_of_batch(self, partial)
        with without_torch_function():
            real = self.as_subclass(torch.Tensor)
            real = real if wanted is None else real.narrow(*wanted)
            return real.detach() if detach else real

    @property
    def batch(self) -> BatchInfo | None:
        """The batch dimension, as `LazyTensor.batch`: known for an input of a step that runs at once, proved for what
        was made since something was run; None for any other real tensor."""
        position = here.position
        if position.program is None or self._origin is None:
            return None
        if self._origin in position.program.inputs and self._origin.batch is not None:
            return BatchInfo(self._origin.batch, self.shape[self._origin.batch])
        with recorded_again([self]) as (lazy,):
            return None if lazy is None else lazy.batch

    def buffer_memory(self) -> BatchedPair:
        """As `LazyTensor.buffer_memory`."""
        with recorded_again([self]) as (lazy,):
            return BatchedPair(0, 0) if lazy is None else lazy.buffer_memory()

    def prepass(self) -> PrePass:
        """As `LazyTensor.prepass`."""
        return prepass_of(self.run())

    def to_tensor(self, detached: bool = False) -> torch.Tensor:
        """As `LazyTensor.to_tensor`."""
        return self.run().detach().clone() if detached else self.run()

    def data_value(self) -> Value:
        """A value that is this real tensor."""
        return input_value(self.run())

    def set_tensor(self, tensor: torch.Tensor) -> None:
        """Not possible on a real tensor; from the next step on the program is lazy, and it is."""
        program = here.position.program
        if program is not None:
            program.is_out = True
        refuse("set_tensor is not possible on a tensor of a step that runs at once", "koila.lazy(x, eager=False)")

    def update_from_tensor(self, tensor: torch.Tensor, sync: bool = False) -> None:
        """As `set_tensor`."""
        self.set_tensor(tensor)

    def shallow_copy_to(self, destination: LazyTensor) -> None:
        """As `LazyTensor.shallow_copy_to`."""
        destination.set_tensor(self)

    def update_from_tensor_out(self, tensor: torch.Tensor) -> None:
        """As `LazyTensor.update_from_tensor_out`."""
        if tensor.shape != self.shape:
            refuse(f"cannot write {list(tensor.shape)} into a tensor of shape {list(self.shape)}", "x = tensor")
        self.copy_(tensor)

    # What most programs ask for, without the way through PyTorch's own dispatch.

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        with without_torch_function():
            return _SHAPE(self)

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """As `torch.Tensor.backward`."""
        if is_function_mode_enabled():
            super().backward(*args, **kwargs)
            return
        position = here.position
        try:
            with without_torch_function():
                _T.backward(self, *args, **kwargs)
        except Exception as error:
            position.fail(error, "backward")
            raise
        position.rewind()

    def item(self) -> Any:
        """As `torch.Tensor.item`."""
        if is_function_mode_enabled():
            return super().item()
        with without_torch_function():
            found = _T.item(self)
        _read(self)
        return found

    # As plain tensors: what leaves the process, or is shown, has no class of its own.

    def __reduce_ex__(self, protocol: Any) -> Any:
        leaving = leaving_worker(self.run())
        if leaving is not None:
            return leaving
        with _plain(self):
            return self.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with _plain(self):
            return self.__deepcopy__(memo)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with _plain(self):
            return repr(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"

    def __format__(self, spec: str) -> str:
        _read(self)
        with _plain(self):
            return format(self, spec)


_SHAPE: Any = _T.shape.__get__  # type: ignore[attr-defined]


@contextmanager
def _plain(tensor: torch.Tensor) -> Iterator[None]:
    """The tensor itself is a plain one."""
    with without_torch_function():
        origin = tensor.__dict__.pop("_origin", None)
        tensor.__class__ = _T
        try:
            yield
        finally:
            tensor.__class__ = EagerTensor
            if origin is not None:
                tensor._origin = origin  # type: ignore[attr-defined]


def hand_out(tensor: torch.Tensor, origin: Origin) -> torch.Tensor:
    """An input of a followed step: another tensor with the same memory."""
    given = tensor.detach()
    given.__class__ = EagerTensor
    given._origin = origin  # type: ignore[attr-defined]
    return given


# Methods, without the way through PyTorch's own dispatch: that takes longer than all that is done here.


def _direct(method: Any) -> Any:
    def call(self: EagerTensor, *args: Any, **kwargs: Any) -> Any:
        if not is_function_enabled() or is_function_mode_enabled():
            return method(self, *args, **kwargs)
        return EagerTensor.__torch_function__(method, (EagerTensor,), (self, *args), kwargs)

    call.__name__, call.__doc__ = method.__name__, f"As `torch.Tensor.{method.__name__}`."
    return call


for _name, _method in C_METHODS.items():
    if _name not in vars(EagerTensor) and getattr(_T, _name) is _method:
        setattr(EagerTensor, _name, _direct(_method))


# Results.


def _count_references(make: Callable[[], Any]) -> int:
    result = make()
    return getrefcount(result)


_ALONE = _count_references(object)
"""How often a result is referred to that nobody holds: by a variable, and the argument of `getrefcount`."""
_IN_CONTAINER = next(getrefcount(item) for item in (object(),))
"""The same for a member of a result."""


def _followed(func: Any, call: KnownCall, result: Any) -> Any:
    """The result of a known call that has several of them, none, or another one than it had."""
    position = here.position
    position.at = call
    if type(result) is _T and getrefcount(result) == _ALONE + 1 and is_plain(result):  # The variable of the caller.
        result.__class__ = EagerTensor
    elif isinstance(result, (tuple, list)):
        _mark(result)
    made = [each for each in _eager_in(result) if each._origin is None] if call.results else []
    if len(made) != len(call.results) or not all(map(_is_like, made, call.results)):
        position.go_astray(f"another result of {function_name(func)}")
        return result
    for each, origin in zip(made, call.results, strict=True):
        each._origin, origin.part = origin, position.part
    if call.ends_run:
        position.rewind()
    return result


def _ended(result: Any) -> Any:
    """The result of a call in which what was pending is run."""
    here.position.rewind()
    return result


def _mark(result: tuple[Any, ...] | list[Any]) -> None:
    """The new tensors of a result become eager ones."""
    for item in result:
        if type(item) is _T:
            if getrefcount(item) == _IN_CONTAINER and is_plain(item):
                item.__class__ = EagerTensor
        elif isinstance(item, (tuple, list)):
            _mark(item)


def _eager_in(result: Any) -> Iterator[Any]:
    if isinstance(result, (tuple, list)):
        for item in result:
            yield from _eager_in(item)
    elif type(result) is EagerTensor:
        yield result


def _is_like(tensor: Any, origin: Origin) -> bool:
    with without_torch_function():
        return (tensor.shape, tensor.dtype, tensor.requires_grad) == (origin.shape, origin.dtype, origin.requires_grad)


# Calls that are not the next ones of a known program.


def _is_free(func: Any) -> bool:
    """Whether a call computes nothing and keeps nothing: it runs at once wherever it comes."""
    return func in _DETACHING or func == vars(_T)["data"].__get__  # `koila.capture.writes` puts its own property there.


_DETACHING = frozenset({_T.detach, torch.detach, DATA_GETTER})


def _unmatched(func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    position = here.position
    if any(kind is LazyTensor for kind in types):
        position.go_astray("a lazy operand")
        return LazyTensor.__torch_function__(func, types, args, kwargs)
    if active_transform() is not None or current_backward() >= 0:
        with without_torch_function():
            return func(*args, **kwargs)
    if func in questions or _is_free(func) or type(implementation(func)) is not partial:
        return _run_now(func, args, kwargs)
    if not (position.is_lazy or position.at is not None) or not _is_from_program(args, kwargs):
        return _by_size(func, args, kwargs)
    position.go_astray(function_name(func))
    return _run_now(func, args, kwargs) if may_write(func, kwargs) else _record(func, args, kwargs)


def _is_from_program(args: Any, kwargs: Any) -> bool:
    return any(leaf._origin is not None for leaf in leaves((args, kwargs)) if type(leaf) is EagerTensor)


def _run_now(func: Any, args: Any, kwargs: Any) -> Any:
    """Make a call on PyTorch's own engine."""
    with without_torch_function():
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            if func in READING or is_out_of_memory(error):
                here.position.fail(error, function_name(func))
            raise
        if type(result) is _T and getrefcount(result) == _ALONE and is_plain(result):
            result.__class__ = EagerTensor
        elif isinstance(result, (tuple, list)):
            _mark(result)
    if isinstance(result, (torch.Tensor, tuple, list)) and _is_from_program(args, kwargs):
        _continue(result)
    if func in READING:
        for leaf in leaves(args):
            if type(leaf) is EagerTensor:
                _read(leaf)
    return result


def _continue(result: Any) -> None:
    """Results of a call that is not in the tree, and of which operands are: what is computed from them is looked at."""
    with without_torch_function():
        for each in _eager_in(result):
            if each._origin is None:
                each._origin = Origin(each.shape, each.dtype, each.requires_grad)


def _read(tensor: EagerTensor) -> None:
    """A tensor was read: if it was made since the last time, the recorded program would have been run."""
    position = here.position
    if tensor._origin is not None and tensor._origin.part is position.part:
        position.rewind()


def _record(func: Any, args: Any, kwargs: Any) -> Any:
    """Hand a call to the graph builder; its eager operands are inputs, with the gradient that they have."""
    swapped = map_leaves(args, _lazy), map_leaves(kwargs, _lazy)
    return LazyTensor.__torch_function__(func, (LazyTensor,), *swapped)


def _lazy(leaf: Any) -> Any:
    return as_input(leaf) if type(leaf) is EagerTensor else leaf


def _by_size(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a call now, unless its result is large."""
    return _record(func, args, kwargs) if _is_large(func, args, kwargs) else _run_now(func, args, kwargs)


def _log_bytes(args: Any, kwargs: Any) -> float:
    """The binary logarithm of a number of bytes that no result of a call exceeds, whatever the function is.

    A result is at most as large as the square of all operands, or the product of them (`einsum`); a number among the
    arguments may stand for each of three dimensions, as a scale factor does; 16 bytes are the widest element.
    """
    found = list(leaves((args, kwargs)))
    sizes = [max(1, leaf.numel()) for leaf in found if isinstance(leaf, torch.Tensor)]
    numbers = [abs(leaf) for leaf in found if isinstance(leaf, (int, float)) and abs(leaf) > 1]
    return max(2 * log2(sum(sizes) or 1), sum(map(log2, sizes))) + 3 * sum(map(log2, numbers)) + log2(16)


def _is_large(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the call allocates at least `EagerTensor.large_bytes`."""
    with without_torch_function():
        if _log_bytes(args, kwargs) < log2(EagerTensor.large_bytes):
            return False
    scan, cacheable = scan_call(func, args, kwargs)
    if scan.foreign is not None:
        return False  # It would not be recorded.
    key = None
    if cacheable:
        metas = tuple((prepass_of(operand), operand.is_leaf) for operand in scan.operands)  # type: ignore[arg-type,union-attr]
        key = ("eager", scan.function, current_context(), tuple(scan.statics), metas)
    inference = compute_shape(key, lambda: infer(func, scan.args, scan.kwargs, scan.operands))
    fresh = [out for out in inference.outputs if out.shares is None and out.same_as is None]
    large = sum(output.prepass.num_bytes for output in fresh) >= EagerTensor.large_bytes
    if large:
        events.count("eager_tensor::handed over")
    return large


Bridge.eager_type = EagerTensor
PLAIN_TYPES.add(EagerTensor)
