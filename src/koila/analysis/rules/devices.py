"""Rules for operators that only accelerators have: fused attention and recurrent cells.

*Takes* calls of these operators. *Gives* the table `ROWS`. Samples are independent in all of them. Attention with
dropout draws its random numbers inside of the kernel, so it is never cut. Rows in `BY_READING` have no kernel on the
simulated device of the tests: they follow from the operators' documentation alone.
"""

from __future__ import annotations

from typing import Any

import torch

from koila.analysis.chunk_rule import Call, Rule
from koila.analysis.rules._rows import letters

aten = torch.ops.aten


def _without_dropout(call: Call) -> bool:
    return call["dropout_p"] == 0


_INPUTS = "query=bhLE key=bhSE value=bhSE"
_SAVED = "out=bhLE logsumexp=bhL"
_NINE = "bhLE bhL - - - - - - -"
"""Result and logarithms; sequence lengths, seed, offset and a mask that only debugging asks for."""

_efficient = letters(f"{_INPUTS} attn_bias=bhLS -> bhLE bhL - -", when=_without_dropout)
_efficient_backward = letters(
    f"grad_out_=bhLE {_INPUTS} attn_bias=bhLS {_SAVED} -> bhLE bhSE bhSE bhLS", when=_without_dropout
)
_overrideable = letters(f"{_INPUTS} attn_bias=bhLS -> {_NINE}", when=_without_dropout)
_overrideable_backward = letters(
    f"grad_out=bhLE {_INPUTS} attn_bias=bhLS {_SAVED} -> bhLE bhSE bhSE bhLS", when=_without_dropout
)
_flash = letters(f"{_INPUTS} -> {_NINE}", when=_without_dropout)
_flash_backward = letters(f"grad_out=bhLE {_INPUTS} {_SAVED} -> bhLE bhSE bhSE", when=_without_dropout)
_cudnn_backward = letters(f"grad_out=bhLE {_INPUTS} attn_bias=bhLS {_SAVED} -> bhLE bhSE bhSE", when=_without_dropout)

BY_READING: dict[Any, Rule] = {
    aten._scaled_dot_product_flash_attention.default: _flash,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_cudnn_attention.default: _overrideable,
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
}

ROWS: dict[Any, Rule] = {
    aten._scaled_dot_product_efficient_attention.default: _efficient,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten._scaled_dot_product_fused_attention_overrideable.default: _overrideable,
    aten._scaled_dot_product_fused_attention_overrideable_backward.default: _overrideable_backward,
    aten._thnn_fused_lstm_cell.default: letters("input_gates=bG hidden_gates=bG cx=bH -> bH bH bG"),
    aten._thnn_fused_lstm_cell_backward_impl.default: letters(
        "grad_hy=bH grad_cy=bH cx=bH cy=bH workspace=bG -> bG bH G+"
    ),
    aten._thnn_fused_gru_cell.default: letters("input_gates=bG hidden_gates=bG hx=bH -> bH bW"),
    aten._thnn_fused_gru_cell_backward.default: letters("grad_hy=bH workspace=bW -> bG bG bH G+ G+"),
    **BY_READING,
}
