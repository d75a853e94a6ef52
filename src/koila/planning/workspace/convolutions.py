"""Convolutions: oneDNN's copies into its blocked layout and out of it, and PyTorch's unfolded images.

oneDNN wants channels in blocks: it copies its operands into that layout, and its result out of it. Where it does not
compute a type (`Processor.native`), PyTorch unfolds the image and multiplies matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from koila.planning.workspace.copies import copy_bytes, image_copy_bytes
from koila.planning.workspace.kernel_call import HALF, Formula, KernelCall, num_bytes

aten = torch.ops.aten

PRIMITIVE_BYTES = 40 << 10
"""What a oneDNN primitive needs for itself."""


class _Convolution:
    """The bytes that convolution formulas are made of."""

    def __init__(self, call: KernelCall, output: torch.Tensor) -> None:
        self.processor = call.processor
        self.source, self.weight, self.output = call["input"], call["weight"], output
        self.groups, self.transposed = call["groups"], call["transposed"]
        self.kernel = tuple(self.weight.shape[2:])
        self.stride, self.padding, self.dilation = (
            _spread(call[name], len(self.kernel)) for name in ("stride", "padding", "dilation")
        )
        self.is_strided = max(self.stride) > 1
        self.is_half = self.source.dtype in HALF
        self.channels = self.source.shape[1]
        self.is_depthwise = self.groups == self.channels > 1
        self.is_flat = self.channels == 3
        self.backend = str(_backend(call, output)).rpartition(".")[2]

    @property
    def is_blocked(self) -> bool:
        """Whether oneDNN copies into its blocked layout."""
        if self.source.dim() != 4:
            return True
        last = torch.channels_last
        tensors = (self.source, self.weight)
        return not any(t.is_contiguous(memory_format=last) and not t.is_contiguous() for t in tensors)

    @property
    def columns(self) -> int:
        """Bytes of the unfolded image of a sample and a group."""
        image, channels = (self.source, self.output.shape[1]) if self.transposed else (self.output, self.channels)
        return channels // self.groups * prod(self.kernel) * prod(image.shape[2:]) * self.source.element_size()

    @property
    def is_plain_product(self) -> bool:
        return prod(self.kernel) == 1 and not self.is_strided and not any(self.padding)

    @property
    def has_gemm_gradient(self) -> bool:
        """Whether oneDNN's gradient of the weight unfolds the image instead."""
        group = self.channels // self.groups
        far = self.is_depthwise and any(p > k // 2 for p, k in zip(self.padding, self.kernel, strict=True))
        uneven = self.groups > 1 and not (self.is_depthwise and self.output.shape[1] == self.channels)
        odd = uneven and (
            group % self.processor.channel_block != 0
            or self.output.shape[1] // self.groups % self.processor.channel_block != 0
        )
        deep = len(self.kernel) == 3 and prod(self.kernel) > 1
        return max(self.dilation) > 1 or max(self.kernel) >= 14 or far or odd or deep

    def blocked(self, tensor: torch.Tensor) -> int:
        return num_bytes(tensor) // tensor.shape[1] * self.processor.padded(tensor.shape[1])

    def blocked_source(self) -> int:
        return 0 if self.is_flat else self.blocked(self.source)

    def blocked_weight(self) -> int:
        outer, inner = self.weight.shape[:2]
        is_plain = self.is_flat or self.groups > 1
        padded = self.processor.padded(outer) * (inner if is_plain else self.processor.padded(inner))
        return num_bytes(self.weight) // (outer * inner) * padded

    def unit_stride(self) -> int:
        """A 1×1 kernel with a stride first gathers what it reads."""
        if prod(self.kernel) > 1 or not self.is_strided:
            return 0
        return self.processor.num_threads * self.channels * prod(self.output.shape[2:]) * self.source.element_size()

    # The most that is alive, results included, while each of three things is computed.

    def forward_peak(self) -> int:
        output = num_bytes(self.output)
        if not self.is_blocked:
            return output + self.blocked_weight() + (64 << 10)
        made = self.blocked(self.output)
        held = self.blocked_source() + self.blocked_weight() + made
        if self.transposed:
            return max(held + made, 3 * made if self.is_strided else 0) + PRIMITIVE_BYTES
        return max(held + self.unit_stride(), made + output) + PRIMITIVE_BYTES

    def source_peak(self) -> int:
        """For the gradient of the input."""
        source = num_bytes(self.source)
        if not self.is_blocked:
            return source + self.blocked_weight() + (140 << 10)
        weight, given = self.blocked_weight(), self.blocked(self.output)
        if self.transposed:
            return max(given + weight + self.blocked(self.source), 2 * source) + PRIMITIVE_BYTES
        if not self.is_strided:
            made = self.blocked(self.source)
            return max(given + num_bytes(self.weight) + made, made + source) + PRIMITIVE_BYTES
        if self.is_flat:
            return max(given + num_bytes(self.weight) + 5 * source // 2, 3 * source) + PRIMITIVE_BYTES
        return max(given + weight + self.blocked(self.source), 3 * source) + PRIMITIVE_BYTES

    def weight_peak(self) -> int:
        """For the gradient of the weight."""
        weight = num_bytes(self.weight)
        if not self.is_blocked:
            return weight + 2 * self.blocked_weight() + PRIMITIVE_BYTES
        made = self.blocked_weight()
        if self.has_gemm_gradient:
            depth = self.output.shape[2] if len(self.kernel) == 3 else 1
            scratch = self.processor.num_threads * (self.columns // depth + 4 * weight)
            return max(scratch + weight, made + weight) + PRIMITIVE_BYTES
        held = self.blocked_source() + self.blocked(self.output) + made + self.unit_stride()
        return max(held, made + weight) + PRIMITIVE_BYTES

    # The same without oneDNN: kernels unfold the image.

    def unfolded(self) -> tuple[int, int, int]:
        """Hidden bytes of the forward, of the gradient of the input, and of the gradient of the weight."""
        samples = self.source.shape[0]
        widened = 3 * self.columns if self.is_half else self.columns
        whole = samples * self.columns
        if self.transposed:
            return whole + (2 * self.columns if self.is_half else 0), self.columns, self.columns
        if self.backend.startswith("SlowDilated"):
            return self.columns, widened, self.columns
        if len(self.kernel) == 3:
            return (0 if self.is_plain_product else whole), whole, (0 if self.is_plain_product else whole)
        whole = 0 if self.is_plain_product else whole
        if self.groups == 1:
            return whole, widened, whole
        source, output = num_bytes(self.source) // self.groups, num_bytes(self.output) // self.groups
        forward = max(whole + source, num_bytes(self.output))
        backward = max(widened + source + output, num_bytes(self.source) + min(2 * (source + output), 128 << 10))
        return forward, backward, whole + source + output


def _spread(value: Sequence[int], num: int) -> tuple[int, ...]:
    return tuple(value) * num if len(value) == 1 else tuple(value)


def _backend(call: KernelCall, output: torch.Tensor) -> Any:
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "transposed", "output_padding", "groups")
    return torch._C._select_conv_backend(*(call.arguments.get(name) for name in names), [output.shape[1]])


def _uses_onednn(convolution: _Convolution) -> bool:
    # The backend of transposed convolutions has no name in Python.
    return convolution.backend in ("Mkldnn", "???") or "Mkldnn" in convolution.backend


def _convolution(call: KernelCall) -> int:
    result = call.result
    found = _Convolution(call, result)
    if found.backend.startswith("Empty"):
        return 0
    contiguous = image_copy_bytes(found.source)
    if _uses_onednn(found):
        return contiguous + found.forward_peak() - num_bytes(result)
    return contiguous + found.unfolded()[0]


def _convolution_backward(call: KernelCall) -> int:
    """First the gradient of the input, then that of the weight, then, without oneDNN, that of the bias."""
    found = _Convolution(call, call["grad_output"])
    if found.backend.startswith("Empty"):
        return 0
    wanted = call["output_mask"]
    source, weight, bias = (
        num_bytes(tensor) if asked else 0 for tensor, asked in zip(call.result, wanted, strict=True)
    )
    # The layout of the input and the weight decides: a gradient in channels last is copied, too.
    copied = copy_bytes if found.is_blocked else image_copy_bytes
    contiguous = copied(found.source) + copied(found.output)
    if _uses_onednn(found):
        peaks = (found.source_peak(), source + found.weight_peak(), 0)
    else:
        _, for_source, for_weight = found.unfolded()
        for_bias = 2 * num_bytes(found.output) // found.groups if found.is_half else 0
        peaks = (source + weight + for_source, source + weight + for_weight, source + weight + bias + for_bias)
    peak = max(peak for peak, asked in zip(peaks, wanted, strict=True) if asked)
    return contiguous + max(0, peak - source - weight - bias)


ROWS: dict[Any, Formula] = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
}
