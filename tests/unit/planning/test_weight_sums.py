"""Gradients of convolutions' weights with AVX-512: never below what was measured, and close to it, at any threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.witness import Watch, call_outside
from koila.planning.workspace import Isa, Processor, this_processor, workspace_bytes

aten = torch.ops.aten
HALVES = (torch.bfloat16, torch.float16)
KIB = 1024
SLACK_BYTES = 512 * KIB
MEASURED = [
    # Image, weight, stride, padding, dilation, groups, channels last, threads, measured bytes: by the malloc hook.
    ((1, 512, 7, 7), (512, 512, 3, 3), 1, 1, 1, 1, False, 2, 9458936),
    ((32, 512, 7, 7), (512, 512, 3, 3), 1, 1, 1, 1, False, 2, 9459032),
    ((8, 64, 56, 56), (64, 64, 3, 3), 1, 1, 1, 1, False, 2, 13027720),
    ((8, 64, 56, 56), (64, 64, 3, 3), 1, 1, 1, 1, False, 8, 13913992),
    ((8, 3, 112, 112), (64, 3, 7, 7), 2, 3, 1, 1, False, 8, 6569984),
    ((8, 512, 28, 28), (1024, 512, 1, 1), 2, 0, 1, 1, False, 8, 20098968),
    ((8, 96, 28, 28), (96, 1, 3, 3), 1, 1, 1, 96, False, 8, 4849280),
    ((8, 96, 28, 28), (96, 1, 5, 5), 1, 2, 1, 96, True, 8, 2479696),
    ((2, 512, 2, 2), (64, 512, 3, 3), 1, 2, 2, 1, False, 8, 38437752),
]


def gradient_call(
    image: tuple[int, ...], weight: tuple[int, ...], stride: int, padding: int, dilation: int, groups: int, last: bool
) -> tuple[Any, ...]:
    """Arguments of the gradient of a weight."""
    layout = torch.channels_last if last else torch.contiguous_format
    x, w = (torch.randn(shape).to(memory_format=layout) for shape in (image, weight))
    how = ([stride] * 2, [padding] * 2, [dilation] * 2, False, [0, 0], groups)
    return (torch.randn_like(aten.convolution(x, w, None, *how)), x, w, [weight[0]], *how, [False, True, False])


def projected_bytes(processor: Processor, *how: Any, dtype: torch.dtype = torch.float32) -> int:
    with FakeTensorMode():
        args = [each.to(dtype) if isinstance(each, torch.Tensor) else each for each in gradient_call(*how)]
        result = aten.convolution_backward(*args)
    return workspace_bytes(aten.convolution_backward.default, args, result, None, processor)


@pytest.mark.parametrize("row", MEASURED, ids=str)
def test_gradients_of_weights_are_projected_closely(row: tuple[Any, ...]) -> None:
    *how, num_threads, measured = row
    projected = projected_bytes(Processor(num_threads, Isa.AVX512), *how)
    assert measured <= projected <= 1.1 * measured + SLACK_BYTES


def test_threads_share_deep_weights_out_and_add_up_flat_ones() -> None:
    """Where blocks of a weight are many, no thread has a gradient of its own, whatever the batch is."""
    deep, flat = MEASURED[1][:7], MEASURED[2][:7]
    one, many = (projected_bytes(Processor(number, Isa.AVX512), *deep) for number in (1, 16))
    assert many - one < 64 * 64 * 9 * 4
    few, more = (projected_bytes(Processor(number, Isa.AVX512), *flat) for number in (2, 16))
    assert more - few >= 6 * 64 * 64 * 9 * 4


def deep_gradients() -> list[int]:
    """Measured bytes of the gradient of a deep weight, for batches of 1, 8 and 32; runs under the hook."""
    torch.set_num_threads(2)
    found = []
    for samples in (1, 8, 32):
        args = gradient_call((samples, 512, 7, 7), (512, 512, 3, 3), 1, 1, 1, 1, False)
        aten.convolution_backward(*args)
        with Watch() as watch:
            result = aten.convolution_backward(*args)
        found.append(watch.peak_bytes - result[1].numel() * 4)
    return found


def test_a_deep_layer_at_two_threads_is_not_below_what_this_machine_needs() -> None:
    processor = Processor(2, this_processor().isa)
    measured = call_outside("tests.unit.planning.test_weight_sums:deep_gradients")
    for samples, each in zip((1, 8, 32), measured, strict=True):
        projected = projected_bytes(processor, (samples, 512, 7, 7), (512, 512, 3, 3), 1, 1, 1, 1, False)
        assert each <= projected
        assert projected <= 1.1 * each + SLACK_BYTES or processor.isa is Isa.SSE41


def test_half_precision_that_onednn_computes_keeps_its_reserve() -> None:
    how = MEASURED[1][:7]
    plain = projected_bytes(Processor(2, Isa.AVX512), *how)
    native = projected_bytes(Processor(2, Isa.AVX512, HALVES), *how, dtype=torch.bfloat16)
    assert native > plain + 2 * 512 * 512 * 9 * 4
