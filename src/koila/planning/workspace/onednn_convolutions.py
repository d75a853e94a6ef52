"""Convolutions in oneDNN: copies into its blocked layout and out of it, and buffers of threads.

*Takes* a `ConvolutionShape`. *Gives* the most bytes that are alive, results included, while each of three things is
computed: the output, the gradient of the input, the gradient of the weight.

Measured are all numbers with AVX2, at 1 to 8 threads, and those of float32 with AVX-512 at one thread. For everything
else `_reserve` says what the sources of oneDNN 3.12 allow beside: other kernels are chosen there, whose buffers are
bounded one by one.
"""

from __future__ import annotations

from math import prod

import torch

from koila.planning.workspace.convolution_shape import ConvolutionShape
from koila.planning.workspace.kernel_call import num_bytes
from koila.planning.workspace.processor import Isa

PRIMITIVE_BYTES = 40 << 10
"""What a oneDNN primitive needs for itself."""
_THREAD_BYTES = 8 << 10
"""What a thread of a primitive needs for lists and rounding to pages."""


def forward_peak(shape: ConvolutionShape) -> int:
    """While the output is computed."""
    output, reserve = num_bytes(shape.output), _reserve(shape) + shape.num_threads * _THREAD_BYTES
    if not shape.is_blocked:
        gathered = _gathered(shape, shape.source) if shape.transposed and shape.is_strided else 0
        return output + shape.blocked_weight(is_flat=shape.is_flat) + gathered + (64 << 10) + reserve
    made = shape.blocked(shape.output)
    held = shape.blocked_source() + shape.blocked_weight(is_flat=shape.is_flat) + made
    if shape.transposed:
        return max(held + made, 3 * made if shape.is_strided else 0) + PRIMITIVE_BYTES + reserve
    return max(held + _unit_stride(shape), made + output) + PRIMITIVE_BYTES + reserve


def source_peak(shape: ConvolutionShape) -> int:
    """While the gradient of the input is computed."""
    source, reserve = num_bytes(shape.source), _reserve(shape) + shape.num_threads * _THREAD_BYTES
    weight, given = shape.blocked_weight(), shape.blocked(shape.output)
    is_gathered = shape.is_strided and not shape.transposed
    if not shape.is_blocked:
        gathered = _gathered(shape, shape.output) if is_gathered else 0
        return source + weight + gathered + (140 << 10) + reserve
    made = shape.blocked(shape.source)
    held = given + weight + made
    if shape.transposed:
        return max(held, 2 * source) + PRIMITIVE_BYTES + reserve
    if not is_gathered:
        return max(held, made + source) + PRIMITIVE_BYTES + reserve
    if shape.channels < 8:
        held = given + weight + source + _gathered(shape, shape.output)
    return max(held, 3 * source) + PRIMITIVE_BYTES + reserve


def weight_peak(shape: ConvolutionShape) -> int:
    """While the gradient of the weight is computed: from the unfolded image, or in blocks."""
    if not _is_measured(shape):  # Which of the two is not known.
        peak = max(_unfolded_peak(shape), _blocked_peak(shape))
    else:
        peak = _unfolded_peak(shape) if _unfolds(shape) else _blocked_peak(shape)
    return peak + PRIMITIVE_BYTES + _reserve(shape)


def _unfolded_peak(shape: ConvolutionShape) -> int:
    weight = num_bytes(shape.weight)
    copied = num_bytes(shape.source) if shape.processor.isa is Isa.AVX512 and not shape.is_depthwise else 0
    return weight + copied + max(_unfolded(shape), shape.blocked_weight(is_flat=shape.is_flat))


def _blocked_peak(shape: ConvolutionShape) -> int:
    weight, made = num_bytes(shape.weight), shape.blocked_weight(is_flat=shape.is_flat)
    summed = _unit_stride(shape) + (shape.num_threads * made if shape.num_threads > 1 and _sums(shape) else 0)
    if not shape.is_blocked:
        return weight + 2 * made + summed
    return max(shape.blocked_source() + shape.blocked(shape.output) + made + summed, made + weight)


def _gathered(shape: ConvolutionShape, image: torch.Tensor) -> int:
    """A strided gradient is gathered with its border, by each thread for itself."""
    return shape.num_threads * (shape.padded_sample(image) + (32 << 10))


def _unit_stride(shape: ConvolutionShape) -> int:
    """A 1×1 kernel with a stride first gathers what it reads."""
    if prod(shape.kernel) > 1 or not shape.is_strided:
        return 0
    return int(shape.num_threads * shape.channels * prod(shape.output.shape[2:]) * shape.source.element_size())


def _sums(shape: ConvolutionShape) -> bool:
    """Whether each thread may have a gradient of the weight of its own: where there are few blocks of it."""
    return prod(shape.kernel) == 1 or max(shape.weight.shape[:2]) <= 4 * shape.processor.channel_block


def _unfolds(shape: ConvolutionShape) -> bool:
    """Whether the gradient of the weight is made from the unfolded image."""
    group, outputs = shape.channels // shape.groups, shape.output.shape[1]
    sides = zip(shape.padding, shape.kernel, strict=True)
    far = shape.is_depthwise and any(padding > side // 2 for padding, side in sides)
    if shape.processor.isa is Isa.AVX512 and _is_measured(shape):
        return max(shape.kernel) >= 14 or far
    uneven = shape.groups > 1 and not (shape.is_depthwise and outputs == shape.channels)
    odd = uneven and any(size % shape.processor.channel_block for size in (group, outputs // shape.groups))
    deep = len(shape.kernel) == 3 and prod(shape.kernel) > 1
    if not shape.is_blocked:
        return max(shape.dilation) > 1
    return max(shape.dilation) > 1 or max(shape.kernel) >= 14 or far or odd or deep


def _unfolded(shape: ConvolutionShape) -> int:
    """The unfolded image and a gradient of the weight, whose size oneDNN counts in bytes but books in floats."""
    depth = shape.output.shape[2] if len(shape.kernel) == 3 else 1
    sample = 0 if shape.is_blocked else num_bytes(shape.source) // shape.num_samples
    each = shape.columns // depth + sample + 4 * num_bytes(shape.weight) + 2 * _THREAD_BYTES
    return int(each * _num_unfolding_threads(shape))


def _num_unfolding_threads(shape: ConvolutionShape) -> int:
    """Samples are shared out among threads if there are several, and if they are small."""
    pixels = prod(shape.output.shape[-2:]) if len(shape.kernel) > 1 else shape.output.shape[-1]
    is_shared = pixels // shape.num_threads < 256 and (shape.num_samples > 1 or shape.groups > 2)
    return shape.num_threads if is_shared else 1


def _is_measured(shape: ConvolutionShape) -> bool:
    """Whether the malloc hook has seen these kernels."""
    processor = shape.processor
    is_known = processor.isa is Isa.AVX2 or (processor.isa is Isa.AVX512 and processor.num_threads == 1)
    return is_known and shape.source.dtype not in processor.native


def _reserve(shape: ConvolutionShape) -> int:
    """What kernels that were not measured may need beside: by reading.

    Below AVX2, gradients are made from the unfolded image, by each thread for itself. With AVX-512, weights are blocked
    by up to 64 outputs and 32 inputs, each thread may sum a gradient of the weight in float32 of its own, and gathers
    samples with their borders; images with few channels are copied although they are read as they are with AVX2.
    """
    if _is_measured(shape):
        return 0
    processor = shape.processor
    sample = num_bytes(shape.source) // max(1, shape.num_samples)
    if processor.isa is Isa.SSE41:
        each = shape.columns + sample + 4 * num_bytes(shape.weight)
        return int(shape.num_threads * each + num_bytes(shape.source) + num_bytes(shape.output))
    outer, inner = shape.weight.shape[:2]
    weight = num_bytes(shape.weight) // (outer * inner) * (-(-outer // 64) * 64) * (-(-inner // 32) * 32)
    weight *= max(1, 4 // shape.weight.element_size())
    borders = shape.padded_sample(shape.source) + shape.padded_sample(shape.output)
    return weight + shape.num_threads * (weight + borders) + (num_bytes(shape.source) if shape.is_flat else 0)
