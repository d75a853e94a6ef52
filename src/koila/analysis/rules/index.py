"""Rules for operators that read or write by index: gather, scatter, embeddings, advanced indexing.

*Takes* calls with index operands. *Gives* the table `ROWS`. The indexed dimension is rigid; an index that holds the
batch reads a Whole source, and what is added up by such an index is Merged(Sum).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from koila.analysis.chunk_rule import Call, ChunkRule, Operand, Rule
from koila.analysis.prepasses import dims_of
from koila.analysis.rules._axes import Axes, Label, Labels, follow, left, right
from koila.analysis.rules._rows import along, inexact, letters
from koila.analysis.types import Merged

aten = torch.ops.aten


def picked(call: Call) -> ChunkRule | None:
    """index_select: the index's only dimension takes the place of the indexed one."""
    ndim = call["self"].ndim
    if ndim == 0:
        return None
    dim = call["dim"] % ndim
    labels = left(ndim, {dim})
    result = tuple("index" if place == dim else label for place, label in enumerate(labels))
    index = ("index",) * call["index"].ndim
    return follow(call, Axes({"self": labels, "index": index}, (result,), broadcast=False))


def _advanced(call: Call) -> tuple[Labels, tuple[Labels, ...], Labels] | None:
    """Labels of the source, of each index and of the places they name together; None if any index is a mask."""
    source, indices = call["self"], call["indices"]
    given = [item for item in indices if isinstance(item, Operand)]
    if any(item.dtype in (torch.bool, torch.uint8) for item in given):
        return None
    indexed = [dim for dim, item in enumerate(indices) if item is not None]
    labels = left(source.ndim, set(indexed))
    common: Labels = tuple(("index", place) for place in right(max((item.ndim for item in given), default=0)))
    together = indexed == list(range(indexed[0], indexed[0] + len(indexed))) if indexed else True
    first = indexed[0] if indexed and together else 0
    rest = [label for dim, label in enumerate(labels) if dim not in indexed]
    places = (*rest[:first], *common, *rest[first:])
    each = tuple(common[len(common) - item.ndim :] if isinstance(item, Operand) else () for item in indices)
    return labels, each, places


def indexed(call: Call) -> ChunkRule | None:
    """x[i, :, j]: a dimension that is not indexed, or the index itself, may hold the batch."""
    found = _advanced(call)
    if found is None:
        return None
    labels, each, places = found
    return follow(call, Axes({"self": labels, "indices": each}, (places,), broadcast=True))


def put(call: Call) -> ChunkRule | None:
    """x[i] = v, x[i] += v: what is added by an index that holds the batch is a sum over the batch."""
    found = _advanced(call)
    if found is None:
        return None
    labels, each, places = found
    values = places[len(places) - call["values"].ndim :]
    axes = Axes({"self": labels, "indices": each, "values": values}, (labels,), (bool(call["accumulate"]),))
    return _share_self(call, follow(call, axes), shared_index_put)


def added(call: Call) -> ChunkRule | None:
    """index_add: by another dimension, or by an index that holds the batch."""
    ndim = call["self"].ndim
    if ndim == 0 or call["source"].ndim != ndim:
        return None
    dim = call["dim"] % ndim
    labels = left(ndim, {dim})
    source = tuple("index" if place == dim else label for place, label in enumerate(labels))
    operands = {"self": labels, "index": ("index",), "source": source}
    return _share_self(call, follow(call, Axes(operands, (labels,), (True,), broadcast=False)), shared_index_add)


def scatter_added(call: Call) -> ChunkRule | None:
    """scatter_add: by another dimension, or the batch itself is scattered away."""
    ndim = call["self"].ndim
    if ndim == 0 or call["index"].shape != call["src"].shape:
        return along("dim")(call)
    dim = call["dim"] % ndim
    labels = left(ndim, {dim})
    source = tuple("index" if place == dim else label for place, label in enumerate(labels))
    operands = {"self": labels, "index": source, "src": source}
    return _share_self(call, follow(call, Axes(operands, (labels,), (True,), broadcast=False)), shared_scatter_add)


def _share_self(call: Call, ruling: ChunkRule | None, target: Any) -> ChunkRule | None:
    """A merge takes what is added to in shares, by number of samples, so that it counts once."""
    if ruling is None or not isinstance(ruling.result, Merged):
        return ruling
    if not inexact(call.result.dtype):
        return None
    total = call.num_samples

    def rewrite(arguments: dict[str, Any], num_samples: int) -> dict[str, Any]:
        return {**arguments, "share": num_samples / total}

    return replace(ruling, rewrite=rewrite, target=target)


def shared_index_put(self: Any, indices: Any, values: Any, accumulate: bool, share: float) -> Any:
    """`index_put` that adds to a share of `self`."""
    return aten.index_put.default(aten.mul.Scalar(self, share), indices, values, accumulate)


def shared_index_add(self: Any, dim: int, index: Any, source: Any, alpha: Any, share: float) -> Any:
    """`index_add` that adds to a share of `self`."""
    return aten.index_add.default(aten.mul.Scalar(self, share), dim, index, source, alpha=alpha)


def shared_scatter_add(self: Any, dim: int, index: Any, src: Any, share: float) -> Any:
    """`scatter_add` that adds to a share of `self`."""
    return aten.scatter_add.default(aten.mul.Scalar(self, share), dim, index, src)


def embedded(call: Call) -> ChunkRule | None:
    """embedding: the rows of a Whole table."""
    indices = right(call["indices"].ndim)
    return follow(call, Axes({"weight": (None, "row"), "indices": indices}, ((*indices, "row"),), broadcast=False))


def embedded_backward(call: Call) -> ChunkRule | None:
    """The table's gradient adds up over every index; scaling by frequency would need the whole batch's counts."""
    if call["scale_grad_by_freq"]:
        return None
    indices = right(call["indices"].ndim)
    operands = {"grad_output": (*indices, "row"), "indices": indices}
    return follow(call, Axes(operands, ((None, "row"),), (True,), broadcast=False))


def bagged(call: Call) -> ChunkRule | None:
    """_embedding_bag: the columns of the table are independent; bags of any length hold no batch."""
    results = ((None, "column"), None, None, (None, "column") if call["mode"] == 2 else None)
    return follow(call, Axes({"weight": (None, "column")}, results, broadcast=False))


def bagged_backward(call: Call) -> ChunkRule | None:
    """The table's gradient, column by column."""
    if call["sparse"]:
        return None
    labels = {"grad": (None, "column"), "maximum_indices": (None, "column") if call["mode"] == 2 else ()}
    return follow(call, Axes(labels, ((None, "column"),), broadcast=False))


def placed(grad: str, *, drop: bool) -> Rule:
    """slice_backward, select_backward: a gradient put into zeros of `input_sizes`."""

    def rule(call: Call) -> ChunkRule | None:
        ndim = call.result.ndim
        labels = left(ndim, dims_of(call["dim"], ndim))
        source = tuple(label for label in labels if label is not None) if drop else labels
        return follow(call, Axes({grad: source}, (labels,), broadcast=False, sizes=("input_sizes",)))

    return rule


def slice_placed(call: Call) -> ChunkRule | None:
    """slice_backward: of another dimension, or of a slice that took everything."""
    ndim = call.result.ndim
    dim = call["dim"] % ndim
    everything = call["grad_output"].shape[dim] == call.result.shape[dim] and call["step"] == 1
    labels = left(ndim) if everything else left(ndim, {dim})
    axes = Axes({"grad_output": labels}, (labels,), broadcast=False, sizes=("input_sizes",))
    return follow(call, axes)


def overwritten(*, drop: bool, dims: tuple[str, ...] = ("dim",)) -> Rule:
    """slice_scatter, select_scatter, diagonal_scatter: `src` written into a part of `self`."""

    def rule(call: Call) -> ChunkRule | None:
        ndim = call["self"].ndim
        labels = left(ndim, dims_of(tuple(call[dim] for dim in dims), ndim))
        source: tuple[Label, ...] = labels
        if drop:
            source = (*(label for label in labels if label is not None), *(None for _ in dims[1:]))
        return follow(call, Axes({"self": labels, "src": source}, (labels,), broadcast=False))

    return rule


def diagonal_placed(call: Call) -> ChunkRule | None:
    """diagonal_backward: a diagonal put into zeros."""
    ndim = call.result.ndim
    labels = left(ndim, dims_of((call["dim1"], call["dim2"]), ndim))
    source = (*(label for label in labels if label is not None), None)
    axes = Axes({"grad_output": source}, (labels,), broadcast=False, sizes=("input_sizes",))
    return follow(call, axes)


def windows_placed(call: Call) -> ChunkRule | None:
    """unfold_backward: windows added back into zeros."""
    ndim = call.result.ndim
    labels = left(ndim, dims_of(call["dim"], ndim))
    return follow(call, Axes({"grad_in": (*labels, None)}, (labels,), broadcast=False, sizes=("input_sizes",)))


ROWS: dict[Any, Rule] = {
    aten.gather.default: along("dim"),
    aten.scatter.src: along("dim"),
    aten.scatter.value: along("dim"),
    aten.scatter.reduce: along("dim"),
    aten.scatter.value_reduce: along("dim"),
    aten.scatter_add.default: scatter_added,
    aten.scatter_reduce.two: along("dim"),
    aten.index_select.default: picked,
    aten.index_add.default: added,
    aten.index_copy.default: along("dim"),
    aten.index_fill.int_Scalar: along("dim"),
    aten.index_fill.int_Tensor: along("dim"),
    aten.index_reduce.default: along("dim"),
    aten.index.Tensor: indexed,
    aten._unsafe_index.Tensor: indexed,
    aten.index_put.default: put,
    aten._unsafe_index_put.default: put,
    aten.take.default: letters("self=_ index=* -> *"),
    aten.embedding.default: embedded,
    aten.embedding_dense_backward.default: embedded_backward,
    aten._embedding_bag.default: bagged,
    aten._embedding_bag_forward_only.default: bagged,
    aten._embedding_bag_backward.default: bagged_backward,
    aten._embedding_bag_per_sample_weights_backward.default: letters("grad=Xc weight=Xc -> X+"),
    aten.slice_backward.default: slice_placed,
    aten.select_backward.default: placed("grad_output", drop=True),
    aten.diagonal_backward.default: diagonal_placed,
    aten.unfold_backward.default: windows_placed,
    aten.slice_scatter.default: overwritten(drop=False),
    aten.select_scatter.default: overwritten(drop=True),
    aten.diagonal_scatter.default: overwritten(drop=True, dims=("dim1", "dim2")),
}
