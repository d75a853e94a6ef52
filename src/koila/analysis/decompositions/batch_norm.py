"""Batch normalisation as statistics over the batch and pointwise operators.

*Takes* the arguments of the batch normalisation operators and of their backwards. *Gives* their results, with the
running statistics returned or written as eager does it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from koila.analysis.decompositions.means import cast
from koila.analysis.monoids import HALVES

aten = torch.ops.aten


def _per_channel(value: Tensor, ndim: int) -> Tensor:
    return aten.view.default(value, [1, -1, *[1] * (ndim - 2)])


def _normalised(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
) -> Tensor:
    """`(x - mean) * invstd * weight + bias` as one line per channel, as eager's kernel computes it.

    In the statistics' dtype, returned in the input's.
    """
    scale = invstd if weight is None else invstd * weight
    shift = -mean * scale if bias is None else bias - mean * scale
    return cast(input * _per_channel(scale, input.ndim) + _per_channel(shift, input.ndim), input.dtype)


def _statistics(input: Tensor) -> tuple[Tensor, Tensor, int]:
    """Biased variance and mean of each channel over all else, and how many elements they are made of."""
    wide = cast(input, torch.float32) if input.dtype in HALVES else input
    dims = [0, *range(2, input.ndim)]
    variance, mean = aten.var_mean.correction(wide, dims, correction=0)
    return variance, mean, input.numel() // max(1, input.shape[1])


def _moved(running: Tensor, value: Tensor, momentum: float) -> Tensor:
    return cast(value * momentum + running * (1 - momentum), running.dtype)


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
    return output, cast(mean, kept), cast(invstd, kept), new_mean, new_var


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
    output, mean, invstd, new_mean, new_var = _trained(input, weight, bias, running_mean, running_var, momentum, eps)
    if running_mean is not None and new_mean is not None:
        running_mean.copy_(new_mean)
    if running_var is not None and new_var is not None:
        running_var.copy_(new_var)
    return output, mean, invstd


def whole_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Batch normalisation by eager's own kernel, its writes made plain: for a program that is not cut."""
    if not training:
        return NotImplemented
    if running_mean is None or running_var is None:
        return aten._native_batch_norm_legit.no_stats(input, weight, bias, training, momentum, eps)
    output, mean, invstd, new_mean, new_var = aten._native_batch_norm_legit_functional.default(
        input, weight, bias, running_mean, running_var, training, momentum, eps
    )
    running_mean.copy_(new_mean)
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
    """Two sums over the batch (of the gradient, and of the gradient times the normalised input), then pointwise.

    Where eager's kernel gives the two sums and nothing else, it runs in every chunk and the sums are added up.
    """
    in_kernel = _sums_in_kernel(grad_out, input)
    if in_kernel and not (train and output_mask[0]):
        return NotImplemented
    if train:
        assert save_mean is not None and save_invstd is not None
        mean, invstd = save_mean, save_invstd
    else:
        assert running_mean is not None and running_var is not None
        mean, invstd = running_mean, aten.rsqrt.default(running_var + eps)
    kept = weight.dtype if weight is not None else input.dtype
    wide = torch.float32 if input.dtype in HALVES else input.dtype
    grad, value, mean, invstd = cast(grad_out, wide), cast(input, wide), cast(mean, wide), cast(invstd, wide)
    if in_kernel:
        statistics = (None, None, save_mean, save_invstd)
        _, product, total = aten.native_batch_norm_backward.default(
            grad_out, input, weight, *statistics, train, eps, [False, True, True]
        )
    else:
        dims = [0, *range(2, input.ndim)]
        total = aten.sum.dim_IntList(grad, dims)
        product = aten.sum.dim_IntList(grad * (value - _per_channel(mean, input.ndim)), dims) * invstd
    grad_input = None
    if output_mask[0]:
        scale = invstd if weight is None else invstd * weight
        grad_input = cast(_gradient(grad, value, mean, invstd, scale, product, total, train), input.dtype)
    return (
        grad_input,
        cast(product, kept) if output_mask[1] else None,
        cast(total, kept) if output_mask[2] else None,
    )


def _sums_in_kernel(grad_out: Tensor, input: Tensor) -> bool:
    """If eager's kernel sums in the dtype of the input, and reads both operands in the order in which they lie.

    Operands of two layouts take a path of the kernel that is three times slower than plain sums.
    """
    orders = [torch.contiguous_format, {4: torch.channels_last, 5: torch.channels_last_3d}.get(input.ndim)]
    return input.dtype not in HALVES and any(
        order is not None and all(value.is_contiguous(memory_format=order) for value in (grad_out, input))
        for order in orders
    )


def _gradient(
    grad: Tensor,
    value: Tensor,
    mean: Tensor,
    invstd: Tensor,
    scale: Tensor,
    product: Tensor,
    total: Tensor,
    train: bool,
) -> Tensor:
    """`(grad - total / n - (x - mean) * invstd * product / n) * scale`, as one line per channel in `x` and in `grad`.

    Three passes over large operands instead of five; as exact as the forward's line per channel.
    """
    ndim = value.ndim
    if not train:
        return grad * _per_channel(scale, ndim)
    count = value.numel() // max(1, value.shape[1])
    slope = -scale * invstd * product / count
    shift = -(slope * mean + scale * total / count)
    line = value * _per_channel(slope, ndim) + _per_channel(shift, ndim)
    return aten.addcmul.default(line, grad, _per_channel(scale, ndim))


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


# cuDNN's and MIOpen's operators, which hide their writes as `native_batch_norm` does.


def cudnn_batch_norm(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    exponential_average_factor: float,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same with a reserve that is empty here."""
    results = miopen_batch_norm(
        input, weight, bias, running_mean, running_var, training, exponential_average_factor, epsilon
    )
    return *results, _reserve(input)


def miopen_batch_norm(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    exponential_average_factor: float,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same under other names."""
    return native_batch_norm(
        input, weight, bias, running_mean, running_var, training, exponential_average_factor, epsilon
    )


def cudnn_batch_norm_backward(
    input: Tensor,
    grad_output: Tensor,
    weight: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_var: Tensor | None,
    epsilon: float,
    reserveSpace: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The backward of training; what is called `save_var` is the inverse deviation. MIOpen's has no reserve."""
    return native_batch_norm_backward(
        grad_output, input, weight, running_mean, running_var, save_mean, save_var, True, epsilon, [True] * 3
    )
