"""Rules for views and other moves of elements: reshaping, permuting, slicing, joining.

*Takes* calls of shape operators. *Gives* the table `ROWS`.

A reshape is decided by factorisation. Around the batch the elements are ordered `[before][positions][after]`; the
output dimension k whose prefix product divides `before` and whose suffix product divides `after` holds the batch. If
the batch itself is divided (`view(B // 2, 2)`), the dimension holds granules of it.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd, prod
from typing import Any

import torch

from koila.analysis.chunk_rule import Call, ChunkRule, Rule, sliced
from koila.analysis.prepasses import dims_of
from koila.analysis.rules._axes import Axes, Labels, follow, left, right
from koila.analysis.rules._rows import along, elementwise, pointwise
from koila.analysis.types import Sliced

aten = torch.ops.aten


def factored(shape: tuple[int, ...], kind: Sliced, into: tuple[int, ...], num_samples: int) -> Sliced | None:
    """Where the batch of a value of `shape` lies after a reshape.

    >>> factored((4, 6, 5), Sliced(1), (24, 5), 6)
    Sliced(dim=0, outer=4, inner=1, granule=1)
    """
    if prod(into) == 0:
        return None
    before = prod(shape[: kind.dim]) * kind.outer
    after = prod(shape[kind.dim + 1 :]) * kind.inner
    positions = num_samples // kind.granule
    for dim, size in enumerate(into):
        prefix, suffix = prod(into[:dim]), prod(into[dim + 1 :])
        if size == 1 or before % prefix:
            continue
        if after % suffix == 0 and size == before // prefix * positions * (after // suffix):
            return _simplest(dim, before // prefix, after // suffix, kind.granule)
        if suffix % after == 0 and positions % (suffix // after) == 0:
            granule = kind.granule * (suffix // after)
            if granule < num_samples and size == before // prefix * (num_samples // granule):
                return Sliced(dim, before // prefix, 1, granule)
    return None


def _simplest(dim: int, outer: int, inner: int, granule: int) -> Sliced:
    """Granules that lie side by side in one dimension are samples again."""
    common = gcd(inner, granule)
    return Sliced(dim, outer, inner // common, granule // common)


def reshaped(call: Call) -> ChunkRule | None:
    """view, reshape, _unsafe_view: a chunk is reshaped to what the result's type says."""
    operand, whole = call["self"], call.result.shape
    kind = factored(operand.shape, operand.type, whole, call.num_samples)
    if kind is None:
        return None

    def rewrite(arguments: dict[str, Any], num_samples: int) -> dict[str, Any]:
        return {"self": arguments["self"], "shape": list(kind.shape(whole, num_samples))}

    return ChunkRule({"self": operand.type}, kind, rewrite=rewrite, target=aten.reshape.default)


def moved(places: Callable[[Call], Labels]) -> Rule:
    """The result's dimensions are the operand's, in another order: `places` says which one stands where."""

    def rule(call: Call) -> ChunkRule | None:
        return follow(call, Axes({"self": left(call["self"].ndim)}, (places(call),), broadcast=False))

    return rule


def _swapped(call: Call) -> Labels:
    labels = list(left(call["self"].ndim))
    first, second = call["dim0"] % len(labels), call["dim1"] % len(labels)
    labels[first], labels[second] = labels[second], labels[first]
    return tuple(labels)


def _unsqueezed(call: Call) -> Labels:
    labels: list[Any] = list(left(call["self"].ndim))
    labels.insert(call["dim"] % (len(labels) + 1), None)
    return tuple(labels)


def _permuted(call: Call) -> Labels:
    return tuple(dim % call["self"].ndim for dim in call["dims"])


def squeezed(call: Call) -> ChunkRule | None:
    """Which dimensions vanish is decided by the whole shape: a chunk of one must keep its batch dimension."""
    operand = call["self"]
    named = dims_of(call.arguments.get("dim"), operand.ndim)
    gone = [dim for dim in sorted(named) if operand.shape[dim] == 1]
    kept = tuple(dim for dim in range(operand.ndim) if dim not in gone)
    ruling = follow(call, Axes({"self": left(operand.ndim)}, (kept,), broadcast=False))
    if ruling is None:
        return None

    def rewrite(arguments: dict[str, Any], num_samples: int) -> dict[str, Any]:
        return {"self": arguments["self"], "dim": gone}

    return ChunkRule(ruling.operands, ruling.result, rewrite=rewrite, target=aten.squeeze.dims)


def expanded(call: Call) -> ChunkRule | None:
    """A dimension that is not expanded may hold the batch."""
    labels = right(call["self"].ndim)
    return follow(call, Axes({"self": labels}, (right(call.result.ndim),), broadcast=False, sizes=("size",)))


def repeated(call: Call) -> ChunkRule | None:
    """Repeating the batch puts copies of it side by side: an outer factor."""
    kind, added = call["self"].type, call.result.ndim - call["self"].ndim
    dim = kind.dim + added
    if call["repeats"][dim] == 0:
        return None
    return ChunkRule({"self": kind}, Sliced(dim, kind.outer * call["repeats"][dim], kind.inner, kind.granule))


def _span(call: Call, size: int) -> tuple[int, int]:
    """First and last place that a slice covers, counted from the left."""
    start, stop, _ = slice(call["start"], call["end"], 1).indices(size)
    return start, max(start, stop)


def cut(call: Call) -> ChunkRule | None:
    """slice: of another dimension, of everything, or of whole blocks outside the batch."""
    operand = call["self"]
    kind, dim = operand.type, call["dim"] % operand.ndim
    if kind.dim != dim:
        return ChunkRule({"self": kind}, kind)
    start, stop = _span(call, operand.shape[dim])
    block = kind.extent(call.num_samples) // kind.outer
    if call["step"] != 1 or start % block or stop % block or stop == start:
        return None
    taken = Sliced(dim, (stop - start) // block, kind.inner, kind.granule)

    def rewrite(arguments: dict[str, Any], num_samples: int) -> dict[str, Any]:
        chunk_block = kind.extent(num_samples) // kind.outer
        return {**arguments, "start": start // block * chunk_block, "end": stop // block * chunk_block}

    return ChunkRule({"self": kind}, taken, rewrite=rewrite)


def without(dim: str = "dim", *, keep: bool = False) -> Rule:
    """Every result lacks the dimension that the argument names (or has it, rigid)."""

    def rule(call: Call) -> ChunkRule | None:
        ndim = call["self"].ndim
        gone = dims_of(call[dim], ndim)
        labels = right(ndim, gone)
        result = labels if keep else tuple(label for label in labels if label is not None)
        return follow(call, Axes({"self": labels}, tuple(result for _ in call.results), broadcast=False))

    return rule


def joined(call: Call) -> ChunkRule | None:
    """cat: along another dimension, or of batches side by side."""
    ndim = call.result.ndim
    dim = call["dim"] % ndim if ndim else 0
    legacy = [item.shape == (0,) and ndim != 1 for item in call["tensors"]]
    labels = tuple(() if skipped else right(ndim, {dim}) for skipped in legacy)
    ruling = follow(call, Axes({"tensors": labels}, (right(ndim, {dim}),), broadcast=False))
    return ruling if ruling is not None or any(legacy) else _side_by_side(call, dim)


def _side_by_side(call: Call, dim: int) -> ChunkRule | None:
    kinds = [item.type for item in call["tensors"] if isinstance(item.type, Sliced)]
    inner, granule = kinds[0].inner, kinds[0].granule
    block = call.num_samples // granule * inner
    needs = []
    for item in call["tensors"]:
        need = Sliced(dim, item.shape[dim] // block, inner, granule)
        if item.shape[dim] % block or need.outer == 0 or (isinstance(item.type, Sliced) and item.type != need):
            return None
        needs.append(need)
    return ChunkRule({"tensors": tuple(needs)}, Sliced(dim, sum(need.outer for need in needs), inner, granule))


def stacked(call: Call) -> ChunkRule | None:
    """stack: the new dimension is rigid."""
    ndim = call.result.ndim
    place = call["dim"] % ndim
    result = [*left(ndim - 1)]
    result.insert(place, None)
    labels = tuple(left(ndim - 1) for _ in call["tensors"])
    return follow(call, Axes({"tensors": labels}, (tuple(result),), broadcast=False))


def diagonal(call: Call) -> ChunkRule | None:
    """Two dimensions become one, at the end."""
    ndim = call["self"].ndim
    labels = left(ndim, dims_of((call["dim1"], call["dim2"]), ndim))
    result = (*(label for label in labels if label is not None), None)
    return follow(call, Axes({"self": labels}, (result,), broadcast=False))


def unfolded(call: Call) -> ChunkRule | None:
    """The windows of one dimension; their elements are a new last one."""
    ndim = call["self"].ndim
    labels = left(ndim, dims_of(call["dimension"], ndim))
    return follow(call, Axes({"self": labels}, ((*labels, None),), broadcast=False))


def bitcast(call: Call) -> ChunkRule | None:
    """view.dtype: the last dimension's size may change."""
    ndim = call["self"].ndim
    labels = right(ndim, set() if call["self"].shape == call.result.shape else {ndim - 1})
    return follow(call, Axes({"self": labels}, (labels,), broadcast=False))


def _pair_at_end(call: Call) -> ChunkRule | None:
    """view_as_real and view_as_complex: one more or one less rigid dimension at the end."""
    from_labels, to_labels = (
        tuple(dim if dim < min(call["self"].ndim, call.result.ndim) else None for dim in range(ndim))
        for ndim in (call["self"].ndim, call.result.ndim)
    )
    return follow(call, Axes({"self": from_labels}, (to_labels,), broadcast=False))


def only_self(rule: Rule) -> Rule:
    """A rule that reads the type of `self` alone."""

    def guarded(call: Call) -> ChunkRule | None:
        return rule(call) if sliced(call["self"]) is not None else None

    return guarded


ROWS: dict[Any, Rule] = {
    aten.view.default: only_self(reshaped),
    aten._unsafe_view.default: only_self(reshaped),
    aten.reshape.default: only_self(reshaped),
    aten.view_copy.default: only_self(reshaped),
    aten._reshape_alias.default: only_self(reshaped),
    aten.view.dtype: bitcast,
    aten.view_as_real.default: _pair_at_end,
    aten.view_as_complex.default: _pair_at_end,
    aten.permute.default: moved(_permuted),
    aten.permute_copy.default: moved(_permuted),
    aten.transpose.int: moved(_swapped),
    aten.transpose_copy.int: moved(_swapped),
    aten.t.default: moved(lambda call: tuple(reversed(left(call["self"].ndim)))),
    aten.t_copy.default: moved(lambda call: tuple(reversed(left(call["self"].ndim)))),
    aten.unsqueeze.default: moved(_unsqueezed),
    aten.unsqueeze_copy.default: moved(_unsqueezed),
    aten.squeeze.default: only_self(squeezed),
    aten.squeeze.dim: only_self(squeezed),
    aten.squeeze.dims: only_self(squeezed),
    aten.squeeze_copy.default: only_self(squeezed),
    aten.squeeze_copy.dim: only_self(squeezed),
    aten.squeeze_copy.dims: only_self(squeezed),
    aten.expand.default: expanded,
    aten.expand_copy.default: expanded,
    aten.repeat.default: only_self(repeated),
    aten.slice.Tensor: only_self(cut),
    aten.slice_copy.Tensor: only_self(cut),
    aten.select.int: without(),
    aten.select_copy.int: without(),
    aten.unbind.int: without(),
    aten.unbind_copy.int: without(),
    aten.split.Tensor: without(keep=True),
    aten.split_with_sizes.default: without(keep=True),
    aten.split_with_sizes_copy.default: without(keep=True),
    aten.unsafe_split.Tensor: without(keep=True),
    aten.unsafe_split_with_sizes.default: without(keep=True),
    aten.narrow_copy.default: without(keep=True),
    aten.cat.default: joined,
    aten.stack.default: stacked,
    aten.diagonal.default: diagonal,
    aten.diagonal_copy.default: diagonal,
    aten.unfold.default: unfolded,
    aten.unfold_copy.default: unfolded,
    aten.flip.default: along("dims"),
    aten.roll.default: along("dims", when=lambda call: len(call["dims"]) > 0),
    aten.rot90.default: along("dims"),
    aten.alias.default: pointwise,
    aten.alias_copy.default: pointwise,
    aten.detach.default: pointwise,
    aten.lift_fresh.default: pointwise,
    aten.lift_fresh_copy.default: pointwise,
    aten.clone.default: pointwise,
    aten._to_copy.default: pointwise,
    aten._conj.default: pointwise,
    aten._conj_copy.default: pointwise,
    aten._neg_view.default: pointwise,
    aten._neg_view_copy.default: pointwise,
    aten.copy.default: elementwise(),
}
