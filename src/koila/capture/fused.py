"""Modules with fused paths: what they decide, they decide when they are called, as in eager.

*Takes* PyTorch's transformer modules. *Gives* the same modules, except that lazy and eager arguments do not keep them
from their fused operators: called with one, `forward` runs with a `torch` in which `overrides.has_torch_function`, by
which it decides, takes such a tensor for a plain one. The module's Python runs at the call, in the mode that it has
then; what is recorded is the operator. Without such arguments nothing is different, for compilers neither.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from koila._torch import is_function_mode_enabled
from koila.capture.bridge import Bridge
from koila.capture.record import input_value
from koila.ir.tree import leaves, map_leaves

MODULES = (torch.nn.TransformerEncoder, torch.nn.TransformerEncoderLayer, torch.nn.MultiheadAttention)


class _Overrides:
    """`torch.overrides` for these modules."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.overrides, name)

    @staticmethod
    def has_torch_function(arguments: Any) -> bool:
        others = tuple(each for each in arguments if type(each) not in (Bridge.lazy_type, Bridge.eager_type))
        return is_function_mode_enabled() or torch.overrides.has_torch_function(others)


class _Torch:
    """`torch` for these modules."""

    overrides = _Overrides()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


_torch = _Torch()


def patch_fused_modules() -> None:
    """Let these modules decide about lazy and eager tensors as about plain ones."""
    for kind in MODULES:
        kind.forward = _patched(kind.forward, is_dynamo_compiling, _has_own, _call)  # type: ignore[method-assign]


def _patched(original: Any, compiles: Callable[[], bool], has_own: Any, call: Any) -> Any:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if compiles() or not has_own((args, kwargs)):
            return original(self, *args, **kwargs)
        return call(original, self, *args, **kwargs)

    # It has the names of the original, where TorchScript looks them up, and its file: Dynamo stays out of koila's.
    code = forward.__code__.replace(co_filename=original.__code__.co_filename)
    return wraps(original)(FunctionType(code, original.__globals__, "forward", None, forward.__closure__))


def _has_own(tree: Any) -> bool:
    return any(type(leaf) in (Bridge.lazy_type, Bridge.eager_type) for leaf in leaves(tree))


def _has_lazy(tree: Any) -> bool:
    return any(type(leaf) is Bridge.lazy_type for leaf in leaves(tree))


def _call(original: FunctionType, *args: Any, **kwargs: Any) -> Any:
    """Call a forward with another `torch`."""
    names = {**original.__globals__, "torch": _torch}
    forward = FunctionType(original.__code__, names, original.__name__, original.__defaults__, original.__closure__)
    forward.__kwdefaults__ = original.__kwdefaults__
    result = forward(*args, **kwargs)
    return map_leaves(result, _lazy) if _has_lazy((args, kwargs)) else result


def _lazy(leaf: Any) -> Any:
    """A result as a lazy tensor: with padded sequences the encoder computes on nested tensors, which are eager."""
    is_real = isinstance(leaf, torch.Tensor) and type(leaf) is not Bridge.lazy_type and not leaf.is_nested
    return Bridge.lazy_type._wrap(input_value(leaf)) if is_real else leaf
