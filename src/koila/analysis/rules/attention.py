"""Rules for fused attention: samples and heads are independent, positions are not.

*Takes* calls of the CPU's fused attention and its backward. *Gives* the table `ROWS`.
"""

from __future__ import annotations

from typing import Any

import torch

from koila.analysis.chunk_rule import Call, Rule
from koila.analysis.rules._rows import letters

aten = torch.ops.aten


def _without_dropout(call: Call) -> bool:
    return call["dropout_p"] == 0


_INPUTS = "query=bhLE key=bhSE value=bhSE attn_mask=bhLS"

ROWS: dict[Any, Rule] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: letters(f"{_INPUTS} -> bhLE bhL", when=_without_dropout),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: letters(
        f"grad_out=bhLE {_INPUTS} out=bhLE logsumexp=bhL -> bhLE bhSE bhSE", when=_without_dropout
    ),
}
