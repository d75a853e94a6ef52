"""The sizes that formulas of convolutions are made of."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from math import prod

import torch

from koila._torch import suggested_format
from koila.planning.workspace.kernel_call import HALF, KernelCall, num_bytes
from koila.planning.workspace.processor import Isa


class ConvolutionShape:
    """A convolution and the bytes of its operands, whole, in blocks and unfolded."""

    def __init__(self, call: KernelCall, output: torch.Tensor) -> None:
        self.processor, self.num_threads = call.processor, call.num_threads
        self.source, self.weight, self.output = call["input"], call["weight"], output
        self.groups, self.transposed = call["groups"], call["transposed"]
        self.kernel = tuple(self.weight.shape[2:])
        self.stride, self.padding, self.dilation = (
            _spread(call[name], len(self.kernel)) for name in ("stride", "padding", "dilation")
        )
        self.num_samples, self.channels = self.source.shape[:2]
        self.is_strided = max(self.stride) > 1
        self.is_half = self.source.dtype in HALF
        self.is_depthwise = self.groups == self.channels > 1

    def with_avx2(self) -> ConvolutionShape:
        """The same convolution, where kernels of AVX2 run."""
        other = copy(self)
        other.processor = replace(self.processor, isa=Isa.AVX2)
        return other

    @property
    def is_flat(self) -> bool:
        """Whether oneDNN reads an image with so few channels as it is; kernels of one pixel never do."""
        few = (1, 2, 3) if self.processor.isa is Isa.AVX512 else (3,)
        return self.weight.shape[1] in few and self.groups == 1 and prod(self.kernel) > 1

    @property
    def is_blocked(self) -> bool:
        """Whether oneDNN copies into its blocked layout; channels last it takes as they are."""
        if self.source.dim() != 4:
            return True
        return all(suggested_format(tensor) is not torch.channels_last for tensor in (self.source, self.weight))

    @property
    def is_plain_product(self) -> bool:
        return prod(self.kernel) == 1 and not self.is_strided and not any(self.padding)

    @property
    def columns(self) -> int:
        """Bytes of the unfolded image of a sample and a group."""
        image, channels = (self.source, self.output.shape[1]) if self.transposed else (self.output, self.channels)
        return channels // self.groups * prod(self.kernel) * prod(image.shape[2:]) * self.source.element_size()

    def blocked(self, tensor: torch.Tensor) -> int:
        """Bytes of a source or an output with its channels in blocks."""
        return num_bytes(tensor) // tensor.shape[1] * self.processor.padded(tensor.shape[1])

    def blocked_source(self) -> int:
        return 0 if self.is_flat and not self.transposed else self.blocked(self.source)

    def blocked_output(self) -> int:
        """A transposed convolution reads its output where a plain one reads its source."""
        return 0 if self.is_flat and self.transposed else self.blocked(self.output)

    def blocked_weight(self, *, is_flat: bool = False, by_group: bool = False) -> int:
        """Bytes of the weight in blocks of outputs and, unless channels are few, of inputs.

        Some kernels want larger blocks of the outputs or of the inputs alone.
        """
        outer, inner = self.weight.shape[:2]
        num_groups = self.groups if by_group else 1
        outer, is_plain = outer // num_groups, is_flat or (self.groups > 1 and not by_group)
        padded = self.processor.padded
        pairs = padded(outer) * (inner if is_plain else padded(inner))
        if self.groups == 1 or not self.is_blocked:
            wide = self.processor.widely_padded
            pairs = max(pairs, wide(outer) * inner, 0 if is_plain else outer * wide(inner))
        return num_bytes(self.weight) // self.weight.shape[:2].numel() * num_groups * pairs

    def padded_sample(self, image: torch.Tensor) -> int:
        """Bytes of one sample with a border as wide as the kernel."""
        sizes = (size + side - 1 for size, side in zip(image.shape[2:], self.kernel, strict=True))
        return self.processor.padded(image.shape[1]) * prod(sizes) * max(4, image.element_size())


def _spread(value: Sequence[int], num: int) -> tuple[int, ...]:
    return tuple(value) * num if len(value) == 1 else tuple(value)
