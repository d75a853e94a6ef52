"""The lookup mechanism: which lazy implementation serves a torch function or method.

*Takes* a torch function, or a method's name. *Gives* a callable on lazy tensors: one of the handlers below where data
is asked for, one of `koila.capture.gradients` where autograd is, else `lazy_forward`, which records the call.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import FunctionType
from typing import Any

import torch

from koila._torch import (
    DATA_SETTER,
    TYPED_STORAGE,
    VERSION_GETTER,
    without_torch_function,
    wrapper_size,
    wrapper_stride,
    write_count,
)
from koila._torch.transforms import ADD_BATCH_DIM
from koila.capture.bridge import Bridge
from koila.capture.gradients import (
    Handler,
    backward,
    backward_of,
    check_not_passed_by,
    gradients_of,
    hook_on_graph,
    requires_grad_,
)
from koila.capture.readers import run_readers
from koila.capture.record import lazy_forward, real_of, realize, run_eagerly
from koila.capture.scan import scan_call
from koila.errors import CaptureError
from koila.ir.cache import register
from koila.ir.prepass import QUANTISED
from koila.ir.source import user_site
from koila.ir.tree import leaves, map_leaves

_T = torch.Tensor


def _forced(name: str, method: Handler) -> Handler:
    """Materialise the lazy operands, then call the method on real tensors."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            return method(real_of(args[0], name))
        swap = lambda leaf: real_of(leaf, name) if type(leaf) is Bridge.lazy_type else leaf  # noqa: E731
        return method(*map_leaves(args, swap), **map_leaves(kwargs, swap))

    return run


def _metadata(method: Handler) -> Handler:
    """Ask the wrapper itself: it has true sizes and strides."""

    def ask(self: Any, *args: Any, **kwargs: Any) -> Any:
        prepass = self._known
        with without_torch_function():
            if wrapper_size(self) == prepass.shape and wrapper_stride(self) == prepass.stride:
                return method(self, *args, **kwargs)
        return lazy_forward(method, self, *args, **kwargs)

    return ask


def _storage_offset(self: Any) -> int:
    """Where a value starts in its storage: a result of its own at the beginning; for others, the real tensor knows."""
    value = self._value
    return 0 if value.is_base and not value.storage.real else int(realize(value, "storage_offset").storage_offset())


def _addressing(method: Handler) -> Handler:
    """A call that counts from the beginning of a storage: made at once where the storage is that of a real tensor."""

    def run(*args: Any, **kwargs: Any) -> Any:
        lazies = (leaf for leaf in leaves((args, kwargs)) if type(leaf) is Bridge.lazy_type)
        if any(lazy._value.storage.real for lazy in lazies):
            return run_eagerly(method, scan_call(method, args, kwargs)[0], "it counts from the beginning of a storage")
        return lazy_forward(method, *args, **kwargs)

    return run


def _at_call(func: Handler) -> Handler:
    """A function of the user's own that asks `__torch_function__` runs at its call: nobody knows what it reads, or
    writes to."""

    def call(*args: Any, **kwargs: Any) -> Any:
        scan, _ = scan_call(func, args, kwargs)
        run_readers(scan.operands)
        return run_eagerly(func, scan, "a function that is not PyTorch's own")

    return call


def _refused(what: str, hint: str) -> Handler:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise CaptureError(f"{what} is not possible on a lazy tensor", where=str(user_site()), hint=hint)

    return refuse


def _grad_fn(self: Any) -> Any:
    if not self._value.requires_grad:
        return None
    check_not_passed_by(self._value, "grad_fn")
    return realize(self._value, "grad_fn").grad_fn


def _iterate(self: Any) -> Any:
    if self.ndim == 0:
        raise TypeError("iteration over a 0-d tensor")
    return iter(self.unbind(0))


def _version(self: Any) -> int:
    if self._value.prepass.inference:
        return write_count(realize(self._value, "the version"))  # Eager's own error.
    return len(self._value.storage.writers) + (0 if self._value.real is None else write_count(self._value.real))


def _is_quantized(self: Any) -> bool:
    return self._known.dtype in QUANTISED


def _is_inference(self: Any) -> bool:
    return bool(self._known.inference)


def _format(self: Any, spec: str) -> str:
    return format(real_of(self, "format"), spec)


def _hash(self: Any) -> int:
    return id(self)


_FORCING = (
    "item", "tolist", "numpy", "data_ptr", "untyped_storage", "storage", "__bool__", "__int__", "__float__",
    "__index__", "__complex__", "__reduce_ex__", "share_memory_", "is_shared", "__array__", "__dlpack__",
    "__dlpack_device__", TYPED_STORAGE, "is_pinned", "const_data_ptr",
)  # fmt: skip
_REASONS = {"__reduce_ex__": "pickle", "__dlpack_device__": "__dlpack__"}
"""What asked for the data, where the method has another name."""
_METADATA = (
    "size", "dim", "numel", "nelement", "stride", "is_floating_point", "is_complex", "element_size", "ndimension",
    "is_contiguous", "get_device", "is_signed", "__len__",
)  # fmt: skip
_ADDRESSING = ("as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter")
_METADATA_ATTRIBUTES = ("layout", "is_cuda", "is_sparse", "is_meta", "itemsize", "nbytes", "is_nested",
                        "is_mkldnn", "is_mps", "is_xpu", "is_cpu")  # fmt: skip


def _table() -> dict[Any, Handler]:
    table: dict[Any, Handler] = {
        _T.backward: backward,
        torch.autograd.backward: backward_of,
        torch.autograd.grad: gradients_of,
        _T.register_hook: hook_on_graph(_T.register_hook),
        _T.retain_grad: hook_on_graph(_T.retain_grad),
        _T.requires_grad_: requires_grad_,
        _T.grad_fn.__get__: _grad_fn,  # type: ignore[union-attr]
        VERSION_GETTER: _version,
        _T.is_quantized.__get__: _is_quantized,  # type: ignore[attr-defined]
        _T.is_inference: _is_inference,
        torch.is_inference: _is_inference,
        _T.__iter__: _iterate,
        _T.__format__: _format,
        _T.__hash__: _hash,
        DATA_SETTER: _refused("assigning .data", "use copy_(), or LazyTensor.set_tensor"),
        ADD_BATCH_DIM: _forced("is_grads_batched", ADD_BATCH_DIM),
        _T.storage_offset: _storage_offset,
        torch.numel: _metadata(_T.numel),
        torch.is_floating_point: _metadata(_T.is_floating_point),
        torch.is_complex: _metadata(_T.is_complex),
    }
    forcing = (name for name in _FORCING if hasattr(_T, name))
    table.update({getattr(_T, name): _forced(_REASONS.get(name, name), getattr(_T, name)) for name in forcing})
    table.update({getattr(_T, name): _metadata(getattr(_T, name)) for name in _METADATA})
    addressing = (getattr(place, name, None) for place in (_T, torch) for name in _ADDRESSING)
    table.update({method: _addressing(method) for method in addressing if method is not None})
    for name in _METADATA_ATTRIBUTES:
        getter = getattr(_T, name).__get__
        table[getter] = _metadata(getter)
    return table


_handlers = _table()
READING: frozenset[Any] = frozenset(
    [
        *(getattr(_T, name) for name in _FORCING if hasattr(_T, name)),
        *(_T.backward, torch.autograd.backward, _T.grad_fn.__get__, _T.__format__),  # type: ignore[union-attr]
    ]
)
"""Functions before which what is pending for their operands is run."""


original_methods: dict[str, Handler] = {}
"""PyTorch's own methods, by name, where `koila.capture.writes` has put others over them."""


def lookup_function(func: Handler) -> Handler:
    """The lazy implementation of a torch function.

    >>> lookup_function(torch.add).func.__name__
    'lazy_forward'
    """
    return _handlers.get(func) or partial(lazy_forward, func)


def lookup_method(name: str) -> Handler:
    """The lazy implementation of a method of `torch.Tensor`.

    Raises:
        AttributeError: `torch.Tensor` has no such method.
    """
    return lookup_function(original_methods.get(name) or getattr(torch.Tensor, name))


class _Found:
    """What was found for functions of PyTorch that were called before, so that each is looked up once."""

    def __init__(self) -> None:
        self.entries: dict[Handler, Handler] = {}
        register(self)

    def clear(self) -> None:
        self.entries.clear()

    def look_up(self, func: Handler) -> Handler:
        """Look up a function, and remember it: it is PyTorch's own. A user's function must not be kept alive."""
        name = getattr(func, "__name__", "")
        if isinstance(func, FunctionType) and str(func.__module__).split(".")[0] != "torch":
            return _at_call(func)
        found = self.entries[func] = lookup_method(name) if getattr(_T, name, None) is func else lookup_function(func)
        return found


_found = _Found()
known_implementations: Mapping[Handler, Handler] = _found.entries
"""What `implementation` gave before: every call looks here first."""


def implementation(func: Handler) -> Handler:
    """The lazy implementation of whatever `__torch_function__` is called with: a method of tensors, or a function."""
    return _found.entries.get(func) or _found.look_up(func)
