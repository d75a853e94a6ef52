"""Rules for products of matrices: the batch may be a row, a column, a batch of products, or what is contracted.

*Takes* calls of product operators. *Gives* the table `ROWS`; a contraction over the batch is Merged(Sum).
"""

from __future__ import annotations

from typing import Any

import torch

from koila.analysis.chunk_rule import Call, Rule
from koila.analysis.rules._rows import letters, shared_out

aten = torch.ops.aten


def _scales_rows(call: Call) -> bool:
    """Whether the first matrix has one scale, or one for each row; other layouts of scales belong to the whole."""
    return call["scale_a"].shape in ((), (1,), (1, 1), (call["self"].shape[0], 1))


ROWS: dict[Any, Rule] = {
    aten.mm.default: letters("self=ik mat2=kj -> ij+"),
    aten.bmm.default: letters("self=bik mat2=bkj -> bij+"),
    aten.mv.default: letters("self=ik vec=k -> i+"),
    aten.dot.default: letters("self=k tensor=k -> +"),
    aten.vdot.default: letters("self=k other=k -> +"),
    aten.addmm.default: shared_out(letters("self=ij mat1=ik mat2=kj -> ij+"), "beta"),
    aten.baddbmm.default: shared_out(letters("self=bij batch1=bik batch2=bkj -> bij+"), "beta"),
    aten.addbmm.default: shared_out(letters("self=ij batch1=bik batch2=bkj -> ij+"), "beta"),
    aten.addmv.default: shared_out(letters("self=i mat=ik vec=k -> i+"), "beta"),
    aten.addr.default: letters("self=ij vec1=i vec2=j -> ij"),
    aten._scaled_mm.default: letters("self=iK mat2=KJ scale_a=iO -> iJ", when=_scales_rows),
    aten._cdist_forward.default: letters("x1=*iD x2=*jD -> *ij"),
    aten._cdist_backward.default: letters("grad=*ij x1=*iD x2=*jD cdist=*ij -> *iD+"),
    aten._euclidean_dist.default: letters("x1=*iD x2=*jD -> *ij"),
}
