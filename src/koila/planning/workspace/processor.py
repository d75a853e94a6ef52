"""The processor, as far as the memory of kernels depends on it: facts that can be asked at run time, or handed in.

*Takes* what PyTorch and the environment say. *Gives* a `Processor`. The formulas are functions of one, so that those of
another machine can be asked on this one.

oneDNN chooses its kernels, and with them its layouts, by its own reading of the processor, which `ONEDNN_MAX_CPU_ISA`
bounds; `ATEN_CPU_CAPABILITY` bounds PyTorch's own kernels only. Neither can raise it: what is chosen with AVX-512 can
be measured only on a machine that has it. `Processor.is_measured` says which formulas were all checked to be close by
the malloc hook: those of AVX2. With AVX-512, convolutions in float32 were, at 1 to 16 threads, and products in float32;
half precision that oneDNN computes itself has upper bounds by reading the sources of oneDNN 3.12 and PyTorch 2.13, as
everything has below AVX2.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import IntEnum
from functools import cache

import torch

from koila._torch import has_avx2, has_avx512, onednn_has_bfloat16, onednn_has_float16


class Isa(IntEnum):
    """The sets of instructions between which oneDNN's layouts and choices of kernels change."""

    SSE41 = 1
    AVX2 = 2
    AVX512 = 3


_BOUNDS = {"SSE41": Isa.SSE41, "AVX": Isa.SSE41, "AVX2": Isa.AVX2, "AVX2_VNNI": Isa.AVX2, "AVX2_VNNI_2": Isa.AVX2}
"""What values of `ONEDNN_MAX_CPU_ISA` bound; all others allow AVX-512."""


@dataclass(frozen=True, slots=True)
class Processor:
    """What the formulas of workspaces ask of a processor.

    >>> Processor(num_threads=2, isa=Isa.AVX2).is_measured
    True
    """

    num_threads: int
    """How many threads a kernel may use: many have buffers for each."""
    isa: Isa
    """The best that oneDNN may use."""
    native: tuple[torch.dtype, ...] = ()
    """The half-precision types that oneDNN computes; for the others PyTorch has kernels of its own."""

    @property
    def is_measured(self) -> bool:
        """Whether the malloc hook has checked that formulas are close; else they are upper bounds."""
        return self.isa is Isa.AVX2 and not self.native

    @property
    def channel_block(self) -> int:
        """oneDNN pads channels to multiples of this."""
        return 16 if self.isa is Isa.AVX512 else 8

    def padded(self, num_channels: int) -> int:
        """Channels in oneDNN's blocked layouts.

        >>> [Processor(1, isa).padded(20) for isa in (Isa.AVX2, Isa.AVX512)]
        [24, 32]
        """
        return -(-num_channels // self.channel_block) * self.channel_block

    def widely_padded(self, num_channels: int) -> int:
        """Channels in blocks of several, at most, as products of blocks want them.

        With AVX2 they have 16 to 32 channels; with AVX-512 32, or 48 if these are filled to 95 %.

        >>> [Processor(1, isa).widely_padded(40) for isa in (Isa.AVX2, Isa.AVX512)]
        [64, 64]
        """
        if num_channels <= self.channel_block:
            return self.channel_block
        by_32, by_3 = (-(-num_channels // block) * block for block in (32, 3 * self.channel_block))
        is_filled = self.isa is not Isa.AVX512 or num_channels >= 0.95 * by_3
        return max(by_32, by_3) if is_filled else by_32


def this_processor() -> Processor:
    """The processor of this machine, with the number of threads that PyTorch uses now."""
    return _processor(torch.get_num_threads())


@cache
def _processor(num_threads: int) -> Processor:
    asked = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "")).upper()
    best = Isa.AVX512 if has_avx512() else Isa.AVX2 if has_avx2() else Isa.SSE41
    supported = {
        torch.bfloat16: onednn_has_bfloat16(),
        torch.float16: onednn_has_float16(),
    }
    native = tuple(dtype for dtype, is_native in supported.items() if is_native)
    return Processor(num_threads, min(best, _BOUNDS.get(asked, Isa.AVX512)), native)
