"""Convolutions in oneDNN: copies into its blocked layout and out of it, and buffers of threads.

*Takes* a `ConvolutionShape`. *Gives* the most bytes that are alive, results included, while each of three things is
computed: the output, the gradient of the input, the gradient of the weight.

Measured are all types with AVX2 and float32 with AVX-512, at 1 to 16 threads; a few numbers are upper bounds, which say
so. Where AVX-512 has no kernel for the gradient of a weight, oneDNN takes one of AVX2, and so does the formula. For
everything else `_reserve` says what the sources of oneDNN 3.12 allow beside: other kernels are chosen there, whose
buffers are bounded one by one.
"""

from __future__ import annotations

from math import prod

import torch

from koila.planning.workspace.convolution_shape import ConvolutionShape
from koila.planning.workspace.kernel_call import num_bytes
from koila.planning.workspace.processor import Isa
from koila.planning.workspace.weight_sums import Kernel, fits_depthwise, num_weight_sums, weight_kernel

PRIMITIVE_BYTES = 40 << 10
"""What a oneDNN primitive needs for itself."""
_THREAD_BYTES = 24 << 10
"""What a thread of a primitive needs for lists and rounding to pages."""


def forward_peak(shape: ConvolutionShape) -> int:
    """While the output is computed."""
    output, reserve = num_bytes(shape.output), _reserve(shape) + shape.num_threads * _THREAD_BYTES
    is_flat, by_group = shape.is_flat and not shape.transposed, not (shape.is_blocked or shape.is_depthwise)
    weight = shape.blocked_weight(is_flat=is_flat, by_group=by_group)
    gathered = _gathered(shape, shape.source) if shape.transposed and shape.is_strided else 0
    if not shape.is_blocked:
        return output + weight + gathered + _spread_rows(shape) + (64 << 10) + reserve
    made = shape.blocked(shape.output)
    held = shape.blocked_source() + weight + made
    if shape.transposed:
        return max(held + gathered + made, 3 * made if shape.is_strided else 0) + PRIMITIVE_BYTES + reserve
    held += _odd_groups(shape)
    return max(held + _unit_stride(shape, shape.channels), made + output) + PRIMITIVE_BYTES + reserve


def source_peak(shape: ConvolutionShape) -> int:
    """While the gradient of the input is computed."""
    source, reserve = num_bytes(shape.source), _reserve(shape) + shape.num_threads * _THREAD_BYTES
    weight = shape.blocked_weight(by_group=not (shape.is_blocked or shape.is_depthwise))
    gathered = _gathered(shape, shape.output) if shape.is_strided and not shape.transposed else 0
    if not shape.is_blocked:
        return source + weight + gathered + (140 << 10) + reserve
    given, made = shape.blocked(shape.output), shape.blocked(shape.source)
    held = given + weight + made + _odd_groups(shape)
    if shape.transposed:
        return max(held, 2 * source) + PRIMITIVE_BYTES + reserve
    if not gathered:
        return max(held, made + source) + PRIMITIVE_BYTES + reserve
    if shape.channels < 8:
        held = given + weight + source
    return max(held + gathered, 3 * source) + PRIMITIVE_BYTES + reserve


def weight_peak(shape: ConvolutionShape) -> int:
    """While the gradient of the weight is computed: from the unfolded image, or in blocks."""
    is_wide = shape.processor.isa is Isa.AVX512
    if not _is_measured(shape):  # Which of the two is not known.
        peak = max(_unfolded_peak(shape), _blocked_peak(shape))
    elif is_wide and weight_kernel(shape) is Kernel.OTHER:
        return weight_peak(shape.with_avx2()) + _packed(shape)
    else:
        peak = _unfolded_peak(shape) if not is_wide and _unfolds(shape) else _blocked_peak(shape)
    return peak + PRIMITIVE_BYTES + _reserve(shape)


def _unfolded_peak(shape: ConvolutionShape) -> int:
    weight = num_bytes(shape.weight)
    copied = num_bytes(shape.source) if shape.processor.isa is Isa.AVX512 and not shape.is_depthwise else 0
    return weight + copied + max(_unfolded(shape), shape.blocked_weight(is_flat=shape.is_flat))


def _blocked_peak(shape: ConvolutionShape) -> int:
    weight, made = num_bytes(shape.weight), shape.blocked_weight(is_flat=shape.is_flat, by_group=_pads_groups(shape))
    channels = _divisor(shape) if shape.is_blocked and shape.processor.isa is Isa.AVX512 else shape.channels
    summed = _unit_stride(shape, channels) + _num_sums(shape) * (made + _THREAD_BYTES)
    if not shape.is_blocked:
        return made + 2 * weight + summed
    return max(shape.blocked_source() + shape.blocked_output() + made + summed, made + weight)


def _pads_groups(shape: ConvolutionShape) -> bool:
    """Whether the gradient of the weight has whole blocks for each group: if channels come last."""
    is_depthwise = shape.is_depthwise and fits_depthwise(shape)
    return shape.groups > 1 and not shape.is_blocked and not is_depthwise


def _gathered(shape: ConvolutionShape, image: torch.Tensor) -> int:
    """A strided gradient is gathered with its border, by each thread for itself; rows that a stride cuts, too.

    Upper bounds: the border is that of a kernel without padding, and rows are as long as the image is wide.
    """
    other = shape.output if image is shape.source else shape.source
    width, channels, stride = other.shape[-1], other.shape[1], shape.stride[-1]
    rows = (width + stride) * stride * channels * image.element_size() if width % stride else 0
    return shape.num_threads * (shape.padded_sample(image) + rows + (32 << 10))


def _spread_rows(shape: ConvolutionShape) -> int:
    """With AVX-512 each thread spreads an image of one channel out, for all rows of the kernel: an upper bound."""
    if shape.transposed or shape.channels > 1 or shape.processor.isa is not Isa.AVX512:
        return 0
    sample = shape.padded_sample(shape.source) // shape.processor.channel_block
    return shape.num_threads * (sample * shape.kernel[0] ** 2 * shape.stride[-1] + (32 << 10))


def _unit_stride(shape: ConvolutionShape, channels: int) -> int:
    """A 1×1 kernel with a stride first gathers what it reads of so many channels."""
    if prod(shape.kernel) > 1 or not shape.is_strided:
        return 0
    pixels = prod(shape.output.shape[2:])
    return int(shape.num_threads * shape.processor.padded(channels) * pixels * shape.source.element_size())


def _divisor(shape: ConvolutionShape) -> int:
    """Channels that are gathered at once for a gradient: at least five blocks, as many as divide all blocks."""
    block = shape.processor.channel_block
    num = shape.processor.padded(shape.channels) // block
    return next(blocks for blocks in range(min(num, 5), num + 1) if num % blocks == 0) * block


def _num_sums(shape: ConvolutionShape) -> int:
    """How many gradients of the weight threads have of their own: with AVX2, where there are few blocks of it."""
    if shape.processor.isa is Isa.AVX512:
        return num_weight_sums(shape)
    is_small = prod(shape.kernel) == 1 or max(shape.weight.shape[:2]) <= 4 * shape.processor.channel_block
    return shape.num_threads if shape.num_threads > 1 and is_small else 0


def _unfolds(shape: ConvolutionShape) -> bool:
    """Whether AVX2 makes the gradient of the weight from the unfolded image."""
    image = shape.output if shape.transposed else shape.source
    exceeds = any(side > size for side, size in zip(shape.kernel[:-1], image.shape[2:], strict=False))
    if not shape.is_blocked or exceeds:
        return exceeds or max(shape.dilation) > 1
    group, outputs = shape.channels // shape.groups, shape.output.shape[1]
    far = shape.is_depthwise and not fits_depthwise(shape)
    uneven = shape.groups > 1 and not (shape.is_depthwise and outputs == shape.channels)
    odd = uneven and any(size % shape.processor.channel_block for size in (group, outputs // shape.groups))
    deep = len(shape.kernel) == 3 and prod(shape.kernel) > 1
    return max(shape.dilation) > 1 or max(shape.kernel) >= 14 or far or odd or deep


def _unfolded(shape: ConvolutionShape) -> int:
    """The unfolded image and a gradient of the weight, whose size oneDNN counts in bytes but books in floats."""
    depth = shape.output.shape[2] if len(shape.kernel) == 3 else 1
    sample = 0 if shape.is_blocked else num_bytes(shape.source) // shape.num_samples
    each = shape.columns // depth + sample + 4 * num_bytes(shape.weight) + 2 * _THREAD_BYTES
    return int(each * _num_unfolding_threads(shape))


def _packed(shape: ConvolutionShape) -> int:
    """Products with AVX-512 copy parts of operands and of a result, and have buffers for each thread: at most this."""
    image, size = _unfolded_image(shape), shape.source.element_size()
    rows = shape.columns // (prod(image) * size) + shape.output.shape[1] // shape.groups
    parts = (min(prod(image), 384) + 32) * rows * size
    return parts + num_bytes(shape.weight) // shape.groups + shape.num_threads * (64 << 10)


def _unfolded_image(shape: ConvolutionShape) -> tuple[int, ...]:
    return tuple((shape.source if shape.transposed else shape.output).shape[2:])


def _odd_groups(shape: ConvolutionShape) -> int:
    """Groups that do not fill blocks are computed from unfolded images, by each thread for itself."""
    outer, inner = shape.weight.shape[0] // shape.groups, shape.weight.shape[1]
    if shape.groups == 1 or shape.is_depthwise or not shape.is_blocked or not (outer % 8 or inner % 8):
        return 0
    return shape.num_threads * (shape.columns + (64 << 10))


def _num_unfolding_threads(shape: ConvolutionShape) -> int:
    """Samples are shared out among threads if there are several, and if they are small."""
    pixels = prod(shape.output.shape[-2:]) if len(shape.kernel) > 1 else shape.output.shape[-1]
    is_shared = pixels // shape.num_threads < 256 and (shape.num_samples > 1 or shape.groups > 2)
    return shape.num_threads if is_shared else 1


def _is_measured(shape: ConvolutionShape) -> bool:
    """Whether the malloc hook has seen these kernels."""
    processor = shape.processor
    return processor.isa is not Isa.SSE41 and shape.source.dtype not in processor.native


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
