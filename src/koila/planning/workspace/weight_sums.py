"""How many gradients of a convolution's weight oneDNN adds up, with AVX-512.

*Takes* a `ConvolutionShape`. *Gives* how many gradients of the weight threads have of their own, beside the result.

oneDNN deals the work out to threads in three ways at once: by parts of the batch, by blocks of outputs and by blocks of
inputs. Each part of the batch but the first has a gradient of its own, which is added to the result in the end. Of all
shares oneDNN takes those by which, as it reckons, a thread moves the least memory, or those that move little more and
compute less. Here it is reckoned as in `balance` of oneDNN 3.12 (src/cpu/x64: jit_avx512_common_conv_kernel.cpp,
jit_avx512_common_1x1_conv_kernel.cpp, jit_uni_dw_conv_kernel_utils.cpp). Nothing of the machine enters but the number
of threads. Upper bounds, by which each thread has one, are those for depthwise kernels if channels come last, and for
kernels wider than 14 pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cache
from math import prod

from koila.planning.workspace.convolution_shape import ConvolutionShape

_BLOCK = 16
"""Channels of a block."""
_MIN_ROWS = 9
"""Images with more rows than this are parted by rows, too, each part with at least so many."""
_MAX_SIDE = 14
"""The widest kernel, but for one as wide as the image."""
_SUM_COST, _POINTWISE_SUM_COST = 8, 12
"""What it costs to add up a number of the gradient of the weight, in numbers that are read; the latter for 1×1."""


@dataclass(frozen=True, slots=True)
class _Work:
    """What a gradient of a weight is made from, in units that are dealt out: samples, rows, or runs of pixels."""

    num_sources: int
    """Units of the source."""
    num_outputs: int
    """Units of the gradient of the output."""
    source_size: int
    """Numbers in a unit of the source, of one block of inputs."""
    output_size: int
    """Numbers in a unit of the gradient of the output, of one block of outputs."""
    input_blocks: int
    output_blocks: int
    stride: int
    """Of so many pixels of the source one is read."""
    sum_cost: int
    """What it costs to add up a block of the gradient of the weight."""

    def moved(self, parts: int, outputs: int, inputs: int) -> int:
        """Numbers that a thread moves, as oneDNN reckons."""
        wide, high = _ceil(self.input_blocks, inputs), _ceil(self.output_blocks, outputs)
        read = _ceil(self.num_sources, parts) * wide * self.source_size // self.stride
        return read + _ceil(self.num_outputs, parts) * high * self.output_size + wide * high * self.sum_cost

    def computed(self, parts: int, outputs: int, inputs: int) -> int:
        """Units of the output, for each block of the weight, that a thread computes."""
        blocks = _ceil(self.output_blocks, outputs) * _ceil(self.input_blocks, inputs)
        return _ceil(self.num_outputs, parts) * blocks


class Kernel(Enum):
    """What oneDNN makes gradients of weights with."""

    DEPTHWISE = "depthwise"
    POINTWISE = "1×1"
    DIRECT = "direct"
    OTHER = "one of AVX2, or products of unfolded images"


def weight_kernel(shape: ConvolutionShape) -> Kernel:
    """Which kernel makes the gradient of the weight; those of AVX-512 come first, but not for all shapes."""
    if shape.is_depthwise and shape.weight.shape[0] == shape.channels and fits_depthwise(shape):
        return Kernel.DEPTHWISE
    if _fits_pointwise(shape):
        return Kernel.POINTWISE
    return Kernel.DIRECT if _fits_direct(shape) else Kernel.OTHER


def num_weight_sums(shape: ConvolutionShape) -> int:
    """Gradients of the weight beside the result, where a kernel of AVX-512 makes it."""
    kernel = weight_kernel(shape)
    if kernel is Kernel.DEPTHWISE:
        return _num_depthwise_sums(shape)
    if shape.kernel[-1] > _MAX_SIDE:  # Turned on their side, and dealt out in another way.
        return shape.num_threads - 1
    is_pointwise = kernel is Kernel.POINTWISE
    max_parts, last, work = _pointwise_work(shape) if is_pointwise else _work(shape)
    parts = _num_parts(work, max_parts, shape.num_threads // shape.groups, is_pointwise=is_pointwise)
    if shape.num_threads // 2 < parts < shape.num_threads:
        parts = min(last, shape.num_threads)
    return parts - 1


@cache
def _num_parts(work: _Work, max_parts: int, num_threads: int, *, is_pointwise: bool) -> int:
    """Into how many parts oneDNN cuts the batch. Of equals it takes the last that it looks at."""
    shares = [
        (parts, outputs, min(num_threads // parts // outputs, work.input_blocks))
        for parts in range(1, min(num_threads, max_parts) + 1)
        for outputs in range(1, min(num_threads // parts, work.output_blocks) + 1)
    ]
    if not shares:  # Each thread has groups for itself.
        return 1
    best = min(reversed(shares), key=lambda share: work.moved(*share))
    if is_pointwise:
        return best[0]
    least = work.moved(*best)
    for share in shares:
        computed, fewest = work.computed(*share), work.computed(*best)
        if (computed <= fewest and work.moved(*share) < 1.1 * least) or 4 * computed <= 3 * fewest:
            best = share
    return best[0]


def fits_depthwise(shape: ConvolutionShape) -> bool:
    """Rows of up to three pixels, borders up to half a kernel that strides divide, an image that holds the kernel."""
    source, _ = _images(shape)
    sides = zip(source, shape.kernel, shape.stride, shape.padding, strict=True)
    is_held = all(
        size >= side + -padding % step and padding <= side // 2 and (padding <= 1 or padding % step == 0)
        for size, side, step, padding in sides
    )
    return is_held and shape.kernel[-1] <= 3 and shape.stride[-1] <= shape.kernel[-1] and max(shape.dilation) == 1


def _fits_pointwise(shape: ConvolutionShape) -> bool:
    """A kernel of one pixel; pixels that a stride leaves are gathered first, if they fill the image."""
    source, output = _images(shape)
    is_even = all(given == made * step for given, made, step in zip(source, output, shape.stride, strict=True))
    is_gathered = shape.is_strided and is_even and len(shape.kernel) < 3
    is_plain = prod(shape.kernel) == 1 and shape.groups == 1 and not any(shape.padding)
    return is_plain and (is_gathered or not shape.is_strided)


def _fits_direct(shape: ConvolutionShape) -> bool:
    """Whole blocks of channels, or up to three; borders and kernels that are not too large."""
    inner, outer = _channels(shape)
    is_filled = (inner < 4 or inner >= _BLOCK) if shape.groups == 1 else not (inner % _BLOCK or outer % _BLOCK)
    source, sides = _images(shape)[0], _sides(shape)
    is_near = all(padding <= side // 2 for padding, side in zip(shape.padding, sides, strict=True))
    is_spread = max(shape.dilation) > 1
    is_held = not is_spread or (not shape.is_strided and len(sides) < 3 and (len(sides) == 1 or sides[0] <= source[0]))
    is_narrow = shape.kernel[-1] <= _MAX_SIDE or (shape.kernel[-1] == source[-1] and not any(shape.padding))
    return is_near and is_held and is_narrow and (is_filled or not shape.is_blocked)


def _num_depthwise_sums(shape: ConvolutionShape) -> int:
    """Blocks of channels are dealt out first, and then samples; with channels last, rows, too."""
    if not shape.is_blocked:
        return shape.num_threads - 1
    blocks = min(_ceil(shape.channels, _BLOCK), shape.num_threads)
    return min(shape.num_threads // blocks, shape.num_samples) - 1


def _work(shape: ConvolutionShape) -> tuple[int, int, _Work]:
    """How many parts there may be, of which as many as threads are taken in the end, and the work itself."""
    (source, output), (inner, outer) = _images(shape), _channels(shape)
    by_rows = len(shape.kernel) == 2 and shape.is_blocked and shape.dilation[0] == 1 and output[0] > _MIN_ROWS
    source_rows, output_rows = (source[0], output[0]) if by_rows else (1, 1)
    depth = output[0] if len(shape.kernel) == 3 else 1
    max_parts = shape.num_samples * depth * max(1, output_rows // _MIN_ROWS)
    block = inner if inner < _BLOCK and shape.groups == 1 else _BLOCK
    work = _Work(
        num_sources=shape.num_samples * source_rows,
        num_outputs=shape.num_samples * output_rows,
        source_size=block * prod(source) // source_rows,
        output_size=_BLOCK * prod(output) // output_rows,
        input_blocks=_ceil(inner, block),
        output_blocks=_ceil(outer, _BLOCK),
        stride=prod(shape.stride),
        sum_cost=_SUM_COST * prod(shape.kernel) * block * _BLOCK,
    )
    return max_parts, max_parts, work


def _pointwise_work(shape: ConvolutionShape) -> tuple[int, int, _Work]:
    inner, outer = _channels(shape)
    pixels = _run_of_pixels(_images(shape)[1])
    num = shape.num_samples * prod(_images(shape)[1]) // pixels
    work = _Work(
        num_sources=num,
        num_outputs=num,
        source_size=_BLOCK * pixels,
        output_size=_BLOCK * pixels,
        input_blocks=_ceil(inner, _BLOCK),
        output_blocks=_ceil(outer, _BLOCK),
        stride=1,
        sum_cost=_POINTWISE_SUM_COST * _BLOCK * _BLOCK,
    )
    return num, shape.num_samples, work


def _run_of_pixels(image: tuple[int, ...]) -> int:
    """Pixels of a unit: the most from 7 to 16 that divide the image, or the fewest from 4 that divide a row."""
    pixels = prod(image)
    for length in range(min(pixels, 16), min(pixels, 7) - 1, -1):
        if pixels % length == 0:
            return length
    length = next(length for length in range(min(4, image[-1]), image[-1] + 1) if image[-1] % length == 0)
    return length if length <= 256 else 1


def _images(shape: ConvolutionShape) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes of the source and the output; a transposed convolution is computed as the plain one that it turns round."""
    source, output = tuple(shape.source.shape[2:]), tuple(shape.output.shape[2:])
    return (output, source) if shape.transposed else (source, output)


def _channels(shape: ConvolutionShape) -> tuple[int, int]:
    """Inputs and outputs of a group of the plain convolution."""
    return int(shape.weight.shape[1]), int(shape.weight.shape[0]) // shape.groups


def _sides(shape: ConvolutionShape) -> list[int]:
    """Sides of the kernel with what dilation leaves out."""
    return [step * (side - 1) + 1 for side, step in zip(shape.kernel, shape.dilation, strict=True)]


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)
