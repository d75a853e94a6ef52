"""Means as sums: divided once, after the merge.

*Takes* the arguments of `aten.mean`. *Gives* the same mean as a reduction that chunks can share.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from koila.analysis import prepasses
from koila.analysis.monoids import HALVES

aten = torch.ops.aten


def mean(self: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """The sum over all elements, divided once."""
    return mean_dim(self, None, False, dtype=dtype)


def mean_dim(self: Tensor, dim: list[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """The sum over some dimensions, divided once; half precision is summed and divided in float32."""
    result = self.dtype if dtype is None else dtype
    count = prod(self.shape[place] for place in prepasses.reduced_dims(dim, self.ndim)) if self.ndim else 1
    wide = torch.float32 if result in HALVES else result
    total = aten.sum.dim_IntList(self, dim, keepdim, dtype=wide)
    assert tuple(total.shape) == prepasses.mean(self.shape, dim, keepdim)[0]
    return cast(aten.div.Scalar(total, count), result)


def cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The value in that dtype; itself if it has it."""
    return value if value.dtype == dtype else aten._to_copy.default(value, dtype=dtype)
