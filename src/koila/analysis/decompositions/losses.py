"""Losses as pointwise operators and one reduction.

*Takes* the arguments of a loss operator or of its backward. *Gives* its results by operators that have split rules.
"""

from __future__ import annotations

import torch
from torch import Tensor

from koila.analysis.decompositions.means import mean

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2
"""The values of a loss's `reduction`."""


def reduced(value: Tensor, reduction: int) -> Tensor:
    """A loss's elements, their mean or their sum."""
    if reduction == NONE:
        return value
    return mean(value) if reduction == MEAN else aten.sum.default(value)


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
    """Eager's kernel without its reduction: it refuses what is not between 0 and 1."""
    if reduction == NONE:
        return NotImplemented
    return reduced(aten.binary_cross_entropy.default(self, target, weight, NONE), reduction)


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
