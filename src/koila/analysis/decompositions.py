"""Decompositions for a split: operators that mix the batch, rewritten as reductions and pointwise operators.

*Takes* nothing. *Gives* a `decomposition_table` for `make_fx`: losses with their reductions, `mean`, and batch
normalisation in training. Only what must be cut is here; everything else keeps eager's own kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch._ops import OpOverload

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2
"""The values of a loss's `reduction`."""

_HALVES = (torch.float16, torch.bfloat16)

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


def decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """The table of decompositions; a new dict each time.

    >>> torch.ops.aten.nll_loss_forward.default in decompositions()
    True
    """
    return {**get_decompositions(_BORROWED), **_OWN}


# Means


def mean(self: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """The sum over all elements, divided once."""
    return mean_dim(self, None, False, dtype=dtype)


def mean_dim(self: Tensor, dim: list[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """The sum over some dimensions, divided once; half precision is summed and divided in float32."""
    result = self.dtype if dtype is None else dtype
    dims = range(self.ndim) if not dim else dim
    count = prod(self.shape[place] for place in dims) if self.ndim else 1
    wide = torch.float32 if result in _HALVES else result
    total = aten.sum.dim_IntList(self, dim, keepdim, dtype=wide)
    return _cast(aten.div.Scalar(total, count), result)


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value if value.dtype == dtype else aten._to_copy.default(value, dtype=dtype)


def reduced(value: Tensor, reduction: int) -> Tensor:
    """A loss's elements, their mean or their sum."""
    if reduction == NONE:
        return value
    return mean(value) if reduction == MEAN else aten.sum.default(value)


# Factories that take a tensor for its shape only


def _filled(
    like: Tensor, size: Sequence[int], value: Any, dtype: Any, layout: Any, device: Any, pin_memory: Any
) -> Tensor:
    return aten.full.default(
        list(size),
        value,
        dtype=like.dtype if dtype is None else dtype,
        layout=like.layout if layout is None else layout,
        device=like.device if device is None else device,
        pin_memory=pin_memory,
    )


def filled_like(value: Any) -> Callable[..., Tensor]:
    """zeros_like, ones_like: a constant of the same shape, which no longer depends on the tensor."""

    def decomposition(
        self: Tensor,
        *,
        dtype: Any = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: Any = None,
        memory_format: Any = None,
    ) -> Tensor:
        return _filled(self, self.shape, value, dtype, layout, device, pin_memory)

    return decomposition


def full_like(
    self: Tensor,
    fill_value: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Tensor:
    """A constant of the same shape."""
    return _filled(self, self.shape, fill_value, dtype, layout, device, pin_memory)


def new_filled(value: Any) -> Callable[..., Tensor]:
    """new_zeros, new_ones: a constant of a given size."""

    def decomposition(
        self: Tensor, size: Sequence[int], *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
    ) -> Tensor:
        return _filled(self, size, value, dtype, layout, device, pin_memory)

    return decomposition


def new_full(
    self: Tensor,
    size: Sequence[int],
    fill_value: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Tensor:
    """A constant of a given size."""
    return _filled(self, size, fill_value, dtype, layout, device, pin_memory)


# Losses


def nll_loss_forward(
    self: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Minus the weighted log-probability of each target, and the weight that a mean divides by."""
    dim, kept, safe = _targets(self, target, ignore_index)
    chosen = aten.squeeze.dim(aten.gather.default(self, dim, aten.unsqueeze.default(safe, dim)), dim)
    weights = _target_weights(self, weight, kept, safe)
    zero = aten.full.default([], 0.0, dtype=self.dtype, device=self.device)
    losses = aten.where.self(kept, aten.neg.default(chosen * weights), zero)
    if reduction == NONE:
        return losses, zero
    total_weight = aten.sum.default(weights)
    total = aten.sum.default(losses)
    return (total / total_weight if reduction == MEAN else total), total_weight


def nll_loss_backward(
    grad_output: Tensor,
    self: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    """Minus the weight at each target, scaled; an ignored target has no gradient even when all are ignored."""
    dim, kept, safe = _targets(self, target, ignore_index)
    scale = grad_output / total_weight if reduction == MEAN else grad_output
    zero = aten.full.default([], 0.0, dtype=self.dtype, device=self.device)
    values = aten.neg.default(scale * _target_weights(self, weight, kept, safe))
    values = aten.where.self(kept, values, zero)
    place = aten.unsqueeze.default(safe, dim)
    return aten.scatter.src(aten.zeros_like.default(self), dim, place, aten.unsqueeze.default(values, dim))


def _targets(self: Tensor, target: Tensor, ignore_index: int) -> tuple[int, Tensor, Tensor]:
    """The dimension of the classes, which targets count, and targets that are safe to index with."""
    kept = aten.ne.Scalar(target, ignore_index)
    return (1 if self.ndim > 1 else 0), kept, aten.mul.Tensor(target, kept)


def _target_weights(self: Tensor, weight: Tensor | None, kept: Tensor, safe: Tensor) -> Tensor:
    """The weight of each target's class, zero where ignored."""
    counted = aten._to_copy.default(kept, dtype=self.dtype)
    return counted if weight is None else aten.index.Tensor(weight, [safe]) * counted


def binary_cross_entropy(self: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = MEAN) -> Tensor:
    """Logarithms are cut off at -100, as in eager."""
    there = aten.clamp_min.default(aten.log.default(self), -100)
    absent = aten.clamp_min.default(aten.log1p.default(aten.neg.default(self)), -100)
    losses = (target - 1) * absent - target * there
    return reduced(losses if weight is None else losses * weight, reduction)


def binary_cross_entropy_backward(
    grad_output: Tensor, self: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = MEAN
) -> Tensor:
    """The denominator is cut off at 1e-12, as in eager."""
    grad = grad_output * (self - target) / aten.clamp_min.default((1 - self) * self, 1e-12)
    grad = grad if weight is None else grad * weight
    return grad / self.numel() if reduction == MEAN else grad


def binary_cross_entropy_with_logits(
    self: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: int = MEAN,
) -> Tensor:
    """The formula of eager: `(1 - y) x - log(sigmoid(x)) (1 + (p - 1) y)`."""
    log_sigmoid = aten.log_sigmoid_forward.default(self)[0]
    if pos_weight is not None:
        log_sigmoid = ((pos_weight - 1) * target + 1) * log_sigmoid
    losses = (1 - target) * self - log_sigmoid
    return reduced(losses if weight is None else losses * weight, reduction)


# Batch normalisation


def _per_channel(value: Tensor, ndim: int) -> Tensor:
    return aten.view.default(value, [1, -1, *[1] * (ndim - 2)])


def _normalised(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
) -> Tensor:
    """`(x - mean) * invstd * weight + bias`, in the statistics' dtype, returned in the input's."""
    scale = invstd if weight is None else invstd * weight
    result = (input - _per_channel(mean, input.ndim)) * _per_channel(scale, input.ndim)
    return _cast(result if bias is None else result + _per_channel(bias, input.ndim), input.dtype)


def _statistics(input: Tensor) -> tuple[Tensor, Tensor, int]:
    """Biased variance and mean of each channel over all else, and how many elements they are made of."""
    wide = _cast(input, torch.float32) if input.dtype in _HALVES else input
    dims = [0, *range(2, input.ndim)]
    variance, mean = aten.var_mean.correction(wide, dims, correction=0)
    return variance, mean, input.numel() // max(1, input.shape[1])


def _moved(running: Tensor, value: Tensor, momentum: float) -> Tensor:
    return _cast(value * momentum + running * (1 - momentum), running.dtype)


def _trained(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Output, saved mean and inverse deviation, and the running statistics after this batch."""
    variance, mean, count = _statistics(input)
    invstd = aten.rsqrt.default(variance + eps)
    output = _normalised(input, weight, bias, mean, invstd)
    unbiased = variance * count / (count - 1) if count > 1 else variance * float("nan")
    new_mean = None if running_mean is None else _moved(running_mean, mean, momentum)
    new_var = None if running_var is None else _moved(running_var, unbiased, momentum)
    kept = weight.dtype if weight is not None else input.dtype
    return output, _cast(mean, kept), _cast(invstd, kept), new_mean, new_var


def _evaluated(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Output with the running statistics; nothing is saved."""
    output = _normalised(input, weight, bias, mean, aten.rsqrt.default(variance + eps))
    nothing = aten.full.default([0], 0.0, dtype=input.dtype, device=input.device)
    return output, nothing, nothing


def native_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Batch normalisation that writes its running statistics in training, though its schema does not say so."""
    if not training:
        assert running_mean is not None and running_var is not None
        return _evaluated(input, weight, bias, running_mean, running_var, eps)
    output, mean, invstd, new_mean, new_var = _trained(
        input, weight, bias, running_mean, running_var, momentum, eps
    )
    if running_mean is not None and new_mean is not None:
        running_mean.copy_(new_mean)
    if running_var is not None and new_var is not None:
        running_var.copy_(new_var)
    return output, mean, invstd


def batch_norm_no_stats(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Batch normalisation without running statistics: always by the batch."""
    return _trained(input, weight, bias, None, None, momentum, eps)[:3]


def batch_norm_no_training(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Batch normalisation with given statistics."""
    return _evaluated(input, weight, bias, running_mean, running_var, eps)


def batch_norm_functional(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Batch normalisation that returns its new running statistics."""
    if not training:
        return *_evaluated(input, weight, bias, running_mean, running_var, eps), running_mean, running_var
    output, mean, invstd, new_mean, new_var = _trained(input, weight, bias, running_mean, running_var, momentum, eps)
    assert new_mean is not None and new_var is not None
    return output, mean, invstd, new_mean, new_var


def batch_norm_with_update(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training batch normalisation with a reserve that is empty here."""
    results = native_batch_norm(input, weight, bias, running_mean, running_var, True, momentum, eps)
    return *results, _reserve(input)


def batch_norm_with_update_functional(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Training batch normalisation that returns its new running statistics after an empty reserve."""
    output, mean, invstd, new_mean, new_var = batch_norm_functional(
        input, weight, bias, running_mean, running_var, True, momentum, eps
    )
    return output, mean, invstd, _reserve(input), new_mean, new_var


def _reserve(input: Tensor) -> Tensor:
    return aten.full.default([0], 0, dtype=torch.uint8, device=input.device)


def native_batch_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_invstd: Tensor | None,
    train: bool,
    eps: float,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Two sums over the batch (of the gradient, and of the gradient times the centred input), then pointwise."""
    if train:
        assert save_mean is not None and save_invstd is not None
        mean, invstd = save_mean, save_invstd
    else:
        assert running_mean is not None and running_var is not None
        mean, invstd = running_mean, aten.rsqrt.default(running_var + eps)
    wide = torch.float32 if input.dtype in _HALVES else input.dtype
    grad, mean, invstd = _cast(grad_out, wide), _cast(mean, wide), _cast(invstd, wide)
    centred = _cast(input, wide) - _per_channel(mean, input.ndim)
    dims, count = [0, *range(2, input.ndim)], input.numel() // max(1, input.shape[1])
    total = aten.sum.dim_IntList(grad, dims)
    product = aten.sum.dim_IntList(grad * centred, dims)
    scale = invstd if weight is None else invstd * weight
    grad_input = grad
    if train:
        slope = product * invstd * invstd / count
        grad_input = grad - _per_channel(total / count, input.ndim) - centred * _per_channel(slope, input.ndim)
    kept = weight.dtype if weight is not None else input.dtype
    return (
        _cast(grad_input * _per_channel(scale, input.ndim), input.dtype) if output_mask[0] else None,
        _cast(product * invstd, kept) if output_mask[1] else None,
        _cast(total, kept) if output_mask[2] else None,
    )


def batch_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    weight: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_var: Tensor | None,
    update: bool,
    eps: float,
    output_mask: list[bool],
    reserve: Tensor,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The same backward; what it calls `save_var` is the inverse deviation."""
    return native_batch_norm_backward(
        grad_out, input, weight, running_mean, running_var, save_mean, save_var, update, eps, output_mask
    )


_OWN: dict[OpOverload, Callable[..., Any]] = {
    aten.zeros_like.default: filled_like(0),
    aten.ones_like.default: filled_like(1),
    aten.full_like.default: full_like,
    aten.new_zeros.default: new_filled(0),
    aten.new_ones.default: new_filled(1),
    aten.new_full.default: new_full,
    aten.mean.default: mean,
    aten.mean.dim: mean_dim,
    aten.nll_loss_forward.default: nll_loss_forward,
    aten.nll_loss_backward.default: nll_loss_backward,
    aten.nll_loss2d_forward.default: nll_loss_forward,
    aten.nll_loss2d_backward.default: nll_loss_backward,
    aten.binary_cross_entropy.default: binary_cross_entropy,
    aten.binary_cross_entropy_backward.default: binary_cross_entropy_backward,
    aten.binary_cross_entropy_with_logits.default: binary_cross_entropy_with_logits,
    aten.native_batch_norm.default: native_batch_norm,
    aten.native_batch_norm_backward.default: native_batch_norm_backward,
    aten._native_batch_norm_legit.default: native_batch_norm,
    aten._native_batch_norm_legit.no_stats: batch_norm_no_stats,
    aten._native_batch_norm_legit_no_training.default: batch_norm_no_training,
    aten._native_batch_norm_legit_functional.default: batch_norm_functional,
    aten._batch_norm_with_update.default: batch_norm_with_update,
    aten._batch_norm_with_update_functional.default: batch_norm_with_update_functional,
    aten.batch_norm_backward.default: batch_norm_backward,
}
