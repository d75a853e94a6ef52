"""Matrix products: copies of operands that BLAS cannot read, and results in float32 where a kernel needs one.

Measured, but for half precision in oneDNN (`_native`), which is by reading.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from koila.planning.workspace.kernel_call import HALF, Formula, KernelCall, num_bytes
from koila.planning.workspace.onednn_convolutions import PRIMITIVE_BYTES

aten = torch.ops.aten


def _orientation(matrix: torch.Tensor) -> str:
    """How BLAS can read a matrix: "n" row by row, "t" column by column, "copy" not at all."""
    rows, columns = matrix.shape[-2:]
    down, right = matrix.stride()[-2:]
    if right == 1 and down >= max(1, columns):
        return "n"
    return "t" if down == 1 and right >= max(1, rows) else "copy"


def _product(left: str, right: str) -> Formula:
    """One matrix at a time."""

    def formula(call: KernelCall) -> int:
        operands, result = [call[left], call[right]], call.result
        if result.dtype in call.processor.native:
            return _native(operands, result, call.num_threads)
        copied = sum(prod(m.shape[-2:]) * m.element_size() for m in operands if _orientation(m) == "copy")
        widened = result.dtype in HALF and [_orientation(m) for m in operands] == ["t", "n"]
        return copied + (4 * prod(result.shape[-2:]) if widened else 0)

    return formula


def _native(operands: list[torch.Tensor], result: torch.Tensor, num_threads: int) -> int:
    """oneDNN may copy both operands into its layout, and add up in float32: by reading."""
    copied = sum(map(num_bytes, operands)) + 4 * result.numel()
    return copied + PRIMITIVE_BYTES + num_threads * (256 << 10)


ROWS: dict[Any, Formula] = {
    aten.mm.default: _product("self", "mat2"),
    aten.addmm.default: _product("mat1", "mat2"),
    aten.bmm.default: _product("self", "mat2"),
    aten.baddbmm.default: _product("batch1", "batch2"),
}
