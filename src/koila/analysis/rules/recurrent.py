"""Rules for recurrent layers, oneDNN's and those of `koila.ir.recurrent`: samples are independent, steps are not.

*Takes* calls of a layer and its backward. *Gives* the table `ROWS`. oneDNN's layer hands its backward a workspace in a
format of its own: it belongs to the chunk that it was made for (`OPAQUE`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from koila.analysis.chunk_rule import Call, ChunkRule, Rule
from koila.analysis.rules._rows import letters
from koila.analysis.types import OPAQUE, WHOLE
from koila.ir import recurrent

aten = torch.ops.aten

_forward = letters("input=TbI hx_=bH cx_=bH -> TbH bH bH -")
_backward = letters(
    "input=TbI hx_=bH cx_tmp=bH output=TbH hy_=bH cy_=bH grad_output=TbH grad_hy=bH grad_cy=bH"
    " -> TbI GI+ GH+ G+ G+ bH bH"
)


def _layer(call: Call) -> ChunkRule | None:
    ruling = None if call["batch_sizes"] else _forward(call)
    if ruling is None:
        return None
    assert isinstance(ruling.result, tuple)
    return replace(ruling, result=(*ruling.result[:3], OPAQUE))


def _layer_backward(call: Call) -> ChunkRule | None:
    workspace = call["workspace"]
    if workspace.type != OPAQUE or call["batch_sizes"]:
        return None
    ruling = _backward(replace(call, arguments={**call.arguments, "workspace": replace(workspace, type=WHOLE)}))
    return None if ruling is None else replace(ruling, operands={**ruling.operands, "workspace": OPAQUE})


ROWS: dict[Any, Rule] = {
    aten.mkldnn_rnn_layer.default: _layer,
    aten.mkldnn_rnn_layer_backward.default: _layer_backward,
    recurrent.LAYER: letters("input=TbI state=bS -> TbH bS"),
    recurrent.LAYER_BACKWARD: letters("grad_output=TbH grad_state=bS input=TbI state=bS -> TbI bS GI+ GH+ G+ G+"),
}
