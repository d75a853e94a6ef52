"""Strides: how a value lies in memory.

*Takes* a shape and strides. *Gives* strides in the same order, without overlaps or gaps.
"""

from __future__ import annotations

from collections.abc import Sequence


def dense_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense tensor whose dimensions lie in memory in the order of the given strides.

    >>> dense_strides((2, 3), (3, 1)), dense_strides((2, 3), (1, 8)), dense_strides((2, 3), (0, 1))
    ((3, 1), (1, 2), (1, 2))
    """
    order = sorted(range(len(shape)), key=lambda dim: (strides[dim], shape[dim]))
    found, step = [0] * len(shape), 1
    for dim in order:
        found[dim] = step
        step *= max(shape[dim], 1)
    return tuple(found)
