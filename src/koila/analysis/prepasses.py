"""Shape and batch inference of reductions, by name: what the rules of reductions ask.

*Takes* a shape, its batch and what is reduced. *Gives* the shape and the batch of the result. A rule compares the shape
with the one that fake tensors gave, so that an operator which reduces in another way runs whole instead of wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from koila.interfaces import BatchInfo

Inferred = tuple[tuple[int, ...], BatchInfo | None]


def dims_of(value: Any, ndim: int) -> set[int]:
    """Dimensions counted from the left, from an argument that is one, a list of them, or None (all)."""
    if value is None:
        return set(range(ndim))
    dims = value if isinstance(value, (tuple, list)) else (value,)
    return {dim % ndim if ndim else 0 for dim in dims}


def reduced_dims(dim: Any, ndim: int) -> set[int]:
    """The dimensions that a reduction removes; no argument, None or an empty list mean all."""
    return dims_of(None if isinstance(dim, (tuple, list)) and not dim else dim, ndim)


def reduce_dims(
    shape: Sequence[int], dim: int | Sequence[int] | None = None, keepdim: bool = False, batch: BatchInfo | None = None
) -> Inferred:
    """Shape and batch of a reduction over some dimensions.

    >>> reduce_dims((8, 3, 5), dim=1, batch=BatchInfo(0, 8))
    ((8, 5), BatchInfo(index=0, value=8))
    >>> reduce_dims((8, 3), dim=0, batch=BatchInfo(0, 8))
    ((3,), None)
    """
    gone = reduced_dims(dim, len(shape))
    if keepdim:
        kept = tuple(1 if place in gone else size for place, size in enumerate(shape))
    else:
        kept = tuple(size for place, size in enumerate(shape) if place not in gone)
    if batch is None or batch.index in gone:
        return kept, None
    before = 0 if keepdim else sum(place < batch.index for place in gone)
    return kept, batch.map(batch.index - before)


def mean(
    shape: Sequence[int], dim: int | Sequence[int] | None = None, keepdim: bool = False, batch: BatchInfo | None = None
) -> Inferred:
    """Shape and batch of a mean: those of the sum that it is made of."""
    return reduce_dims(shape, dim, keepdim, batch)
