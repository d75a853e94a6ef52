"""Writes to real tensors, seen before they happen, so that what is pending on them runs first (Rule 5).

*Takes* torch. *Gives* the same torch, except that methods which write in place, and the attribute `data`, look first
whether a pending call reads the memory. `__torch_function__` never sees `buffer.mul_(0.9)`, because no operand is lazy;
without this, a call that was recorded before would find another buffer when it runs.

While nothing is pending, a method costs one look at a list more. What writes without a method of the tensor is not
seen: `out=`, `torch._foreach_*`, NumPy, C++. Where the version tells, that is a `StaleInputError`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.utils.dlpack
from torch.compiler import is_dynamo_compiling

from koila._torch import DATA_GETTER, DATA_SETTER, TO_DLPACK
from koila.capture.bridge import Bridge
from koila.capture.lookup import implementation, original_methods
from koila.capture.pending import recorder
from koila.capture.readers import before_flag, before_hook, before_write
from koila.capture.record import realize

_place = recorder.place
_NOT_DATA = {"requires_grad_", "detach_", "share_memory_"}
"""Methods that end like writers and write no data."""
_OPERATORS = (
    "__setitem__", "__iadd__", "__isub__", "__imul__", "__idiv__", "__itruediv__", "__ifloordiv__", "__imod__",
    "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__",
)  # fmt: skip


def _writers() -> list[str]:
    """The names of all methods that write to their tensor, by PyTorch's convention."""
    named = (n for n in dir(torch.Tensor) if n.endswith("_") and not n.startswith("_") and n not in _NOT_DATA)
    return [*named, *_OPERATORS]


def _seen(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    @wraps(original)
    def write(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():  # It knows the method, and not this function.
            return getattr(self, name)(*args, **kwargs)
        log = _place.log  # As `Recorder.is_idle`: every optimizer comes by here.
        if log.entries or log.tape or _place.reruns:
            before_write(self)
        return original(self, *args, **kwargs)

    write.__module__, write.__qualname__ = "torch", f"Tensor.{name}"
    return write


def _patch_methods() -> None:
    for name in _writers():
        original = getattr(torch.Tensor, name)
        original_methods[name] = original
        setattr(torch.Tensor, name, _seen(original, name))


def _read_data(self: Any) -> Any:
    """`tensor.data`: whoever has it can write without a version, so what is pending on it runs now."""
    if type(self) is Bridge.lazy_type:
        return implementation(DATA_GETTER)(self)
    if not recorder.is_idle or _place.reruns:
        before_write(self, unseen=True)
    return DATA_GETTER(self)


def _replace_data(self: Any, data: Any) -> None:
    if type(self) is Bridge.lazy_type:
        return implementation(DATA_SETTER)(self, data)
    if not recorder.is_idle or _place.reruns:
        before_write(self, unseen=True)
    DATA_SETTER(self, realize(data._value, "assignment to .data") if type(data) is Bridge.lazy_type else data)
    return None


def _patch_data() -> None:
    torch.Tensor.data = property(_read_data, _replace_data, doc=DATA_GETTER.__self__.__doc__)  # type: ignore[assignment]


def _patch_flags() -> None:
    """What was recorded before a tensor is frozen, thawed or detached has its gradients as it was then."""
    for name in ("requires_grad_", "detach_"):
        original_methods[name] = getattr(torch.Tensor, name)
        setattr(torch.Tensor, name, _flagged(original_methods[name], by_default=name == "requires_grad_"))


def _flagged(original: Callable[..., Any], by_default: bool) -> Callable[..., Any]:
    @wraps(original)
    def change(self: Any, requires_grad: bool = by_default) -> Any:
        if type(self) is Bridge.lazy_type:
            return implementation(original)(self, *((requires_grad,) if by_default else ()))
        if not recorder.is_idle and self.requires_grad is not requires_grad:
            before_flag(self)
        return original(self, requires_grad) if by_default else original(self)

    return change


def _patch_hooks() -> None:
    original = torch.Tensor.register_hook

    @wraps(original)
    def register_hook(self: Any, hook: Any) -> Any:
        if type(self) is Bridge.lazy_type:
            return implementation(original)(self, hook)
        if not recorder.is_idle:
            before_hook(self)
        return original(self, hook)

    original_methods["register_hook"] = original
    torch.Tensor.register_hook = register_hook  # type: ignore[method-assign]


def _patch_dlpack() -> None:
    """The conversion of old, which asks nobody; `torch.from_dlpack` asks the tensor."""
    original = TO_DLPACK

    @wraps(original)
    def to_dlpack(tensor: Any) -> Any:
        return original(realize(tensor._value, "to_dlpack") if type(tensor) is Bridge.lazy_type else tensor)

    for module in (torch, torch.utils.dlpack):
        setattr(module, "to_dlpack", to_dlpack)  # noqa: B010


def install_writes() -> None:
    """Patch; called once."""
    _patch_methods()
    _patch_data()
    _patch_flags()
    _patch_hooks()
    _patch_dlpack()
