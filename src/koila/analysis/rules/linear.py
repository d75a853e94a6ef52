"""Linear operators: what may be done to each chunk's addend instead of to the sum.

*Takes* calls with operands of type Merged(Sum). *Gives* a ruling that keeps the merge open, or None. The table
`LINEAR` says for each operator in which operands it is linear, one at a time, or all together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from koila.analysis.chunk_rule import Call, ChunkRule, Operand
from koila.analysis.monoids import Sum, narrow_dtype
from koila.analysis.rules._axes import packed
from koila.analysis.types import Merged, Whole

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Linear:
    """In which operands an operator is linear."""

    each: tuple[str, ...] = ()
    """Any one of these may be a sum while all others are Whole."""
    together: tuple[str, ...] = ()
    """All of these must be sums at once."""
    when: Callable[[Call], bool] = lambda call: True
    as_reshape: bool = False
    """An addend need not have the strides of the sum: a view of it is a reshape."""


def keeps_sum(call: Call, linear: Linear) -> ChunkRule | None:
    """The ruling of a linear operator on sums."""
    sums = {name for name, value in call.operands().items() if _is_sum(value)}
    others = [value for name, value in call.operands().items() if name not in sums]
    if not sums or not all(_is_whole(value) for value in others) or not linear.when(call):
        return None
    if sums != set(linear.together) and not (len(sums) == 1 and sums <= set(linear.each)):
        return None
    if not call.results or any(result is not None and result.dtype is torch.bool for result in call.results):
        return None
    needs = {name: _needed(call[name]) for name in sums}
    results = tuple(Merged(Sum(None if r is None else narrow_dtype(r.dtype))) for r in call.results)
    if linear.as_reshape:
        return ChunkRule(needs, packed(call, results), rewrite=_reshape_arguments, target=aten.reshape.default)
    return ChunkRule(needs, packed(call, results))


def _reshape_arguments(arguments: dict[str, Any], num_samples: int) -> dict[str, Any]:
    return {"self": arguments["self"], "shape": arguments["size"]}


def _is_sum(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_is_sum(item) for item in value)
    return isinstance(value, Operand) and isinstance(value.type, Merged) and isinstance(value.type.monoid, Sum)


def _is_whole(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(item is None or _is_whole(item) for item in value)
    return isinstance(value.type, Whole)


def _needed(value: Any) -> Any:
    return tuple(item.type for item in value) if isinstance(value, tuple) else value.type


def _not_narrower(call: Call) -> bool:
    """A cast that loses nothing of an addend that the sum would keep."""
    before, after = call["self"].dtype, call.result.dtype
    if before.is_floating_point != after.is_floating_point and not after.is_complex:
        return after is torch.float64 and not before.is_complex
    return torch.promote_types(before, after) == after


def _same_dtype(call: Call) -> bool:
    return isinstance(call["other"], Operand) and call["self"].dtype == call["other"].dtype


def _of_zero(call: Call) -> bool:
    return not isinstance(call["value"], Operand) and call["value"] == 0


def _floating(call: Call) -> bool:
    return call.result.dtype.is_floating_point or call.result.dtype.is_complex


_SELF = Linear(each=("self",))
_VIEW = Linear(each=("self",), as_reshape=True)

LINEAR: dict[Any, Linear] = {
    aten.neg.default: _SELF,
    aten.positive.default: _SELF,
    aten.mul.Tensor: Linear(each=("self", "other")),
    aten.mul.Scalar: _SELF,
    aten.div.Tensor: Linear(each=("self",), when=_floating),
    aten.div.Scalar: Linear(each=("self",), when=_floating),
    aten.add.Tensor: Linear(together=("self", "other"), when=_same_dtype),
    aten.sub.Tensor: Linear(together=("self", "other"), when=_same_dtype),
    aten.rsub.Tensor: Linear(together=("self", "other"), when=_same_dtype),
    aten.where.self: Linear(together=("self", "other"), when=_same_dtype),
    aten.masked_fill.Scalar: Linear(each=("self",), when=_of_zero),
    aten.mm.default: Linear(each=("self", "mat2")),
    aten.bmm.default: Linear(each=("self", "mat2")),
    aten.mv.default: Linear(each=("self", "vec")),
    aten.dot.default: Linear(each=("self", "tensor")),
    aten.sum.default: Linear(each=("self",), when=_not_narrower),
    aten.sum.dim_IntList: Linear(each=("self",), when=_not_narrower),
    aten.view.default: _VIEW,
    aten._unsafe_view.default: _VIEW,
    aten.reshape.default: _SELF,
    aten.permute.default: _SELF,
    aten.transpose.int: _SELF,
    aten.t.default: _SELF,
    aten.unsqueeze.default: _SELF,
    aten.squeeze.default: _SELF,
    aten.squeeze.dim: _SELF,
    aten.squeeze.dims: _SELF,
    aten.expand.default: _SELF,
    aten.repeat.default: _SELF,
    aten.select.int: _SELF,
    aten.slice.Tensor: _SELF,
    aten.split.Tensor: _SELF,
    aten.split_with_sizes.default: _SELF,
    aten.unbind.int: _SELF,
    aten.cat.default: Linear(together=("tensors",)),
    aten.stack.default: Linear(together=("tensors",)),
    aten.diagonal.default: _SELF,
    aten.flip.default: _SELF,
    aten.tril.default: _SELF,
    aten.triu.default: _SELF,
    aten.constant_pad_nd.default: Linear(each=("self",), when=_of_zero),
    aten.index_select.default: _SELF,
    aten.gather.default: _SELF,
    aten.slice_backward.default: Linear(each=("grad_output",)),
    aten.select_backward.default: Linear(each=("grad_output",)),
    aten.embedding_dense_backward.default: Linear(each=("grad_output",)),
    aten.alias.default: _SELF,
    aten.detach.default: _SELF,
    aten.clone.default: _SELF,
    aten._to_copy.default: Linear(each=("self",), when=_not_narrower),
    aten.zeros_like.default: _SELF,
}
