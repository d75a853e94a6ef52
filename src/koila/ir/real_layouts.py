"""Layouts that kernels give their results, where PyTorch's fake kernels say otherwise.

*Takes* an operator, its arguments and its fake results. *Gives* results with the strides of the real ones. Strides are
part of the numbers: random numbers are drawn in the order of memory, and `as_strided` counts in it.
"""

from __future__ import annotations

from typing import Any

import torch

from koila._torch import OpOverload, suggested_format
from koila.ir.tree import leaves

aten = torch.ops.aten

_OF_FORMAT = {
    aten.native_batch_norm.default, aten._native_batch_norm_legit.default, aten._native_batch_norm_legit.no_stats,
    aten._batch_norm_with_update.default, aten.channel_shuffle.default,
    aten.reflection_pad2d.default, aten.reflection_pad3d.default, aten.replication_pad2d.default,
    aten.replication_pad3d.default, aten.max_unpool2d.default, aten.native_channel_shuffle.default,
}  # fmt: skip
"""Their first result is contiguous, or has the channels last if their input has."""

_ELEMENT_BY_ELEMENT = {
    aten.copysign.Tensor, aten.div.Tensor_mode, aten.floor_divide.default, aten.xlogy.Tensor,
    aten.special_xlog1py.default, aten.binary_cross_entropy.default, aten.native_dropout_backward.default,
    aten.logaddexp.default, aten.heaviside.default, aten.logical_and.default, aten.logical_or.default,
    aten.logical_xor.default,
}  # fmt: skip
"""Their result lies in memory as that of any operator which goes through its operands element by element."""


def is_laid_out_otherwise(func: OpOverload) -> bool:
    """Whether the fake results of an operator may have other strides than the real ones."""
    return func in _OF_FORMAT or func in _ELEMENT_BY_ELEMENT


def with_real_layout(func: OpOverload, args: Any, result: Any) -> Any:
    """The fake results of an operator, laid out as the real ones are."""
    if func in _OF_FORMAT:
        first, *others = result if isinstance(result, tuple) else (result,)
        first = _laid_out(first, torch.empty_like(first, memory_format=suggested_format(args[0])).stride())
        return (first, *others) if isinstance(result, tuple) else first
    if func in _ELEMENT_BY_ELEMENT:
        operands = [leaf for leaf in leaves(args[:2]) if isinstance(leaf, torch.Tensor)]
        together = aten.mul.Tensor(*operands) if len(operands) == 2 else aten.neg.default(operands[0])
        return _laid_out(result, together.stride()) if together.shape == result.shape else result
    return result


def _laid_out(fake: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    if fake.stride() == stride:
        return fake
    return torch.empty_strided(fake.shape, stride, dtype=fake.dtype, device=fake.device)
