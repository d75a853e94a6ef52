"""Decompositions for a split: operators that mix the batch, rewritten as reductions and pointwise operators.

*Takes* nothing. *Gives* a `decomposition_table` for `make_fx`: losses with their reductions, `mean`, batch
normalisation, the fused layers of transformers, and constants that only look at a tensor's shape. Everything else
keeps eager's own kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from koila._torch import OpOverload, get_decompositions
from koila.analysis.decompositions import attention, batch_norm, factories, losses, means
from koila.ir.attention import OPERATORS

__all__ = ["decompositions"]

aten = torch.ops.aten

_BORROWED = (
    aten.huber_loss.default,
    aten.huber_loss_backward.default,
    aten.mse_loss.default,
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss.default,
    aten.smooth_l1_loss_backward.default,
    aten.soft_margin_loss.default,
    aten.soft_margin_loss_backward.default,
)
"""Torch's own decompositions that are pointwise operators and one reduction."""

_NORMS_OF_DEVICES: dict[OpOverload, Callable[..., Any]] = {
    aten.cudnn_batch_norm.default: batch_norm.cudnn_batch_norm,
    aten.cudnn_batch_norm_backward.default: batch_norm.cudnn_batch_norm_backward,
    aten.miopen_batch_norm.default: batch_norm.miopen_batch_norm,
    aten.miopen_batch_norm_backward.default: batch_norm.cudnn_batch_norm_backward,
}
"""They have no form that says what it writes, so that they are taken apart also where nothing is cut."""

_ATTENTION: dict[OpOverload, Callable[..., Any]] = {
    backward: attention.backward_with_mask(backward) for backward in OPERATORS.values()
}
"""Gradients of attention that dropped some of its weights; without dropout they keep their kernels."""

_OWN: dict[OpOverload, Callable[..., Any]] = {
    aten.zeros_like.default: factories.filled_like(0),
    aten.ones_like.default: factories.filled_like(1),
    aten.full_like.default: factories.full_like,
    aten.new_zeros.default: factories.new_filled(0),
    aten.new_ones.default: factories.new_filled(1),
    aten.new_full.default: factories.new_full,
    aten.mean.default: means.mean,
    aten.mean.dim: means.mean_dim,
    aten.nll_loss_forward.default: losses.nll_loss_forward,
    aten.nll_loss_backward.default: losses.nll_loss_backward,
    aten.nll_loss2d_forward.default: losses.nll_loss_forward,
    aten.nll_loss2d_backward.default: losses.nll_loss_backward,
    aten.binary_cross_entropy.default: losses.binary_cross_entropy,
    aten.binary_cross_entropy_backward.default: losses.binary_cross_entropy_backward,
    aten.binary_cross_entropy_with_logits.default: losses.binary_cross_entropy_with_logits,
    aten._native_multi_head_attention.default: attention.native_multi_head_attention,
    aten._transformer_encoder_layer_fwd.default: attention.transformer_encoder_layer_fwd,
    aten.native_batch_norm.default: batch_norm.native_batch_norm,
    aten.native_batch_norm_backward.default: batch_norm.native_batch_norm_backward,
    aten._native_batch_norm_legit.default: batch_norm.native_batch_norm,
    aten._native_batch_norm_legit.no_stats: batch_norm.batch_norm_no_stats,
    aten._native_batch_norm_legit_no_training.default: batch_norm.batch_norm_no_training,
    aten._native_batch_norm_legit_functional.default: batch_norm.batch_norm_functional,
    aten._batch_norm_with_update.default: batch_norm.batch_norm_with_update,
    aten._batch_norm_with_update_functional.default: batch_norm.batch_norm_with_update_functional,
    aten.batch_norm_backward.default: batch_norm.batch_norm_backward,
    **_NORMS_OF_DEVICES,
    **_ATTENTION,
}


@cache
def _borrowed() -> dict[Any, Callable[..., Any]]:
    return {target: function for target, function in get_decompositions(_BORROWED).items() if target in _BORROWED}


def decompositions(whole_norms: bool = False) -> dict[OpOverload, Callable[..., Any]]:
    """The table of decompositions; a new dict each time. With `whole_norms`, batch normalisation keeps its kernels.

    >>> torch.ops.aten.nll_loss_forward.default in decompositions()
    True
    """
    table = {**_borrowed(), **_OWN}
    if whole_norms:
        table = {target: function for target, function in table.items() if "batch_norm" not in str(target)}
        table |= {aten.native_batch_norm.default: batch_norm.whole_batch_norm, **_NORMS_OF_DEVICES}
    return table
