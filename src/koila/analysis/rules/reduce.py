"""Rules for reductions: over other dimensions they keep the batch, over the batch they are a merge.

*Takes* calls of reducing operators. *Gives* the table `ROWS`: for each operator the monoid of its merge, or None where
the chunks' values do not merge.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf, prod
from typing import Any

import torch

from koila.analysis.chunk_rule import Call, ChunkRule, Operand, Rule, sliced
from koila.analysis.monoids import (
    HALVES,
    AllTrue,
    AnyTrue,
    Extreme,
    FirstExtreme,
    LogSumExp,
    Moments,
    Monoid,
    PowerNorm,
    Product,
    Sum,
    narrow_dtype,
)
from koila.analysis.prepasses import Inferred, mean, reduce_dims, reduced_dims
from koila.analysis.rules._axes import Axes, follow, left, right
from koila.analysis.rules._rows import plain_number, weighted
from koila.analysis.types import WHOLE, Merged, Sliced
from koila.interfaces import BatchInfo

aten = torch.ops.aten

Merge = Callable[[Call, Sliced, set[int]], ChunkRule | None]
"""What a reduction over these dimensions, one of which holds the batch, comes to."""


def reduction(merge: Merge | None, infer: Callable[..., Inferred] = reduce_dims) -> Rule:
    """One rule for every reduction of `self`; `infer` says what shape the result has and where its batch is."""

    def rule(call: Call) -> ChunkRule | None:
        operand: Operand = call["self"]
        kind = operand.type
        if not isinstance(kind, Sliced):
            return None
        dim, keepdim = call.arguments.get("dim"), bool(call.arguments.get("keepdim"))
        shape, batch = infer(operand.shape, dim, keepdim, BatchInfo(kind.dim, call.num_samples))
        if any(result is None or result.shape != shape for result in call.results):
            return None
        dims = reduced_dims(dim, operand.ndim)
        if batch is None:
            return None if merge is None else merge(call, kind, dims)
        labels = left(operand.ndim, dims)
        kept = labels if keepdim else tuple(label for label in labels if label is not None)
        return follow(call, Axes({"self": labels}, tuple(kept for _ in call.results), broadcast=False))

    return rule


def by(monoid: Callable[[Call], Monoid | None]) -> Merge:
    """A merge of the operator's own results."""

    def merge(call: Call, kind: Sliced, dims: set[int]) -> ChunkRule | None:
        found = monoid(call)
        return None if found is None else ChunkRule({"self": kind}, Merged(found))

    return merge


def _sum(call: Call) -> Monoid:
    return Sum(narrow_dtype(call.result.dtype))


def _norm(call: Call) -> Monoid | None:
    """The order of a norm decides how norms merge; None is the square."""
    order = call.arguments.get("ord", call.arguments.get("p"))
    order = 2 if order is None else order
    if not plain_number(order) or (call.arguments.get("dtype") is None and call["self"].dtype in HALVES):
        return None
    if abs(order) == inf:
        return Extreme(order > 0)
    return _sum(call) if order == 0 else PowerNorm(order, narrow_dtype(call.result.dtype))


def distance(call: Call) -> ChunkRule | None:
    """dist: the norm of a difference."""
    monoid = _norm(call)
    operands = {name: right(call[name].ndim) for name in ("self", "other")}
    ruling = follow(call, Axes(operands, ((),), (True,)))
    return None if ruling is None or monoid is None else replace(ruling, result=Merged(monoid))


def histogram(call: Call) -> ChunkRule | None:
    """histc: counts add up where the range is given, and not found in the data."""
    kind = sliced(call["self"])
    return ChunkRule({"self": kind}, Merged(_sum(call))) if kind is not None and call["min"] != call["max"] else None


def averaged(call: Call, kind: Sliced, dims: set[int]) -> ChunkRule:
    """mean: the chunks' means, each weighted by its share of the samples."""
    return weighted(ChunkRule({"self": kind}, WHOLE), call, Merged(_sum(call)))


def _extremes(call: Call, kind: Sliced, dims: set[int]) -> ChunkRule:
    """aminmax: two merges."""
    return ChunkRule({"self": kind}, (Merged(Extreme(False)), Merged(Extreme())))


def first_extreme(largest: bool, *, with_values: bool) -> Merge:
    """max, min, argmax, argmin over one dimension: the value and its first place in the whole batch."""

    def merge(call: Call, kind: Sliced, dims: set[int]) -> ChunkRule | None:
        if kind.outer != 1 or call["dim"] is None:
            return None
        monoid = FirstExtreme(call["self"].shape[kind.dim], call.num_samples, largest, with_values)
        return ChunkRule({"self": kind}, Merged(monoid), target=aten.max.dim if largest else aten.min.dim)

    return merge


def chunk_moments(self: Any, dim: Any, correction: Any, keepdim: bool) -> Any:
    """`var_mean` of a chunk, wide enough to be merged: in two passes, several times faster than PyTorch's one."""
    wide = self.float() if self.dtype in HALVES else self
    dims = list(dim) if dim else list(range(wide.ndim))
    count = prod(wide.shape[place] for place in dims)
    if count == 0 or wide.is_complex():
        return aten.var_mean.correction(wide, dim, correction=0, keepdim=keepdim)
    center = wide.mean(dims, keepdim=True)
    spread = wide - center
    variance = spread.mul_(spread).sum(dims, keepdim=keepdim) / count
    return variance, center.view(variance.shape)


def exact_moments(self: Any, dim: Any, correction: Any, keepdim: bool) -> Any:
    """The same, of the differences to the first element: equal elements have no spread at all, as in eager.

    A deviation that is 1e-17 instead of 0 has a gradient, and one that is 0 has none.
    """
    wide = self.float() if self.dtype in HALVES else self
    dims = list(dim) if dim else list(range(wide.ndim))
    if wide.is_complex() or 0 in wide.shape:
        return aten.var_mean.correction(wide, dim, correction=0, keepdim=keepdim)
    first = wide
    for place in dims:
        first = first.narrow(place, 0, 1)
    first = first.nan_to_num(0.0, 0.0, 0.0)  # An infinity stays in what is left.
    variance, mean = chunk_moments(wide - first, dim, correction, keepdim)
    return variance, mean + first.view(mean.shape)


MOMENTS = {chunk_moments, exact_moments}


def moments_bytes(target: Any, operand: torch.Tensor) -> int:
    """What one of these holds on its way."""
    copies = 1 + (operand.dtype in HALVES) + (target is exact_moments)
    return copies * operand.numel() * (4 if operand.dtype in HALVES else operand.element_size())


def moments(*, root: bool, with_mean: bool) -> Merge:
    """var, std and their pairs with the mean."""

    def merge(call: Call, kind: Sliced, dims: set[int]) -> ChunkRule | None:
        operand = call["self"]
        correction = 1 if call["correction"] is None else call["correction"]
        if not plain_number(correction):
            return None
        first = call.results[0]
        assert first is not None
        monoid = Moments(
            num_elements=prod(operand.shape[dim] for dim in dims),
            num_samples=call.num_samples,
            correction=correction,
            root=root,
            with_mean=with_mean,
            dtype=narrow_dtype(first.dtype),
        )
        # What norms ask for needs no more: they add something to the variance.
        target = chunk_moments if with_mean and correction == 0 else exact_moments
        return ChunkRule({"self": kind}, Merged(monoid), rewrite=_uncorrected, target=target)

    return merge


def _uncorrected(arguments: dict[str, Any], num_samples: int) -> dict[str, Any]:
    names = ("self", "dim", "correction", "keepdim")
    return {**{name: arguments[name] for name in names}, "correction": 0}


_SUM = reduction(by(_sum))
_PRODUCT = reduction(by(lambda call: Product(narrow_dtype(call.result.dtype))))
_LARGEST = reduction(by(lambda call: Extreme()))
_SMALLEST = reduction(by(lambda call: Extreme(False)))
_ANY = reduction(by(lambda call: AnyTrue()))
_ALL = reduction(by(lambda call: AllTrue()))
_INSIDE = reduction(None)

ROWS: dict[Any, Rule] = {
    aten.sum.default: _SUM,
    aten.sum.dim_IntList: _SUM,
    aten.nansum.default: _SUM,
    aten.count_nonzero.default: _SUM,
    aten.count_nonzero.dim_IntList: _SUM,
    aten.mean.default: reduction(averaged, mean),
    aten.mean.dim: reduction(averaged, mean),
    aten.prod.default: _PRODUCT,
    aten.prod.dim_int: _PRODUCT,
    aten.amax.default: _LARGEST,
    aten.amin.default: _SMALLEST,
    aten.max.default: _LARGEST,
    aten.min.default: _SMALLEST,
    aten.any.default: _ANY,
    aten.any.dim: _ANY,
    aten.any.dims: _ANY,
    aten.all.default: _ALL,
    aten.all.dim: _ALL,
    aten.all.dims: _ALL,
    aten.aminmax.default: reduction(_extremes),
    aten.max.dim: reduction(first_extreme(True, with_values=True)),
    aten.min.dim: reduction(first_extreme(False, with_values=True)),
    aten.argmax.default: reduction(first_extreme(True, with_values=False)),
    aten.argmin.default: reduction(first_extreme(False, with_values=False)),
    aten.logsumexp.default: reduction(by(lambda call: LogSumExp(narrow_dtype(call.result.dtype)))),
    aten.var.correction: reduction(moments(root=False, with_mean=False)),
    aten.std.correction: reduction(moments(root=True, with_mean=False)),
    aten.var_mean.correction: reduction(moments(root=False, with_mean=True)),
    aten.std_mean.correction: reduction(moments(root=True, with_mean=True)),
    aten.linalg_vector_norm.default: reduction(by(_norm)),
    aten.norm.Scalar: reduction(by(_norm)),
    aten.norm.ScalarOpt_dim: reduction(by(_norm)),
    aten.dist.default: distance,
    aten.histc.default: histogram,
    aten.hash_tensor.default: _INSIDE,
    aten.median.dim: _INSIDE,
    aten.nanmedian.dim: _INSIDE,
    aten.mode.default: _INSIDE,
    aten.kthvalue.default: _INSIDE,
}
