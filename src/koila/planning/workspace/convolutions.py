"""Convolutions: oneDNN's blocked copies, or PyTorch's unfolded images where oneDNN does not compute the type.

Which of the two runs is PyTorch's choice, and asked of it. The numbers of unfolded images are measured, at 1 to 8
threads, and are the same on every processor.
"""

from __future__ import annotations

from typing import Any

import torch

from koila._torch import convolution_backend
from koila.planning.workspace.convolution_shape import ConvolutionShape
from koila.planning.workspace.copies import copy_bytes, image_copy_bytes
from koila.planning.workspace.kernel_call import Formula, KernelCall, num_bytes
from koila.planning.workspace.onednn_convolutions import forward_peak, source_peak, weight_peak

aten = torch.ops.aten


def _backend(call: KernelCall, output: torch.Tensor) -> str:
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "transposed", "output_padding", "groups")
    return convolution_backend(*(call.arguments.get(name) for name in names), [output.shape[1]])


def _uses_onednn(call: KernelCall, backend: str) -> bool:
    # The backend of transposed convolutions has no name in Python. A processor that was handed in may compute more
    # types than this one.
    return backend == "???" or "Mkldnn" in backend or call["input"].dtype in call.processor.native


def _forward(call: KernelCall) -> int:
    shape, backend = ConvolutionShape(call, call.result), _backend(call, call.result)
    if backend.startswith("Empty"):
        return 0
    contiguous = image_copy_bytes(shape.source)
    if _uses_onednn(call, backend):
        return contiguous + forward_peak(shape) - num_bytes(call.result)
    return contiguous + _unfolded(shape, backend)[0]


def _backward(call: KernelCall) -> int:
    """First the gradient of the input, then that of the weight, then, without oneDNN, that of the bias."""
    shape, backend = ConvolutionShape(call, call["grad_output"]), _backend(call, call["grad_output"])
    if backend.startswith("Empty"):
        return 0
    wanted = call["output_mask"]
    results = zip(call.result, wanted, strict=True)
    source, weight, bias = (num_bytes(tensor) if asked else 0 for tensor, asked in results)
    # The layout of the input and the weight decides: a gradient in channels last is copied, too.
    copied = copy_bytes if shape.is_blocked else image_copy_bytes
    contiguous = copied(shape.source) + copied(shape.output)
    if _uses_onednn(call, backend):
        peaks = (source_peak(shape), source + weight_peak(shape), 0)
    else:
        _, for_source, for_weight = _unfolded(shape, backend)
        for_bias = 2 * num_bytes(shape.output) // shape.groups if shape.is_half else 0
        peaks = (source + weight + for_source, source + weight + for_weight, source + weight + bias + for_bias)
    peak = max(peak for peak, asked in zip(peaks, wanted, strict=True) if asked)
    return contiguous + max(0, peak - source - weight - bias)


def _unfolded(shape: ConvolutionShape, backend: str) -> tuple[int, int, int]:
    """Hidden bytes of the forward, of the gradient of the input, and of the gradient of the weight."""
    columns, whole = shape.columns, shape.num_samples * shape.columns
    num_threads = min(shape.num_threads, shape.num_samples)
    # Products in half precision need a float32 result beside, unless channels come last.
    widened = num_threads * (3 * columns if shape.is_half and shape.is_blocked else columns)
    if shape.transposed:
        weights = 0 if shape.is_blocked else 2 * num_bytes(shape.weight)
        return whole + (2 * num_threads * columns if shape.is_half else 0), columns, columns + weights
    if backend.startswith("SlowDilated"):
        return columns, widened // num_threads, columns
    if len(shape.kernel) == 3:
        return (0 if shape.is_plain_product else whole), whole, (0 if shape.is_plain_product else whole)
    whole = 0 if shape.is_plain_product else whole
    if shape.groups == 1:
        return whole, widened, whole + (0 if shape.is_blocked else 2 * num_bytes(shape.weight))
    source, output = num_bytes(shape.source) // shape.groups, num_bytes(shape.output) // shape.groups
    forward = max(whole + source, num_bytes(shape.output))
    small = min(2 * (source + output), 128 << 10) + (0 if shape.is_blocked else 64 << 10)
    backward = max(widened + source + output, num_bytes(shape.source) + small)
    return forward, backward, whole + source + output


ROWS: dict[Any, Formula] = {
    aten.convolution.default: _forward,
    aten.convolution_backward.default: _backward,
}
