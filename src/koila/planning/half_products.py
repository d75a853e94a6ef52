"""Products of half precision: computed in float32 where the processor has no instructions for them.

*Takes* an operator and its operands. *Gives* whether its product is computed in float32, and the bytes that this needs
beside the result. Both ways add up in float32 and round once: the numbers have the same error, and are had ten to a
hundred times sooner than from the kernel for processors of this kind. `koila.execution.kernels` has the functions.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from koila._torch import onednn_has_bfloat16
from koila.planning.devices import current_rules
from koila.planning.workspace import HALF

aten = torch.ops.aten

PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)


@cache
def _is_native() -> bool:
    return onednn_has_bfloat16()


def runs_in_float32(target: Any, result: Any) -> bool:
    """Whether a product with such a result is computed in float32."""
    is_half = isinstance(result, torch.Tensor) and result.dtype in HALF
    return target in PRODUCTS and is_half and not (current_rules().multiplies_halves or _is_native())


def float32_bytes(tensors: list[torch.Tensor]) -> int:
    """Bytes for operands and result once more, in float32."""
    return 4 * sum(tensor.numel() for tensor in tensors)
