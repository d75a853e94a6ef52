"""Convolutions of a few pixels: one product of the unfolded images, where a chunk is small and the weight is not.

*Takes* an operator, its arguments and its result. *Gives* whether a chunk's convolution is computed that way, and the
bytes that this needs beside the results. `koila.execution.unfolded` has the functions.

For one small image PyTorch unfolds it, too, but asks BLAS for a product with as few columns as there are pixels, which
takes up to seven times as long as the same product with as few rows. For several images oneDNN copies the weight into
its blocked layout, which takes longer than the product and more bytes than all the images. What is added up is the
same.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from koila.planning.devices import current_rules

aten = torch.ops.aten

FEW_PIXELS = 16
"""From so many pixels of all results together on, a convolution is left to PyTorch."""
LARGE_WEIGHT = 2**16
"""The same for weights of fewer elements: what is saved does not pay for the calls."""
_OPERANDS = {aten.convolution.default: 0, aten.convolution_backward.default: 1}
"""By operator, the position of its image; the weight follows, and after one more argument the sizes."""


def runs_unfolded(target: Any, args: Sequence[Any], result: Any) -> bool:
    """Whether the convolution of a chunk, or its gradient, is computed as one product.

    >>> image, weight, sizes = torch.ones(1, 64, 3, 3), torch.ones(128, 64, 3, 3), ([1, 1], [1, 1], [1, 1])
    >>> args = (image, weight, None, *sizes, False, [0, 0], 1)
    >>> runs_unfolded(aten.convolution.default, args, torch.ones(1, 128, 3, 3))
    True
    >>> runs_unfolded(aten.convolution.default, args, torch.ones(1, 128, 4, 4))
    False
    """
    first = _OPERANDS.get(target)
    if first is None or not current_rules().runs_cpu_kernels or len(args) < first + 9:
        return False
    image, weight = args[first : first + 2]
    is_transposed, groups = args[first + 6], args[first + 8]
    output = args[0] if first else result
    if is_transposed or groups != 1 or image.dim() != 4 or image.dtype not in (torch.float32, torch.float64):
        return False
    is_few = 0 < output.shape[0] * prod(output.shape[2:]) < FEW_PIXELS and weight.numel() >= LARGE_WEIGHT
    return is_few and all(each.is_contiguous() for each in (image, weight, output))


def unfolded_bytes(target: Any, args: Sequence[Any], result: Any) -> int:
    """The most that is alive beside the results while it is computed as one product."""
    if target is aten.convolution.default:
        return _forward_bytes(args[1], result)
    return _backward_bytes(args[0], args[2], result)


def _columns_bytes(weight: torch.Tensor, output: torch.Tensor) -> int:
    """Bytes of the unfolded images."""
    return output.shape[0] * prod(output.shape[2:]) * weight[0].numel() * weight.element_size()


def _is_copied(output: torch.Tensor) -> bool:
    """Whether pixels become rows by a copy: there are several samples of several pixels."""
    return output.shape[0] > 1 and prod(output.shape[2:]) > 1


def _forward_bytes(weight: torch.Tensor, output: torch.Tensor) -> int:
    columns = _columns_bytes(weight, output)
    turned = columns if _is_copied(output) else 0
    return max(columns + max(turned, output.nbytes), 2 * output.nbytes) - output.nbytes


def _backward_bytes(output: torch.Tensor, weight: torch.Tensor, results: Sequence[Any]) -> int:
    """First the gradient of the image, then that of the weight, beside the gradient of the output in rows."""
    source, product, bias = (0 if each is None else each.nbytes for each in results)
    columns, is_copied = _columns_bytes(weight, output), _is_copied(output)
    peaks = [columns + max(columns, source)] if source else []
    if product:
        peaks.append(source + columns + max(columns if is_copied else 0, product))
    turned = output.nbytes if is_copied else 0
    return turned + max(0, max(peaks, default=0) - source - product - bias)
