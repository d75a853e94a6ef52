"""Kernels for meta tensors: what some operators give, at a fraction of the time that PyTorch takes to say it.

*Takes* an operator and its arguments on meta tensors. *Gives* its results, or None: then PyTorch is to be asked. Many
operators have kernels for meta tensors that are written in Python, as compositions of others; a layer normalisation
takes a millisecond there, more than on small real tensors.

Only dense operands of one floating type are answered here, because there every size and stride follows from the sizes
of the operands. Wrong shapes are not: whoever asks gets PyTorch's own error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any

import torch

from koila._torch import OpOverload, schema_of
from koila.ir.cache import Cache

aten = torch.ops.aten

_PLAIN = (torch.float32, torch.float64)
"""Types in which every operator computes and keeps its statistics."""


@cache
def is_slow(func: OpOverload) -> bool:
    """Whether PyTorch takes long to say what an operator gives, and `known_result` may know it.

    >>> is_slow(torch.ops.aten.add.Tensor), is_slow(torch.ops.aten.view.default)
    (True, False)
    """
    return func in KERNELS or torch.Tag.pointwise in func.tags


def known_result(func: OpOverload, args: Any, kwargs: Any) -> Any:
    """What an operator gives for meta tensors; None if only PyTorch knows.

    >>> dense = torch.empty(4, 3, device="meta")
    >>> known_result(torch.ops.aten._log_softmax.default, (dense, -1, False), {}).shape
    torch.Size([4, 3])
    """
    kernel = KERNELS.get(func)
    if kernel is not None:
        return None if kwargs else kernel(*args)
    return _pointwise(func, args, kwargs) if torch.Tag.pointwise in func.tags else None


def _empty(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor has elements, in their plain order; also dimensions of one element have the usual strides."""
    shape = tuple(tensor.shape)
    strides = tuple(accumulate(shape[:0:-1], mul, initial=1))[::-1] if shape else ()
    return tensor.is_meta and 0 not in shape and tensor.stride() == strides and not tensor.is_neg()


def _are_plain(*tensors: torch.Tensor | None) -> bool:
    given = [tensor for tensor in tensors if tensor is not None]
    return given[0].dtype in _PLAIN and all(each.dtype == given[0].dtype and _is_dense(each) for each in given)


# Operators by name.


def _addmm(bias: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> Any:
    kind = first.dtype
    if not kind == bias.dtype == second.dtype or kind not in _PLAIN or first.ndim != 2 or second.ndim != 2:
        return None
    shape = (first.shape[0], second.shape[1])
    fits = first.shape[1] == second.shape[0] and tuple(bias.shape) in (shape, shape[1:])
    return _empty(shape, kind) if fits and 0 not in (*shape, first.shape[1]) else None


def _statistics_shape(given: torch.Tensor, normalized: Any) -> list[int] | None:
    """The shape of the mean of a layer normalisation; None if its arguments do not belong together."""
    last, normalized = len(normalized), list(normalized)
    if not 0 < last <= given.ndim or list(given.shape[-last:]) != normalized:
        return None
    return [*given.shape[:-last], *[1] * last]


def _layer_norm(given: torch.Tensor, normalized: Any, weight: Any, bias: Any, eps: float) -> Any:
    shape = _statistics_shape(given, normalized)
    scales = [each for each in (weight, bias) if each is not None]
    if shape is None or not _are_plain(given, *scales) or any(list(e.shape) != list(normalized) for e in scales):
        return None
    return tuple(_empty(each, given.dtype) for each in (given.shape, shape, shape))


def _layer_norm_backward(
    gradient: torch.Tensor, given: torch.Tensor, normalized: Any, mean: torch.Tensor, rstd: torch.Tensor, weight: Any,
    bias: Any, wanted: Any,
) -> Any:  # fmt: skip
    shape = _statistics_shape(given, normalized)
    if shape is None or weight is None or bias is None or not _are_plain(gradient, given, mean, rstd, weight, bias):
        return None
    if gradient.shape != given.shape or list(mean.shape) != shape or list(rstd.shape) != shape:
        return None
    if list(weight.shape) != list(normalized) or list(bias.shape) != list(normalized):
        return None
    likes = zip(wanted, (given, weight, bias), strict=True)
    return tuple(_empty(like.shape, like.dtype) if asked else None for asked, like in likes)


def _softmax(given: torch.Tensor, dim: int, half_to_float: bool = False) -> Any:
    known = _are_plain(given) and -given.ndim <= dim < given.ndim and not half_to_float
    return _empty(given.shape, given.dtype) if known else None


def _softmax_backward(gradient: torch.Tensor, output: torch.Tensor, dim: int, dtype: torch.dtype) -> Any:
    known = _are_plain(gradient, output) and gradient.shape == output.shape and -output.ndim <= dim < output.ndim
    return _empty(output.shape, dtype) if known and dtype == output.dtype else None


def _nll_loss(given: torch.Tensor, target: torch.Tensor, weight: Any, reduction: int, ignored: int) -> Any:
    known = _are_plain(given) and given.ndim == 2 and target.ndim == 1 and target.dtype == torch.int64
    if not known or weight is not None or reduction not in (1, 2) or target.shape[0] != given.shape[0]:
        return None
    return _empty((), given.dtype), _empty((), given.dtype)


def _batch_norm(
    given: torch.Tensor, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, momentum: float, eps: float
) -> Any:
    parts = [part for part in (weight, bias, mean, variance) if part is not None]
    if not training or given.ndim < 2 or not _are_plain(given, *parts):
        return None
    channels = given.shape[1]
    if any(tuple(part.shape) != (channels,) for part in parts):
        return None
    return _empty(given.shape, given.dtype), _empty(channels, given.dtype), _empty(channels, given.dtype)


def _dropout(given: torch.Tensor, probability: float, training: bool | None) -> Any:
    if not training or not 0 < probability < 1 or not _are_plain(given):
        return None
    return _empty(given.shape, given.dtype), _empty(given.shape, torch.bool)


KERNELS: dict[OpOverload, Callable[..., Any]] = {
    aten.addmm.default: _addmm,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten._log_softmax.default: _softmax,
    aten._safe_softmax.default: _softmax,
    aten._log_softmax_backward_data.default: _softmax_backward,
    aten._softmax_backward_data.default: _softmax_backward,
    aten.nll_loss_forward.default: _nll_loss,
    aten.native_batch_norm.default: _batch_norm,
    aten.native_dropout.default: _dropout,
}
"""By operator, what it gives; a kernel returns None for what it does not know."""


# Pointwise operators.

_dtypes: Cache[torch.dtype] = Cache("pointwise_cache", 1024)
"""By pointwise operator and kinds of operands, the type of its result."""


def _pointwise(func: OpOverload, args: Any, kwargs: Any) -> Any:
    """The result of a pointwise operator: which type it has does not depend on sizes, so PyTorch is asked once."""
    if kwargs or func.is_view or len(schema_of(func).returns) != 1 or schema_of(func).is_mutable:
        return None
    tensors = [each for each in args if isinstance(each, torch.Tensor)]
    shape = _common_shape(tensors)
    if shape is None or not all(isinstance(each, torch.Tensor | bool | int | float | str) for each in args):
        return None
    key = (func, torch.get_default_dtype(), *map(_kind, args))
    dtype = _dtypes.get(key)
    if dtype is None:
        result = func(*args)
        if _is_dense(result) and tuple(result.shape) == shape:
            _dtypes.add(key, result.dtype)
        return result
    return _empty(shape, dtype)


def _kind(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.ndim > 0
    return type(argument) if isinstance(argument, bool | int | float) else argument


def _common_shape(tensors: list[torch.Tensor]) -> tuple[int, ...] | None:
    """The shape of a pointwise result that is dense for sure; None if there is none."""
    if not tensors or not all(each.dtype in _PLAIN and _is_dense(each) for each in tensors):
        return None
    shapes = {tuple(each.shape) for each in tensors}
    shape = max(shapes, key=prod)
    shapes.discard(shape)
    # A dimension of one element may get any stride where operands are expanded.
    if shapes and 1 in shape:
        return None
    return shape if all(_expands(other, shape) for other in shapes) else None


def _expands(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether a tensor of one shape can be expanded to the other."""
    if len(shape) > len(other):
        return False
    return all(size in (1, other[place]) for place, size in enumerate(shape, -len(shape)))
