"""Decompositions against eager's kernels in float64: values, gradients and running statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx

from koila.analysis.decompositions import decompositions

aten = torch.ops.aten
REDUCTIONS = ["none", "mean", "sum"]


def real(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def check(function: Callable[..., Any], *inputs: Tensor) -> set[OpOverload]:
    """Trace with the decompositions, compare with eager, return the operators that were traced."""
    traced = make_fx(function, decomposition_table=decompositions())(*(value.clone() for value in inputs))
    got, want = traced(*(value.clone() for value in inputs)), function(*(value.clone() for value in inputs))
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12, equal_nan=True)
    used = {node.target for node in traced.graph.nodes if isinstance(node.target, OpOverload)}
    # The loss without its reduction stays: its kernel refuses what is no probability. So does the kernel of batch
    # normalisation's backward, for sums over the batch or where it needs none.
    left = {aten.binary_cross_entropy.default, aten.native_batch_norm_backward.default}
    assert used & set(decompositions()) <= left
    for node in traced.graph.find_nodes(op="call_function", target=aten.native_batch_norm_backward.default):
        *_, training, _, mask = node.args
        assert not (training and mask[0])
    return used


def gradient_of(loss: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    def function(value: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        value = value.detach().requires_grad_()
        result = loss(value, *rest)
        (grad,) = torch.autograd.grad((result * result.detach().cos()).sum(), value)
        return result, grad

    return function


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("ignored", ["none", "some", "all"])
@pytest.mark.parametrize("shape", [(7, 5), (5,), (3, 5, 4), (3, 5, 4, 2)])
def test_cross_entropy(reduction: str, weighted: bool, ignored: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    target = torch.randint(0, 5, shape[:1] + shape[2:] if len(shape) > 1 else ())
    if ignored == "all":
        target = torch.full_like(target, -100)
    elif ignored == "some" and target.ndim:
        target.view(-1)[::2] = -100
    weight = torch.rand(5, dtype=torch.float64) if weighted else None
    check(gradient_of(lambda x, y: F.cross_entropy(x, y, weight, reduction=reduction)), real(*shape), target)


LOSSES: dict[str, Callable[..., Tensor]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "soft_margin": F.soft_margin_loss,
    "poisson": F.poisson_nll_loss,
    "logits": F.binary_cross_entropy_with_logits,
    "weighted_logits": lambda x, y, reduction: F.binary_cross_entropy_with_logits(
        x, y, weight=y.abs(), pos_weight=y[0].exp(), reduction=reduction
    ),
    "bce": lambda x, y, reduction: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), reduction=reduction),
    "weighted_bce": lambda x, y, reduction: F.binary_cross_entropy(
        x.sigmoid(), y.sigmoid(), weight=y.exp(), reduction=reduction
    ),
    "saturated_bce": lambda x, y, reduction: F.binary_cross_entropy(x.clamp(0, 1), y.sigmoid(), reduction=reduction),
    "kl": lambda x, y, reduction: F.kl_div(x, y.exp(), reduction="batchmean" if reduction == "mean" else reduction),
}


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str, reduction: str) -> None:
    torch.manual_seed(0)
    loss = LOSSES[name]
    check(gradient_of(lambda x, y: loss(x, y, reduction=reduction)), real(6, 5), real(6, 5))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 3), (6, 4, 3, 2), (5, 4, 2, 2, 2)])
def test_batch_norm(training: bool, affine: bool, tracked: bool, shape: tuple[int, ...]) -> None:
    if not training and not tracked:
        pytest.skip("evaluation needs statistics")

    def function(value: Tensor, mean: Tensor, variance: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, ...]:
        wrt = [item.detach().requires_grad_() for item in ((value, scale, shift) if affine else (value,))]
        running = (mean, variance) if tracked else (None, None)
        result = F.batch_norm(wrt[0], *running, *wrt[1:], training=training, momentum=0.3)
        grads = torch.autograd.grad((result * result.detach().sin()).sum(), wrt)
        return result, mean, variance, *grads

    torch.manual_seed(0)
    used = check(function, real(*shape) + 3, real(4), real(4).abs(), real(4), real(4))
    assert (aten.copy_.default in used) == (training and tracked)


@pytest.mark.parametrize("target", [aten._native_batch_norm_legit_functional.default])
@pytest.mark.parametrize("training", [True, False])
def test_functional_batch_norm(target: OpOverload, training: bool) -> None:
    def function(*inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(target(*inputs, training, 0.1, 1e-5))

    check(function, real(5, 4, 3), real(4), real(4), real(4), real(4).abs())


def test_batch_norm_with_update() -> None:
    inputs = (real(5, 4, 3), real(4), real(4), real(4), real(4).abs())
    ours = decompositions()[aten._batch_norm_with_update_functional.default](*inputs, 0.1, 1e-5)
    theirs = aten._batch_norm_with_update_functional(*inputs, 0.1, 1e-5)
    for place in (0, 1, 2, 4, 5):
        torch.testing.assert_close(ours[place], theirs[place], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dim", [None, [0], [1, 2], [-1]])
@pytest.mark.parametrize("keepdim", [True, False])
def test_mean(dim: list[int] | None, keepdim: bool) -> None:
    check(lambda x: (x.mean(dim, keepdim), x.mean()), real(3, 4, 5))
    check(lambda x: (x.mean(),), real())


def test_the_mean_of_half_precision_does_not_overflow() -> None:
    mean = decompositions()[aten.mean.default]
    assert mean(torch.full((70000,), 2.0, dtype=torch.float16)) == 2


def test_constants_do_not_depend_on_the_tensor_they_are_like() -> None:
    def function(value: Tensor) -> tuple[Tensor, ...]:
        return (
            torch.zeros_like(value),
            torch.ones_like(value, dtype=torch.int64),
            torch.full_like(value, 3.0),
            value.new_zeros(2),
            value.new_ones(2),
            value.new_full((2,), 5.0),
        )

    assert check(function, real(3, 4)) == {aten.full.default}
