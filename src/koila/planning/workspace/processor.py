"""The processor, as far as the memory of kernels depends on it: facts that can be asked at run time, or handed in.

*Takes* what PyTorch and the environment say. *Gives* a `Processor`. The formulas are functions of one, so that those of
another machine can be asked on this one.

oneDNN chooses its kernels, and with them its layouts, by its own reading of the processor, which `ONEDNN_MAX_CPU_ISA`
bounds; PyTorch's capability (`ATEN_CPU_CAPABILITY`) chooses PyTorch's kernels only. Neither can be raised: a machine
without AVX-512 cannot run what is chosen with it, so formulas for it are by reading (`Processor.is_measured`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache

import torch

_NARROW = {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2"}
"""Values of `ONEDNN_MAX_CPU_ISA` that keep oneDNN below AVX-512."""


@dataclass(frozen=True, slots=True)
class Processor:
    """What the formulas of workspaces ask of a processor.

    >>> Processor(num_threads=2, channel_block=8).is_measured
    True
    """

    num_threads: int
    """How many threads a kernel may use: many have buffers for each."""
    channel_block: int
    """oneDNN pads channels to multiples of this: the floats of a register, 16 with AVX-512, else 8."""
    native: tuple[torch.dtype, ...] = ()
    """The half-precision types that oneDNN computes; for the others PyTorch has kernels of its own."""

    @property
    def is_measured(self) -> bool:
        """Whether the formulas were checked against the malloc hook on such a processor; else they are by reading."""
        return self.channel_block == 8 and not self.native

    def padded(self, num_channels: int) -> int:
        """Channels in oneDNN's blocked layouts.

        >>> [Processor(1, block).padded(20) for block in (8, 16)]
        [24, 32]
        """
        return -(-num_channels // self.channel_block) * self.channel_block


def this_processor() -> Processor:
    """The processor of this machine, with the number of threads that PyTorch uses now."""
    return _processor(torch.get_num_threads())


@cache
def _processor(num_threads: int) -> Processor:
    asked = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "")).upper()
    wide = torch.cpu._is_avx512_supported() and asked not in _NARROW
    supported = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    }
    return Processor(num_threads, 16 if wide else 8, tuple(dtype for dtype, native in supported.items() if native))
