"""Rules for pointwise operators: those that torch tags, and those that lack the tag.

*Takes* calls of elementwise operators with broadcasting. *Gives* the table `ROWS` of the untagged ones and
`tagged`, which answers for the rest.
"""

from __future__ import annotations

from typing import Any

import torch

from koila._torch import OpOverload, schema_of
from koila.analysis.chunk_rule import Call, ChunkRule, Rule
from koila.analysis.rules._rows import either, elementwise, letters, pointwise

aten = torch.ops.aten


def _searched(call: Call) -> ChunkRule | None:
    """One sequence for all: a chunk of the values is searched in the whole of it."""
    return elementwise(only=("self",))(call) if call["sorted_sequence"].ndim == 1 else None


ROWS: dict[Any, Rule] = {
    aten.elu_backward.default: pointwise,
    aten.hardsigmoid_backward.default: pointwise,
    aten.hardswish.default: pointwise,
    aten.hardswish_backward.default: pointwise,
    aten.hardtanh_backward.default: pointwise,
    aten.hardshrink_backward.default: pointwise,
    aten.softshrink_backward.default: pointwise,
    aten.leaky_relu_backward.default: pointwise,
    aten.log_sigmoid_forward.default: pointwise,
    aten.log_sigmoid_backward.default: pointwise,
    aten.mish_backward.default: pointwise,
    aten.softplus_backward.default: pointwise,
    aten._prelu_kernel.default: pointwise,
    aten._prelu_kernel_backward.default: pointwise,
    aten.rsub.Tensor: pointwise,
    aten.masked_fill.Tensor: pointwise,
    aten.fill.Scalar: pointwise,
    aten.fill.Tensor: pointwise,
    aten.zero.default: pointwise,
    aten.rrelu_with_noise_backward.default: pointwise,
    aten.polar.default: pointwise,
    aten.complex.default: pointwise,
    aten.floor_divide.default: pointwise,
    aten.isin.Tensor_Tensor: elementwise(only=("elements",)),
    aten.bucketize.Tensor: elementwise(only=("self",)),
    aten.searchsorted.Tensor: either(_searched, letters("sorted_sequence=*X self=*X sorter=*X -> *X")),
    aten.zeros_like.default: pointwise,
    aten.ones_like.default: pointwise,
    aten.full_like.default: pointwise,
    aten.empty_like.default: pointwise,
}


def tagged(target: OpOverload) -> Rule | None:
    """The rule of a functional, deterministic operator that torch calls pointwise."""
    if torch.Tag.pointwise not in target.tags or torch.Tag.nondeterministic_seeded in target.tags:
        return None
    return None if schema_of(target).is_mutable else pointwise
