"""Rules for operators that work inside one dimension of a sample: softmax, scans, sorting.

*Takes* calls whose argument `dim` names the dimension. *Gives* the table `ROWS`.
"""

from __future__ import annotations

from typing import Any

import torch

from koila.analysis.chunk_rule import Call, ChunkRule, Rule
from koila.analysis.prepasses import dims_of
from koila.analysis.rules._axes import Axes, follow, left
from koila.analysis.rules._rows import along

aten = torch.ops.aten


def renormed(call: Call) -> ChunkRule | None:
    """The dimension that `dim` names is the batch; the others are rigid."""
    ndim = call["self"].ndim
    labels = left(ndim, set(range(ndim)) - dims_of(call["dim"], ndim))
    return follow(call, Axes({"self": labels}, (labels,), broadcast=False))


ROWS: dict[Any, Rule] = {
    aten._softmax.default: along("dim"),
    aten._safe_softmax.default: along("dim"),
    aten._log_softmax.default: along("dim"),
    aten._softmax_backward_data.default: along("dim", first="grad_output"),
    aten._log_softmax_backward_data.default: along("dim", first="grad_output"),
    aten.cumsum.default: along("dim"),
    aten.cumprod.default: along("dim"),
    aten.cummax.default: along("dim"),
    aten.cummin.default: along("dim"),
    aten.logcumsumexp.default: along("dim"),
    aten.sort.default: along("dim"),
    aten.sort.stable: along("dim"),
    aten.topk.default: along("dim"),
    aten.renorm.default: renormed,
    aten.glu.default: along("dim"),
    aten.glu_backward.default: along("dim"),
}
