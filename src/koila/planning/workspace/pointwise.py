"""Pointwise operators: operands are cast to the common type, whole, before the loop begins."""

from __future__ import annotations

from typing import Any

import torch

from koila.planning.workspace.kernel_call import Formula, KernelCall, num_bytes

aten = torch.ops.aten


def casts(call: KernelCall) -> int:
    """Operands in another type than the common one, copied into it."""
    return _casts(list(call.arguments.values()), call.result)


def _casts(values: list[Any], result: Any) -> int:
    if not isinstance(result, torch.Tensor):
        return 0
    operands = [value for value in values if isinstance(value, torch.Tensor) and value.dim()]
    types = {operand.dtype for operand in operands}
    if types == {result.dtype} or any(dtype.is_complex for dtype in types):
        return 0
    common = result.dtype if result.dtype != torch.bool else _promoted(types)
    return sum(operand.numel() for operand in operands if operand.dtype != common) * common.itemsize


def _promoted(types: set[torch.dtype]) -> torch.dtype:
    common = torch.bool
    for dtype in types:
        common = torch.promote_types(common, dtype)
    return common


def _where(call: KernelCall) -> int:
    return _casts([call["self"], call["other"]], call.result)


def _none(call: KernelCall) -> int:
    return 0


def _dropout(call: KernelCall) -> int:
    return num_bytes(call["input"]) if call["train"] else 0


ROWS: dict[Any, Formula] = {
    aten.where.self: _where,
    aten.native_dropout.default: _dropout,
    aten._to_copy.default: _none,
    aten.clone.default: _none,
    aten.copy.default: _none,
    aten.masked_fill.Scalar: _none,
}
"""Those that are not as `casts` says, which holds for all others with the tag."""
