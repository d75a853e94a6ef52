"""Checks the formulas of `koila.planning.workspace` against the malloc hook: `python -m benchmarks.calibrate`.

*Takes* calls of operators over shapes, layouts and types. *Gives* a table: what each operator allocates beyond its
results, by measurement and by formula, the slope of the one against the other, and the worst differences.

To add an operator: add its calls here, read what is measured, and write the formula that explains it.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_iter, tree_map_only

from benchmarks.witness import Watch, call_outside
from koila.ir.recurrent import LAYER, LAYER_BACKWARD
from koila.planning.workspace import num_bytes, this_processor, workspace_bytes
from koila.planning.workspace.forms import form_of

aten = torch.ops.aten
f32, f64, bf16, f16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
RESULTS = Path(__file__).with_name("results")
MIB = 2**20
SLACK_BYTES = MIB // 2
"""How far above a measurement a formula may be, besides a tenth of it."""


@dataclass(frozen=True)
class Call:
    """A call to measure."""

    target: OpOverload
    args: tuple[Any, ...]
    note: str = ""
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Reading:
    """What a call allocated beyond its results."""

    operator: str
    note: str
    measured_bytes: int
    formula_bytes: int

    @property
    def is_under(self) -> bool:
        """The formula promises less than was measured; blocks below a page or so are not looked at."""
        return self.formula_bytes + 32 * 1024 < self.measured_bytes

    @property
    def is_over(self) -> bool:
        return self.formula_bytes > 1.1 * self.measured_bytes + SLACK_BYTES


def read(call: Call) -> Reading:
    """Measure a call, and ask the formula on fake tensors."""
    call.target(*call.args, **call.kwargs)  # Libraries fill their caches.
    gc.collect()
    with Watch() as watch:
        result = call.target(*call.args, **call.kwargs)
    with FakeTensorMode() as mode:
        args, kwargs = tree_map_only(torch.Tensor, mode.from_tensor, (call.args, dict(call.kwargs)))
        fake = call.target(*args, **kwargs)
        formula = workspace_bytes(call.target, args, fake, kwargs)
    # What fake results lack counts as hidden; memory that was given is not new.
    is_new = not form_of(call.target).writes
    hidden = watch.peak_bytes - (min(visible_bytes(result), visible_bytes(fake)) if is_new else 0)
    return Reading(str(call.target).removeprefix("aten."), call.note or describe(call.args), max(0, hidden), formula)


def visible_bytes(result: Any) -> int:
    """Bytes of results, as their shapes say."""
    return sum(num_bytes(leaf) for leaf in tree_iter(result) if isinstance(leaf, torch.Tensor))


def describe(args: tuple[Any, ...]) -> str:
    """Shapes and layouts of the tensors, and the numbers."""

    def one(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            layout = "" if value.is_contiguous() else " strided"
            return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}{layout}"
        return "" if value is None else str(value)

    return ", ".join(filter(None, map(one, args)))


# The calls, one generator for each family.


def _randn(*shape: int, dtype: torch.dtype = f32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def _conv(
    shape: tuple[int, ...],
    weight: tuple[int, ...],
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    groups: int = 1,
    dtype: torch.dtype = f32,
    transposed: bool = False,
    layout: torch.memory_format = torch.contiguous_format,
) -> Iterator[Call]:
    """The forward and the gradients of a convolution."""
    num = len(shape) - 2
    x, w = _randn(*shape, dtype=dtype).to(memory_format=layout), _randn(*weight, dtype=dtype).to(memory_format=layout)
    outputs = weight[1] * groups if transposed else weight[0]
    how = ([stride] * num, [padding] * num, [dilation] * num, transposed, [0] * num, groups)
    note = f"{list(shape)} * {list(weight)} stride {stride} dilation {dilation} groups {groups}"
    note += f" {str(dtype).removeprefix('torch.')}{' transposed' * transposed}"
    note += "" if layout == torch.contiguous_format else " channels last"
    yield Call(aten.convolution.default, (x, w, _randn(outputs, dtype=dtype), *how), note)
    gradient = torch.randn_like(aten.convolution(x, w, None, *how))
    for mask in ([True, False, False], [False, True, False], [True, True, True]):
        wanted = " ".join(name for name, asked in zip(("x", "w", "b"), mask, strict=True) if asked)
        yield Call(
            aten.convolution_backward.default, (gradient, x, w, [outputs], *how, mask), f"{note}, gradient of {wanted}"
        )


def convolutions() -> Iterator[Call]:
    for samples in (1, 2, 8):
        yield from _conv((samples, 64, 32, 32), (64, 64, 3, 3), 1, 1)
    yield from _conv((8, 32, 32, 32), (128, 32, 3, 3), 1, 1)
    yield from _conv((8, 128, 32, 32), (32, 128, 3, 3), 1, 1)
    yield from _conv((8, 3, 64, 64), (64, 3, 7, 7), 2, 3)
    yield from _conv((8, 3, 64, 64), (60, 3, 3, 3), 1, 1)
    yield from _conv((8, 1, 64, 64), (32, 1, 3, 3), 1, 1)
    yield from _conv((8, 4, 64, 64), (32, 4, 3, 3), 1, 1)
    yield from _conv((8, 12, 64, 64), (20, 12, 3, 3), 1, 1)
    yield from _conv((8, 3, 64, 64), (96, 3, 16, 16), 16)
    yield from _conv((8, 64, 32, 32), (256, 64, 1, 1))
    yield from _conv((16, 64, 32, 32), (256, 64, 1, 1))
    yield from _conv((16, 256, 32, 32), (64, 256, 1, 1), 2)
    yield from _conv((8, 128, 32, 32), (256, 128, 1, 1), 2)
    yield from _conv((8, 64, 32, 32), (128, 64, 3, 3), 2, 1)
    yield from _conv((8, 512, 7, 7), (512, 512, 3, 3), 1, 1)
    yield from _conv((2, 64, 32, 32), (64, 64, 4, 4), 2, 1)
    yield from _conv((1, 16, 16, 16), (64, 16, 3, 3), 1, 1)
    for outputs in (32, 64, 128):
        yield from _conv((8, 64, 32, 32), (outputs, 64, 3, 3), 1, 2, 2)
    yield from _conv((8, 64, 32, 32), (64, 1, 3, 3), 1, 1, groups=64)
    yield from _conv((8, 60, 32, 32), (60, 1, 3, 3), 1, 1, groups=60)
    yield from _conv((8, 64, 32, 32), (64, 16, 3, 3), 1, 1, groups=4)
    yield from _conv((8, 48, 32, 32), (96, 24, 3, 3), 2, 1, groups=2)
    yield from _conv((8, 64, 32, 32), (64, 64, 3, 3), 1, 1, layout=torch.channels_last)
    yield from _conv((8, 256, 512), (256, 256, 3), 1, 1)
    yield from _conv((8, 256, 512), (512, 256, 5), 2, 2)
    yield from _conv((8, 256, 512), (256, 1, 4), 1, 3, groups=256)
    yield from _conv((8, 256, 512), (256, 256, 3), 1, 2, 2)
    yield from _conv((4, 32, 16, 16, 16), (32, 32, 3, 3, 3), 1, 1)
    yield from _conv((1, 32, 16, 16, 16), (32, 32, 3, 3, 3), 1, 1)
    yield from _conv((8, 128, 16, 16), (128, 64, 2, 2), 2, transposed=True)
    yield from _conv((8, 64, 32, 32), (64, 32, 4, 4), 2, 1, transposed=True)
    yield from _conv((8, 32, 32, 32), (32, 64, 3, 3), 1, 1, transposed=True)
    yield from _conv((1, 64, 16, 16), (64, 32, 2, 2), 2, transposed=True)
    yield from _conv((1, 3, 224, 224), (64, 3, 7, 7), 2, 3)
    yield from _conv((1, 3, 64, 64), (512, 3, 5, 5), 2, 2)
    yield from _conv((8, 3, 64, 64), (64, 3, 7, 7), 1, 3)
    yield from _conv((4, 4, 64, 64), (32, 4, 5, 5), 2, 2)
    yield from _conv((2, 3, 1024), (64, 3, 5), 2, 2)
    yield from _conv((2, 3, 16, 32, 32), (64, 3, 3, 3, 3), 2, 1)
    yield from _conv((2, 64, 32, 32), (64, 64, 1, 1), 2)
    yield from _conv((8, 8, 32, 32), (8, 8, 3, 3), 1, 1)


def convolutions_in_channels_last() -> Iterator[Call]:
    last = torch.channels_last
    yield from _conv((4, 3, 64, 64), (64, 3, 7, 7), 2, 3, layout=last)
    yield from _conv((4, 3, 64, 64), (64, 3, 3, 3), 1, 1, layout=last)
    yield from _conv((4, 64, 32, 32), (128, 64, 1, 1), layout=last)
    yield from _conv((4, 64, 32, 32), (128, 64, 1, 1), 2, layout=last)
    yield from _conv((4, 64, 32, 32), (128, 64, 3, 3), 2, 1, layout=last)
    yield from _conv((4, 64, 32, 32), (64, 1, 3, 3), 1, 1, groups=64, layout=last)
    yield from _conv((4, 64, 32, 32), (64, 16, 3, 3), 1, 1, groups=4, layout=last)
    yield from _conv((4, 64, 32, 32), (64, 64, 3, 3), 1, 2, 2, layout=last)
    yield from _conv((4, 64, 16, 16), (64, 32, 2, 2), 2, transposed=True, layout=last)
    yield from _conv((1, 512, 14, 14), (512, 512, 3, 3), 1, 1, layout=last)
    for dtype in (f64, bf16):
        yield from _conv((4, 64, 32, 32), (32, 64, 3, 3), 1, 1, dtype=dtype, layout=last)
        yield from _conv((4, 64, 32, 32), (64, 1, 3, 3), 1, 1, groups=64, dtype=dtype, layout=last)
        yield from _conv((4, 64, 16, 16), (64, 32, 2, 2), 2, transposed=True, dtype=dtype, layout=last)


def convolutions_without_onednn() -> Iterator[Call]:
    for dtype in (f64, bf16):
        yield from _conv((8, 64, 32, 32), (16, 64, 3, 3), 1, 1, dtype=dtype)
        yield from _conv((8, 64, 32, 32), (24, 64, 3, 3), 2, 1, dtype=dtype)
        yield from _conv((8, 64, 32, 32), (64, 16, 3, 3), 1, 1, groups=4, dtype=dtype)
        yield from _conv((8, 64, 32, 32), (64, 1, 3, 3), 1, 1, groups=64, dtype=dtype)
        yield from _conv((8, 64, 32, 32), (32, 64, 1, 1), dtype=dtype)
        yield from _conv((8, 64, 32, 32), (16, 64, 3, 3), 1, 2, 2, dtype=dtype)
        yield from _conv((8, 16, 32, 32), (16, 64, 2, 2), 2, transposed=True, dtype=dtype)


def products() -> Iterator[Call]:
    for dtype in (f32, bf16, f16):
        for rows, inner, columns in ((1024, 64, 1024), (1024, 512, 128), (64, 2048, 128)):
            a, b = _randn(rows, inner, dtype=dtype), _randn(inner, columns, dtype=dtype)
            turned_a, turned_b = a.t().contiguous().t(), b.t().contiguous().t()
            strided_a, strided_b = _randn(rows, 2 * inner, dtype=dtype)[:, ::2], torch.cat([b, b], 1)[:, ::2]
            expanded = a[:, :1].expand(rows, inner)
            bias = _randn(columns, dtype=dtype)
            pairs = {
                "n n": (a, b),
                "t n": (turned_a, b),
                "n t": (a, turned_b),
                "t t": (turned_a, turned_b),
                "strided n": (strided_a, b),
                "n strided": (a, strided_b),
                "expanded n": (expanded, b),
                "a column": (a[:1].t(), b[:1]),
            }
            for layout, pair in pairs.items():
                note = f"{rows}×{inner} @ {inner}×{columns} {layout} {str(dtype).removeprefix('torch.')}"
                yield Call(aten.mm.default, pair, note)
                yield Call(aten.addmm.default, (bias, *pair), note)
        for batch, rows, inner, columns in ((4, 512, 16, 512), (8, 256, 32, 256)):
            a, b = _randn(batch, rows, inner, dtype=dtype), _randn(batch, inner, columns, dtype=dtype)
            turned_a, turned_b = a.mT.contiguous().mT, b.mT.contiguous().mT
            strided = torch.cat([a, a], 2)[..., ::2]
            permuted = a.transpose(0, 1).contiguous().transpose(0, 1)
            for pair in ((a, b), (turned_a, b), (a, turned_b), (turned_a, turned_b), (strided, b), (permuted, b)):
                yield Call(aten.bmm.default, pair)
                yield Call(aten.baddbmm.default, (_randn(batch, rows, columns, dtype=dtype), *pair))


def attention() -> Iterator[Call]:
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    sizes = [(4, 8, 256, 256, 32), (4, 8, 512, 512, 32), (4, 8, 256, 1024, 32), (4, 8, 1024, 256, 32)]
    sizes += [(4, 8, 768, 768, 64), (2, 8, 64, 64, 64), (8, 12, 197, 197, 64)]
    for dtype in (f32, bf16):
        for batch, heads, queries, keys, head in sizes:
            q = _randn(batch, heads, queries, head, dtype=dtype)
            k, v = (_randn(batch, heads, keys, head, dtype=dtype) for _ in range(2))
            out, scale = forward(q, k, v, 0.0, False)
            yield Call(forward, (q, k, v, 0.0, queries == keys))
            yield Call(backward, (out, q, k, v, out, scale, 0.0, queries == keys))


def recurrent() -> Iterator[Call]:
    for length, batch, width, hidden in (
        (64, 32, 64, 128),
        (128, 32, 64, 128),
        (64, 32, 256, 128),
        (64, 32, 64, 256),
        (32, 16, 256, 256),
        (64, 1, 256, 256),
        (256, 8, 128, 128),
    ):
        x, h = _randn(length, batch, width), _randn(batch, hidden)
        weights = (_randn(4 * hidden, width), _randn(4 * hidden, hidden), _randn(4 * hidden), _randn(4 * hidden))
        how = (2, hidden, 1, True, False, False)
        note = f"LSTM {length} steps, batch {batch}, {width} to {hidden}"
        for train in (False, True):
            yield Call(
                aten.mkldnn_rnn_layer.default, (x, *weights, h, h, False, [], *how, train), note + " train" * train
            )
        y, hy, cy, workspace = aten.mkldnn_rnn_layer(x, *weights, h, h, False, [], *how, True)
        for gradient in (y, y.transpose(0, 1).contiguous().transpose(0, 1)):
            given = (y, hy, cy, gradient, hy, cy, False, 2, hidden, 1, True, True, False, [], False, workspace)
            yield Call(aten.mkldnn_rnn_layer_backward.default, (x, *weights, h, h, *given), note)
    for kind, gates, dtype in (("gru", 3, f32), ("lstm", 4, f64), ("rnn_tanh", 1, f32)):
        for sizes in ((64, 32, 64, 128), (32, 16, 128, 256)):
            yield from _layers(kind, sizes, gates, dtype)


def _layers(kind: str, sizes: tuple[int, int, int, int], gates: int, dtype: torch.dtype) -> Iterator[Call]:
    """A layer that PyTorch computes step by step, in both directions, and its backward."""
    length, batch, width, hidden = sizes
    num_states = 2 if kind == "lstm" else 1
    x, state = _randn(length, batch, width, dtype=dtype), _randn(batch, hidden * num_states, dtype=dtype)
    shapes = ((gates * hidden, width), (gates * hidden, hidden), (gates * hidden,), (gates * hidden,))
    operands = (x, state, *(_randn(*shape, dtype=dtype) for shape in shapes))
    note = f"{kind} {length} steps, batch {batch}, {width} to {hidden}"
    output, last = LAYER(*operands, kind, False)
    for reverse in (False, True):
        yield Call(LAYER, (*operands, kind, reverse), note + " back" * reverse)
        yield Call(LAYER_BACKWARD, (output, last, *operands, kind, reverse), note + " back" * reverse)


def norms() -> Iterator[Call]:
    for dtype in (f32, bf16):
        for x in (_randn(64, 512, 128, dtype=dtype), _randn(512, 64, 128, dtype=dtype).transpose(0, 1)):
            w = _randn(128, dtype=dtype)
            y, mean, scale = aten.native_layer_norm(x, [128], w, w, 1e-5)
            yield Call(aten.native_layer_norm.default, (x, [128], w, w, 1e-5))
            for gradient in (torch.randn_like(y), x):
                args = (gradient, x, [128], mean, scale, w, w, [True, True, True])
                yield Call(aten.native_layer_norm_backward.default, args)
        x, w = _randn(64, 65536, dtype=dtype), _randn(65536, dtype=dtype)
        y, mean, scale = aten.native_layer_norm(x, [65536], w, w, 1e-5)
        args = (y, x, [65536], mean, scale, w, w, [True, True, True])
        yield Call(aten.native_layer_norm_backward.default, args)
        yield Call(aten._fused_rms_norm.default, (x, [65536], w, 1e-5))
        x, w = _randn(8, 64, 64, 64, dtype=dtype), _randn(64, dtype=dtype)
        y, mean, scale = aten.native_group_norm(x, w, w, 8, 64, 4096, 8, 1e-5)
        yield Call(aten.native_group_norm.default, (x, w, w, 8, 64, 4096, 8, 1e-5))
        yield Call(aten.native_group_norm_backward.default, (y, x, mean, scale, w, 8, 64, 4096, 8, [True] * 3))
        y, mean, scale = aten.native_batch_norm(x, w, w, None, None, True, 0.1, 1e-5)
        yield Call(aten.native_batch_norm.default, (x, w, w, None, None, True, 0.1, 1e-5))
        for gradient in (y, y.mT):
            args = (gradient, x, w, None, None, mean, scale, True, 1e-5, [True, True, True])
            yield Call(aten.native_batch_norm_backward.default, args)


def softmaxes() -> Iterator[Call]:
    for dtype in (f32, bf16):
        for x in (_randn(512, 4096, dtype=dtype), _randn(4096, 512, dtype=dtype).t()):
            for dim in (0, 1):
                for target in (aten._softmax.default, aten._log_softmax.default):
                    yield Call(target, (x, dim, False))
                for target in (aten._softmax_backward_data.default, aten._log_softmax_backward_data.default):
                    yield Call(target, (x, x, dim, dtype))
            yield Call(aten.logsumexp.default, (x, [1]))


def reductions() -> Iterator[Call]:
    for dtype in (f32, bf16):
        x, y = _randn(512, 4096, dtype=dtype), _randn(64, 32, 16, 64, dtype=dtype)
        for dim in ([0], [1], [0, 1]):
            yield Call(aten.sum.dim_IntList, (x, dim))
            yield Call(aten.mean.dim, (x, dim))
        for dim in ([0, 2], [2, 3], [1, 3], [0, 1, 3], [0, 2, 3]):
            yield Call(aten.sum.dim_IntList, (y, dim))
        yield Call(aten.sum.dim_IntList, (y.transpose(0, 1), [0, 1]))
        for target in (aten.sum.default, aten.mean.default, aten.any.default, aten.linalg_vector_norm.default):
            yield Call(target, (x,))
        for target in (aten.all.default, aten.prod.default):
            yield Call(target, (x,))
        for target in (aten.any.dim, aten.all.dim, aten.cumprod.default):
            yield Call(target, (x, 1))
        yield Call(aten.amax.default, (x, [0]))
        yield Call(aten.var_mean.correction, (y, [0, 2, 3]))
        yield Call(aten.argmax.default, (x, 1))
        yield Call(aten.cumsum.default, (x, 1))
        yield Call(aten.sort.default, (x, 1))
        yield Call(aten.topk.default, (x, 5, 1))
        yield Call(aten.kthvalue.default, (x, 5, 1))
        yield Call(aten.median.dim, (x, 1))
    mask = _randn(512, 4096) > 0
    yield Call(aten.sum.default, (mask,))
    yield Call(aten.sum.dim_IntList, (mask, [1]))
    yield Call(aten.cumsum.default, (mask, 1))
    yield Call(aten.any.default, (mask,))


def images() -> Iterator[Call]:
    for dtype in (f32, bf16):
        x = _randn(8, 64, 64, 64, dtype=dtype)
        large = _randn(8, 64, 128, 128, dtype=dtype)
        last = x.to(memory_format=torch.channels_last)
        for image in (x, x.mT, last):
            yield Call(aten.max_pool2d_with_indices.default, (image, [2, 2], [2, 2]))
            yield Call(aten.avg_pool2d.default, (image, [2, 2]))
            yield Call(aten._adaptive_avg_pool2d.default, (image, [2, 2]))
            yield Call(aten.upsample_nearest2d.default, (image, [128, 128]))
            yield Call(aten.upsample_bilinear2d.default, (image, [128, 128], False))
            yield Call(aten.upsample_nearest2d_backward.default, (image, [64, 64], [8, 64, 32, 32]))
            yield Call(aten.upsample_bilinear2d_backward.default, (image, [64, 64], [8, 64, 32, 32], False))
            yield Call(aten.avg_pool2d_backward.default, (image, large, [2, 2], [2, 2], [0, 0], False, True, None))
        indices = aten.max_pool2d_with_indices(large, [2, 2], [2, 2])[1]
        for image in (x, x.mT):
            args = (image, large, [2, 2], [2, 2], [0, 0], [1, 1], False, indices)
            yield Call(aten.max_pool2d_with_indices_backward.default, args)


def indexing() -> Iterator[Call]:
    rows = torch.randint(0, 512, (1000,))
    for dtype in (f32, bf16):
        x, values = _randn(512, 4096, dtype=dtype), _randn(1000, 4096, dtype=dtype)
        tokens, gradient = torch.randint(0, 1000, (64, 256)), _randn(64, 256, 256, dtype=dtype)
        yield Call(aten.embedding.default, (_randn(1000, 256, dtype=dtype), tokens))
        for given in (gradient, gradient.mT):
            yield Call(aten.embedding_dense_backward.default, (given, tokens, 1000, -1, False))
        yield Call(aten.index.Tensor, (x, [rows]))
        for accumulate in (False, True):
            yield Call(aten.index_put.default, (x, [rows], values, accumulate))
        yield Call(aten.index_add.default, (x, 0, rows, values))
        for dim, index in ((1, torch.zeros(512, 64, dtype=torch.long)), (0, rows[:8, None].expand(8, 4096))):
            source = x[: index.shape[0], : index.shape[1]].contiguous()
            yield Call(aten.gather.default, (x, dim, index))
            yield Call(aten.scatter.src, (x, dim, index, source))
            yield Call(aten.scatter.value, (x, dim, index, 1.0))
            yield Call(aten.scatter_add.default, (x, dim, index, source))
            yield Call(aten.scatter_reduce.two, (x, dim, index, source, "amax"))
        yield Call(aten.cat.default, ([x, x], 1))
        yield Call(aten.nll_loss_forward.default, (x, torch.zeros(512, dtype=torch.long), None, 1, -100))


def pointwise() -> Iterator[Call]:
    x, half = _randn(512, 4096), _randn(512, 4096, dtype=bf16)
    mask, number = x > 0, torch.ones(512, 4096, dtype=torch.long)
    for a, b in ((x, half), (half, x), (mask, x), (number, x), (x, number[:, :1]), (x, x), (half[:1], x)):
        yield Call(aten.mul.Tensor, (a, b))
        yield Call(aten.add.Tensor, (a, b))
        yield Call(aten.lt.Tensor, (a, b))
        yield Call(aten.where.self, (mask, a, b))
    yield Call(aten.div.Tensor, (number, number))
    yield Call(aten.sqrt.default, (number,))
    yield Call(aten.mul.Tensor, (number, 0.5))
    for source in (x, half):
        yield Call(aten._to_copy.default, (source.t(),))
        yield Call(aten.clone.default, (source.t(),))
        yield Call(aten.masked_fill.Scalar, (source, mask, 0.0))
        yield Call(aten.gelu.default, (source,))
        yield Call(aten.gelu_backward.default, (source, source))
        yield Call(aten.silu_backward.default, (source, source))
        yield Call(aten.native_dropout.default, (source, 0.1, True))
        target = torch.rand_like(source)
        yield Call(aten.mse_loss.default, (source, target))
        yield Call(aten.smooth_l1_loss.default, (source, target))
        yield Call(aten.huber_loss.default, (source, target))
        yield Call(aten.binary_cross_entropy_with_logits.default, (source, target))
        yield Call(aten.binary_cross_entropy.default, (target, target))
        yield Call(aten.mse_loss.default, (source, target, 0))


def transforms() -> Iterator[Call]:
    x = _randn(256, 4096)
    yield Call(aten._fft_r2c.default, (x, [1], 0, True))
    yield Call(aten._fft_r2c.default, (x, [0, 1], 0, True))
    c = aten._fft_r2c(x, [1], 0, True)
    yield Call(aten._fft_c2c.default, (c, [1], 0, True))
    yield Call(aten._fft_c2r.default, (c, [1], 0, 4096))
    yield Call(aten._fft_c2r.default, (c, [0, 1], 0, 4096))
    for size in (256, 768):
        m = _randn(size, size)
        positive = m @ m.t() + 2 * size * torch.eye(size)
        yield Call(aten.linalg_inv_ex.default, (m,))
        yield Call(aten.linalg_cholesky_ex.default, (positive,))
        yield Call(aten._linalg_eigh.default, (positive,))
        yield Call(aten._linalg_svd.default, (m,))
        yield Call(aten.linalg_qr.default, (m,))
        yield Call(aten.linalg_lu_factor_ex.default, (m,))
        yield Call(aten._linalg_solve_ex.default, (m, m))


def forms() -> Iterator[Call]:
    """Operators that write into given memory."""
    shape = (512, 2048)
    x, half, numbers = _randn(*shape), _randn(*shape, dtype=bf16), torch.ones(shape, dtype=torch.long)
    mask, index, part = x > 0, numbers[:, :8], half[:, :8].contiguous()
    into, into_half = {"out": torch.empty(shape)}, {"out": torch.empty(shape, dtype=bf16)}
    for a, b in ((x, half), (half, x), (x, mask), (x, x)):
        yield Call(aten.add_.Tensor, (a, b))
        yield Call(aten.add.out, (a, b), "into float32", into)
        yield Call(aten.add.out, (a, b), "into bfloat16", into_half)
        yield Call(aten.lt.Tensor_out, (a, b), "", {"out": torch.empty(shape, dtype=torch.bool)})
        yield Call(aten.where.self_out, (mask, a, b), "", into)
    yield Call(aten.div.out, (numbers, numbers), "", into)
    yield Call(aten.mul.Scalar_out, (x, 2.0), "", into)
    yield Call(aten.masked_fill_.Scalar, (x, mask, 0.0))
    yield Call(aten.copy_.default, (x, half))
    for source in (x, _randn(*shape[::-1]).t()):
        yield Call(aten._softmax.out, (source, 1, False), "", into)
        yield Call(aten._softmax_backward_data.out, (source, source, 1, f32), "", {"grad_input": torch.empty(shape)})
    for target in (aten.scatter_.src, aten.scatter_add_.default):
        yield Call(target, (half, 1, index, part))
    yield Call(aten.index_add_.default, (x, 0, torch.arange(100), _randn(100, 2048)))
    left, right = x[:, ::2], _randn(1024, 512)
    yield Call(aten.mm.out, (left, right), "", {"out": torch.empty(512, 512)})
    yield Call(aten.addmm_.default, (torch.zeros(512, 512), left, right))
    how = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    image, weight = _randn(8, 64, 32, 32), _randn(64, 64, 3, 3)
    yield Call(aten.convolution.out, (image, weight, None, *how), "", {"out": torch.empty(8, 64, 32, 32)})
    yield Call(aten.mean.out, (half, [1]), "", {"out": torch.empty(512, dtype=bf16)})


FAMILIES: dict[str, Callable[[], Iterator[Call]]] = {
    family.__name__: family
    for family in (
        convolutions,
        convolutions_in_channels_last,
        convolutions_without_onednn,
        products,
        attention,
        recurrent,
        norms,
        softmaxes,
        reductions,
        images,
        indexing,
        pointwise,
        transforms,
        forms,
    )
}

FORMULAS = {
    "convolution.default": "blocked copies of x, w and the result; without oneDNN the unfolded batch",
    "convolution_backward.default": "for x: blocked gradient, w, gradient of x (when strided 3 × x, "
    "and threads × a padded sample); for w: blocked x and gradient, as many w as oneDNN adds up; without oneDNN the "
    "unfolded batch",
    "mm.default": "copies of strided operands; half precision with the first transposed: 4 bytes × result",
    "addmm.default": "as mm",
    "bmm.default": "as mm, for one matrix",
    "_scaled_dot_product_flash_attention_for_cpu.default": "threads × block of queries × (block of keys + head)",
    "_scaled_dot_product_flash_attention_for_cpu_backward.default": "query + threads × two blocks",
    "mkldnn_rnn_layer.default": "1.035 × gates of all steps + weights (+ the saved workspace that fakes lack)",
    "koila.recurrent_layer.default": "gates and outputs of all steps, an input that is turned round",
    "koila.recurrent_layer_backward.default": "what autograd keeps for all steps, and gradients of gates or weights",
    "mkldnn_rnn_layer_backward.default": "1.02 × gates of all steps + 2 × weights + copy of a strided gradient",
    "native_layer_norm.default": "copy of a strided x",
    "native_layer_norm_backward.default": "copies of a strided x and gradient + threads × 2 × w",
    "native_batch_norm_backward.default": "x, where gradient and x are contiguous",
    "_softmax.default": "copy of a strided x",
    "_log_softmax.default": "copy of a strided x",
    "_softmax_backward_data.default": "copies of strided operands",
    "_log_softmax_backward_data.default": "copies of strided operands",
    "_fused_rms_norm.default": "x",
    "logsumexp.default": "x",
    "sum.default": "x in the result's type, if cast",
    "sum.dim_IntList": "x in the result's type, if cast; half precision over separate dimensions: x in float32",
    "mean.default": "half precision: x in float32",
    "mean.dim": "half precision: x in float32",
    "any.default": "x as bytes",
    "cumsum.default": "x in the result's type, if cast",
    "kthvalue.default": "x and its indices",
    "native_dropout.default": "x",
    "mse_loss.default": "2 × x, one of which the result retains; half precision 4 × x",
    "smooth_l1_loss.default": "as mse_loss",
    "huber_loss.default": "x; half precision 3 × x",
    "binary_cross_entropy.default": "x, which the result retains; half precision 3 × x",
    "binary_cross_entropy_with_logits.default": "2 × x; half precision 4 × x",
    "linalg_inv_ex.default": "x",
    "_linalg_eigh.default": "2 × x",
    "linalg_qr.default": "(68 + 64 × threads) floats for each row",
    "sort.default": "threads × 8 bytes for each element of a row",
    "topk.default": "threads × 16 bytes for each element of a row",
    "_linalg_svd.default": "4 × x",
    "_fft_c2r.default": "x, for more than one dimension",
    **dict.fromkeys(("mul.Tensor", "add.Tensor", "lt.Tensor", "div.Tensor", "where.self", "sqrt.default"), "casts"),
    **dict.fromkeys(
        ("gather.default", "scatter.src", "scatter.value", "scatter_add.default", "scatter_reduce.two"),
        "half precision: the result in float32",
    ),
    **dict.fromkeys(("embedding_dense_backward.default", "median.dim"), "copy of a strided x"),
}


def measure(families: list[str], num_threads: int) -> list[dict[str, Any]]:
    """Readings of families; runs under the hook."""
    torch.set_num_threads(num_threads)
    torch.manual_seed(0)
    found = []
    for family in families:
        started = time.perf_counter()
        found += [asdict(read(call)) for call in FAMILIES[family]()]
        print(f"{family}: {time.perf_counter() - started:.0f} s", file=sys.stderr)
    return found


def readings(families: list[str], num_threads: int = 1) -> list[Reading]:
    """Readings of families, from a subprocess."""
    return [Reading(**row) for row in call_outside("benchmarks.calibrate:measure", families, num_threads)]


def slope(found: list[Reading]) -> float | None:
    """Least squares of what was measured against the formula, through the origin."""
    squares = sum(reading.formula_bytes**2 for reading in found)
    products = sum(reading.measured_bytes * reading.formula_bytes for reading in found)
    return products / squares if squares > MIB**2 else None


def table(found: list[Reading]) -> str:
    """One line for each operator."""
    lines = [
        "| operator | calls | formula | slope | most measured MiB | worst under MiB | worst over MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    by_operator: dict[str, list[Reading]] = {}
    for reading in found:
        by_operator.setdefault(reading.operator, []).append(reading)
    for operator, own in by_operator.items():
        fitted = slope(own)
        most = max(reading.measured_bytes for reading in own) / MIB
        under = max(reading.measured_bytes - reading.formula_bytes for reading in own) / MIB
        over = max(reading.formula_bytes - reading.measured_bytes for reading in own) / MIB
        is_form = operator.partition(".")[0].endswith("_") or operator.endswith("out")
        other = "as the plain form" if is_form else "copies of strided images" if over > 1 or most > 1 else "none"
        text = FORMULAS.get(operator, other)
        lines.append(
            f"| {operator} | {len(own)} | {text} | {'' if fitted is None else f'{fitted:.2f}'} | {most:.2f} "
            f"| {max(0.0, under):.2f} | {max(0.0, over):.2f} |"
        )
    return "\n".join(lines)


def titled(num_threads: int) -> tuple[str, str]:
    """Title and file name of the results: they depend on the processor and the number of threads."""
    isa, capability = this_processor().isa.name, torch.backends.cpu.get_cpu_capability()
    kind = f"oneDNN {isa}, PyTorch {capability}, threads: {num_threads}"
    return f"Workspaces, torch {torch.__version__}, {kind}", f"workspace-{isa.lower()}-{num_threads}.md"


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.calibrate", description=__doc__)
    parser.add_argument("families", nargs="*", help=f"of {', '.join(FAMILIES)}; all of them without a name")
    parser.add_argument("--threads", type=int, default=1, help="how many threads kernels may use")
    parser.add_argument("--all", action="store_true", help="print every reading")
    parser.add_argument("--json", type=Path, help="write every reading to this file")
    arguments = parser.parse_args()
    found = readings(arguments.families or list(FAMILIES), arguments.threads)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(reading) for reading in found]), encoding="utf-8")
    text = table(found)
    print(text)
    num_under, num_over = sum(each.is_under for each in found), sum(each.is_over for each in found)
    summary = f"{len(found)} calls, {num_under} above their formula, {num_over} far below it"
    print(summary)
    for reading in found:
        if arguments.all or reading.is_under or reading.is_over:
            verdict = "UNDER" if reading.is_under else "OVER" if reading.is_over else "ok"
            sizes = f"measured {reading.measured_bytes / MIB:.2f}, formula {reading.formula_bytes / MIB:.2f} MiB"
            print(f"{verdict}: {reading.operator} {reading.note}: {sizes}")
    if not arguments.families:
        RESULTS.mkdir(exist_ok=True)
        title, name = titled(arguments.threads)
        command = f"{parser.prog} --threads {arguments.threads}"
        head = f"# {title}\n\nWritten by `python -m {command}`: {summary}.\n\n"
        (RESULTS / name).write_text(head + text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
