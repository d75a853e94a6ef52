"""Wide products: matrix products of half precision in float32, where the processor has no instructions for them.

*Takes* an operator and its operands. *Gives* the function that runs in its place and the bytes that it allocates beside
its result. Both add up in float32 and round once: the numbers have the same error, and are had ten to a hundred times
sooner than from the kernel for processors of this kind.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from koila.planning.workspace import HALF

aten = torch.ops.aten


def _wide(target: Any) -> Callable[..., torch.Tensor]:
    def product(*operands: torch.Tensor, **scales: Any) -> torch.Tensor:
        dtype = operands[0].dtype
        if operands[0].device.type != "cpu":
            return target(*operands, **scales)
        return target(*(operand.float() for operand in operands), **scales).to(dtype)

    product.__name__ = target.overloadpacket.__name__
    return product


PRODUCTS: dict[Any, Callable[..., torch.Tensor]] = {
    target: _wide(target) for target in (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)
}


@cache
def _is_native() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def runs_wide(target: Any, result: Any) -> bool:
    """Whether a product with such a result is computed in float32."""
    return target in PRODUCTS and isinstance(result, torch.Tensor) and result.dtype in HALF and not _is_native()


def wide_bytes(tensors: list[torch.Tensor]) -> int:
    """Bytes for operands and result once more, in float32."""
    return 4 * sum(tensor.numel() for tensor in tensors)
