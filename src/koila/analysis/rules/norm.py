"""Rules for normalisation inside a sample, and for batch normalisation with given statistics.

*Takes* calls of layer, group, RMS and (evaluating) batch normalisation and their backwards. *Gives* the table `ROWS`.
Training batch normalisation has no rule: it is decomposed into reductions over the batch. Those of its backward are
eager's kernel, asked for the gradients of weight and bias alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from koila.analysis.chunk_rule import Call, ChunkRule, Operand, Rule
from koila.analysis.rules._axes import Axes, Labels, follow, left
from koila.analysis.rules._rows import dense, letters
from koila.analysis.types import Sliced

aten = torch.ops.aten


def inside(first: str, *, parameters: int) -> Rule:
    """Layer and RMS norm: the last dimensions are rigid, the gradients of the parameters are sums.

    Operands and results of the rank of `first` share its leading dimensions; the last `parameters` results are the
    gradients of weight and bias.
    """

    def rule(call: Call) -> ChunkRule | None:
        ndim = call[first].ndim
        num_free = ndim - len(call["normalized_shape"])
        labels: Labels = left(ndim, set(range(num_free, ndim)))
        operands = {
            name: labels
            for name, value in call.operands().items()
            if isinstance(value, Operand) and name not in ("weight", "bias")
        }
        num_data = len(call.results) - parameters
        results = tuple(
            None if result is None else labels if index < num_data else () for index, result in enumerate(call.results)
        )
        summed = tuple(index >= num_data for index in range(len(call.results)))
        return follow(call, Axes(operands, results, summed, broadcast=False))

    return rule


def grouped(text: str) -> Rule:
    """Group norm holds the number of samples as a literal `N`."""
    plain = letters(text)

    def rule(call: Call) -> ChunkRule | None:
        ruling = plain(call)
        if ruling is None:
            return None
        kind = ruling.operands["input"]
        assert isinstance(kind, Sliced)

        def rewrite(arguments: dict[str, Any], num_samples: int) -> dict[str, Any]:
            return {**arguments, "N": kind.extent(num_samples)}

        return replace(ruling, rewrite=rewrite)

    return rule


def _evaluating(call: Call) -> bool:
    return not call["training"]


def _without_statistics(call: Call) -> bool:
    """The gradient of a training batch normalisation's input needs sums over the batch; these alone do not."""
    return not (call["train"] and call["output_mask"][0])


ROWS: dict[Any, Rule] = {
    aten.native_layer_norm.default: inside("input", parameters=0),
    aten.native_layer_norm_backward.default: dense(inside("input", parameters=2), "mean", "rstd"),
    aten._fused_rms_norm.default: inside("input", parameters=0),
    aten._fused_rms_norm_backward.default: dense(inside("input", parameters=1), "rstd"),
    aten.native_group_norm.default: dense(grouped("input=n_ -> n_ n_ n_"), "input"),
    aten.native_group_norm_backward.default: dense(
        grouped("grad_out=n_ input=n_ mean=n_ rstd=n_ -> n_ _+ _+"), "grad_out", "input", "mean", "rstd"
    ),
    aten._native_batch_norm_legit_no_training.default: letters("input=n_ -> n_ - -"),
    aten.native_batch_norm.default: letters("input=n_ -> n_ - -", when=_evaluating),
    aten.native_batch_norm_backward.default: letters("grad_out=n_ input=n_ -> n_ _+ _+", when=_without_statistics),
}
