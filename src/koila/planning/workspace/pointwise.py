"""Pointwise operators: operands are cast to the common type, whole, before the loop begins."""

from __future__ import annotations

from typing import Any

import torch

from koila.planning.workspace.kernel_call import Formula, KernelCall, num_bytes

aten = torch.ops.aten


def casts(call: KernelCall) -> int:
    """Operands in another type than the common one, copied into it; a result in another type, copied from it."""
    return _casts(list(call.arguments.values()), call)


def _casts(values: list[Any], call: KernelCall) -> int:
    result = call.result
    if not isinstance(result, torch.Tensor):
        return 0
    operands = [value for value in values if isinstance(value, torch.Tensor) and value.dim()]
    types = {operand.dtype for operand in operands}
    if types == {result.dtype} or any(dtype.is_complex for dtype in types):
        return 0
    common = _common(types, call)
    cast = [operand for operand in operands if operand.dtype != common]
    if call.writes and result.dtype not in (common, torch.bool):
        cast.append(result)
    return sum(tensor.numel() for tensor in cast) * common.itemsize


def _common(types: set[torch.dtype], call: KernelCall) -> torch.dtype:
    """The type that is computed in."""
    found: torch.dtype = call.result.dtype
    if found == torch.bool:
        return _promoted(types)
    if not call.writes or not types:
        return found
    promoted = _promoted(types)
    # Integers that give floating numbers, as in a division, are computed as those.
    return found if found.is_floating_point and not promoted.is_floating_point else promoted


def _promoted(types: set[torch.dtype]) -> torch.dtype:
    common = torch.bool
    for dtype in types:
        common = torch.promote_types(common, dtype)
    return common


def _where(call: KernelCall) -> int:
    return _casts([call["self"], call["other"]], call)


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
