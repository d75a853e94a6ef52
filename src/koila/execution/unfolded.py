"""Convolutions of a few pixels as one product: what runs where `koila.planning.few_pixels` says so.

*Takes* the arguments of a convolution or of its gradient. *Gives* the same results. The pixels are the rows of the
product: BLAS is slow where they are its columns. Results have memory of their own, no view of a product is handed on.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

aten = torch.ops.aten


def _pair(sizes: Sequence[int]) -> list[int]:
    return list(sizes) * 2 if len(sizes) == 1 else list(sizes)


def _rows(image: torch.Tensor) -> torch.Tensor:
    """A row of channels for each pixel; a view if there is only one image."""
    return image.flatten(2).transpose(1, 2).reshape(-1, image.shape[1])


def _unfolded(
    image: torch.Tensor, weight: torch.Tensor, num_pixels: int, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int],
) -> torch.Tensor:  # fmt: skip
    """For each pixel of the output, the row of what the weight is multiplied with."""
    columns = image.new_empty(image.shape[0], weight[0].numel(), num_pixels)  # Not given, it is made twice.
    aten.im2col.out(image, list(weight.shape[2:]), _pair(dilation), _pair(padding), _pair(stride), out=columns)
    return _rows(columns)


def unfolded_convolution(
    image: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], *_: Any,
) -> torch.Tensor:  # fmt: skip
    """`aten.convolution`, neither transposed nor in groups."""
    sizes = zip(image.shape[2:], weight.shape[2:], _pair(stride), _pair(padding), _pair(dilation), strict=True)
    spatial = [(size + 2 * pad - apart * (kernel - 1) - 1) // step + 1 for size, kernel, step, pad, apart in sizes]
    rows, factor = _unfolded(image, weight, prod(spatial), stride, padding, dilation), weight.flatten(1).t()
    product = torch.mm(rows, factor) if bias is None else torch.addmm(bias, rows, factor)
    del rows
    result = product.new_empty(image.shape[0], weight.shape[0], *spatial)
    result.flatten(2).copy_(product.view(image.shape[0], -1, weight.shape[0]).transpose(1, 2))
    return result


def unfolded_gradients(
    gradient: torch.Tensor, image: torch.Tensor, weight: torch.Tensor, bias_sizes: Sequence[int] | None,
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], *rest: Any,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """`aten.convolution_backward` of the same."""
    wanted, rows = rest[-1], _rows(gradient)
    of_image = _image_gradient(rows, image, weight, stride, padding, dilation) if wanted[0] else None
    of_weight = None
    if wanted[1]:
        unfolded = _unfolded(image, weight, prod(gradient.shape[2:]), stride, padding, dilation)
        of_weight = torch.empty_like(weight)
        torch.mm(rows.t(), unfolded, out=of_weight.flatten(1))
        del unfolded
    return of_image, of_weight, gradient.sum((0, 2, 3)) if wanted[2] else None


def _image_gradient(
    rows: torch.Tensor, image: torch.Tensor, weight: torch.Tensor, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int],
) -> torch.Tensor:  # fmt: skip
    product = torch.mm(rows, weight.flatten(1))
    columns = product.view(image.shape[0], -1, product.shape[1]).transpose(1, 2).contiguous()
    del product
    spatial, kernel, result = list(image.shape[2:]), list(weight.shape[2:]), torch.empty_like(image)
    aten.col2im.out(columns, spatial, kernel, _pair(dilation), _pair(padding), _pair(stride), out=result)
    return result
