"""Pooling and resizing of images: copies of strided ones."""

from __future__ import annotations

from typing import Any

import torch

from koila.planning.workspace.copies import image_copies, image_copy_bytes
from koila.planning.workspace.kernel_call import HALF, Formula, KernelCall, num_bytes

aten = torch.ops.aten


def _upsample_backward(call: KernelCall) -> int:
    given, result = call["grad_output"], call.result
    if given.dtype in HALF and _is_channels_last(given):
        return int(4 * call.num_threads * (result.numel() // result.shape[0]))
    return image_copy_bytes(given)


def _average_backward(call: KernelCall) -> int:
    given = call["grad_output"]
    return num_bytes(call.result) if _is_channels_last(given) else image_copy_bytes(given)


def _is_channels_last(image: torch.Tensor) -> bool:
    return not image.is_contiguous() and not image_copy_bytes(image)


ROWS: dict[Any, Formula] = {
    aten.max_pool2d_with_indices.default: image_copies("self"),
    aten.max_pool2d_with_indices_backward.default: image_copies("grad_output"),
    aten.avg_pool2d.default: image_copies("self"),
    aten.avg_pool2d_backward.default: _average_backward,
    aten._adaptive_avg_pool2d.default: image_copies("self"),
    aten.upsample_nearest2d_backward.default: _upsample_backward,
    aten.upsample_bilinear2d_backward.default: _upsample_backward,
}
