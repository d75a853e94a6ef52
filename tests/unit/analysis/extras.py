"""Hand-written calls for the rows of the tables that torch's own samples do not reach, or reach too rarely.

*Takes* nothing. *Gives* `Recorded` calls; sizes are small, distinct where that matters and equal where that is a trap.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions

from tests.unit.analysis.harness import Recorded, run

aten = torch.ops.aten

# The backward of RMS norm has kernels on accelerators only: torch's decomposition stands in for one.
LIBRARY = torch.library.Library("aten", "IMPL", "CPU")
LIBRARY.impl(
    "_fused_rms_norm_backward",
    get_decompositions([aten._fused_rms_norm_backward])[aten._fused_rms_norm_backward.default],
)


def real(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def index(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape)


def views() -> Iterator[tuple[Any, ...]]:
    yield aten.reshape.default, real(4, 6, 5), [24, 5]
    yield aten.reshape.default, real(6, 4), [3, 2, 4]
    yield aten._reshape_alias.default, real(4, 6), [24], [1]
    yield aten.view.default, real(4, 4, 4), [16, 4]
    yield aten.view.default, real(2, 3, 2, 5), [6, 10]
    yield aten.view.default, real(12, 5), [2, 3, 2, 5]
    yield aten.view.default, real(3, 0, 2), [3, 0]
    yield aten.view.dtype, real(3, 4), torch.int64
    yield aten.view.dtype, real(3, 4), torch.int32
    yield aten.squeeze.default, real(3, 1, 4, 1)
    yield aten.squeeze_copy.dims, real(3, 1, 4), [0, 1]
    yield aten.slice.Tensor, torch.cat([real(3, 2), real(3, 2)]), 0, 3, 6
    yield aten.slice.Tensor, real(3, 4), 0, 0, 9223372036854775807
    yield aten.slice_copy.Tensor, real(3, 4), 1, 1, 3
    yield aten.select_copy.int, real(3, 4), 1, 1
    yield aten.unbind.int, real(3, 1), 1
    yield aten.unsafe_split_with_sizes.default, real(3, 4), [1, 3], 1
    yield aten.narrow_copy.default, real(3, 4), 1, 1, 2
    yield aten.diagonal_copy.default, real(3, 4, 5), 0, 1, 2
    yield aten.roll.default, real(3, 4), [1], [1]
    yield aten.lift_fresh.default, real(3, 4)
    yield aten.lift_fresh_copy.default, real(3, 4)
    yield aten.repeat.default, real(3, 2), [2, 3, 1]
    yield aten.cat.default, [real(3, 2), real(3, 2), real(6, 2)], 0
    yield aten.stack.default, [real(3, 2), real(3, 2)], 1
    yield aten.im2col.default, real(3, 2, 5, 5), [2, 2], [1, 1], [0, 0], [1, 1]
    yield aten.col2im.default, real(3, 8, 16), [5, 5], [2, 2], [1, 1], [0, 0], [1, 1]
    for target in (aten._conj.default, aten._conj_copy.default, aten._neg_view.default, aten._neg_view_copy.default):
        yield target, torch.randn(3, 4, dtype=torch.complex128)


def factorisations() -> Iterator[tuple[Any, ...]]:
    reflectors, scales = torch.geqrf(real(3, 4, 4))
    yield aten.ormqr.default, reflectors, scales, real(3, 4, 2)


def pointwise() -> Iterator[tuple[Any, ...]]:
    yield aten.masked_fill.Tensor, real(3, 4), real(3, 4) > 0, torch.tensor(2.0, dtype=torch.float64)
    yield aten.masked_fill.Scalar, real(3, 3), real(3, 3) > 0, 0
    yield aten.fill.Tensor, real(3, 4), torch.tensor(2.0, dtype=torch.float64)
    yield aten.zero.default, real(3, 4)
    yield aten.complex.default, real(3, 4), real(3, 4)
    yield aten.bucketize.Tensor, real(3, 4), real(5).sort().values
    yield aten.positive.default, real(3, 4)
    yield aten.logical_xor.default, real(3, 4) > 0, real(3, 4) > 0
    yield aten.hypot.default, real(3, 4), real(3, 4)
    yield aten.lcm.default, index(9, 3, 4) + 1, index(9, 3, 4) + 1
    yield aten.searchsorted.Tensor, real(5).sort().values, real(3, 4)
    yield aten.searchsorted.Tensor, real(3, 5).sort().values, real(3, 4)
    yield aten.full_like.default, real(3, 4), 2.0


def reductions() -> Iterator[tuple[Any, ...]]:
    ties = index(3, 4, 4).double()
    for target in (aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default):
        yield target, ties, 0
        yield target, ties, 1, True
        yield target, torch.where(ties > 1, torch.nan, ties), 0
    for target in (aten.all.default, aten.any.default):
        yield target, ties > 0
        yield target, torch.zeros(3, 4, dtype=torch.uint8)
    for target in (aten.all.dims, aten.any.dims):
        yield target, ties > 0, [0]
    yield aten.histc.default, real(4, 5), 6, -1, 1
    yield aten.hash_tensor.default, real(4, 5), [1]
    for target in (aten.all.dim, aten.any.dim):
        yield target, ties > 0, 0
    for order in (0, 1, 2, 3, 2.5, -1, torch.inf, -torch.inf):
        yield aten.linalg_vector_norm.default, real(4, 5), order, [0]
        yield aten.dist.default, real(4, 5), real(4, 5), order
        yield aten.dist.default, real(4, 4), real(4), order
        yield aten.norm.Scalar, real(4, 5), order
    yield aten.count_nonzero.dim_IntList, ties, [0]
    yield aten.logsumexp.default, torch.where(ties > 1, -torch.inf, ties), [0]
    yield aten.sum.dim_IntList, real(3, 0, 4), [1]
    yield aten.sum.default, real(3, 4).bfloat16()
    yield aten.var_mean.correction, real(4, 6).bfloat16(), [0]
    yield aten.var_mean.correction, torch.randn(4, 6, dtype=torch.complex128), [0, 1]
    yield aten.var.correction, real(6, 2) + 1e6, [0]
    yield aten.std.correction, real(6, 2)
    yield aten.std.correction, real(1, 2), [0]
    yield aten.mean.default, real(6, 2)
    yield aten.amax.default, ties, [0]
    yield aten.aminmax.default, ties
    yield aten.mode.default, ties, 1
    yield aten.median.dim, ties, 1


def bags() -> Iterator[tuple[Any, ...]]:
    table, rows, starts = real(6, 4), index(6, 5), torch.tensor([0, 2])
    for target in (aten._embedding_bag.default, aten._embedding_bag_forward_only.default):
        for mode in (0, 1, 2):
            yield target, table, rows, starts, False, mode
    for mode in (0, 1, 2):
        _, places, sizes, largest = aten._embedding_bag.default(table, rows, starts, False, mode)
        places = torch.tensor([0, 0, 1, 1, 1]) if not len(places) else places
        arguments = (rows, starts, places, sizes, largest, 6, False, mode, False, None)
        yield aten._embedding_bag_backward.default, real(2, 4), *arguments
    places = torch.tensor([0, 0, 1, 1, 1])
    yield aten._embedding_bag_per_sample_weights_backward.default, real(2, 4), table, rows, starts, places, 0


def indices() -> Iterator[tuple[Any, ...]]:
    yield from bags()
    yield aten.index.Tensor, real(5, 4), [index(5, 3)]
    yield aten._unsafe_index.Tensor, real(5, 4, 3), [None, index(4, 2, 3), index(3, 3)]
    yield aten.index.Tensor, real(5, 4, 3), [index(5, 2), None, index(3, 2)]
    yield aten.index.Tensor, real(4, 4), [torch.arange(4), index(4, 4)]
    for target in (aten.index_put.default, aten._unsafe_index_put.default):
        yield target, real(5, 4), [index(5, 3)], real(3, 4), True
        yield target, real(5, 4, 3), [None, index(4, 2)], real(5, 2, 3), False
    yield aten.index_put.default, torch.zeros(5, 4, dtype=torch.float64), [index(5, 3)], real(3, 4), True
    yield aten.index_add.default, real(5, 4), 0, index(5, 3), real(3, 4)
    yield aten.index_copy.default, real(5, 4), 0, torch.tensor([1, 3]), real(2, 4)
    yield aten.index_fill.int_Tensor, real(5, 4), 0, torch.tensor([1, 3]), torch.tensor(1.0, dtype=torch.float64)
    yield aten.index_reduce.default, real(5, 4), 0, torch.tensor([1, 3]), real(2, 4), "prod"
    yield aten.scatter_add.default, real(5, 4), 0, index(5, 3, 4), real(3, 4)
    yield aten.scatter.reduce, real(3, 4), 1, index(4, 3, 2), real(3, 2), {"reduce": "add"}
    yield aten.scatter.value_reduce, real(3, 4), 1, index(4, 3, 2), 2.0, {"reduce": "multiply"}
    yield aten.scatter.src, real(4, 4), 1, index(4, 4, 4), real(4, 4)
    yield aten.gather.default, real(4, 4), 1, index(4, 2, 4)
    yield aten.embedding_dense_backward.default, real(3, 4, 5), index(7, 3, 4), 7, 2, False
    yield aten.embedding_dense_backward.default, real(3, 4, 5), index(7, 3, 4), 7, -1, True
    yield aten.slice_backward.default, real(3, 2), [3, 4], 1, 1, 3, 1
    yield aten.slice_backward.default, real(3, 4), [3, 4], 0, 0, 9223372036854775807, 1
    yield aten.select_backward.default, real(3, 5), [3, 4, 5], 1, 2
    yield aten.diagonal_backward.default, real(3, 4), [3, 4, 5], 0, 1, 2
    yield aten.unfold_backward.default, real(3, 2, 3), [3, 5], 1, 3, 2
    yield aten.slice_scatter.default, real(3, 4), real(3, 2), 1, 1, 3
    yield aten.select_scatter.default, real(3, 4), real(3), 1, 2
    yield aten.diagonal_scatter.default, real(3, 4, 5), real(3, 4), 0, 1, 2


def layers() -> Iterator[tuple[Any, ...]]:
    weight, bias = real(5), real(5)
    out, mean, rstd = aten.native_layer_norm(real(3, 4, 5), [5], weight, bias, 1e-5)
    yield aten.native_layer_norm.default, real(3, 4, 5), [5], weight, bias, 1e-5
    yield aten.native_layer_norm.default, real(5, 5, 5), [5, 5], None, None, 1e-5
    for mask in ([True, True, True], [True, False, False], [False, True, True]):
        yield aten.native_layer_norm_backward.default, out, real(3, 4, 5), [5], mean, rstd, weight, bias, mask
    yield aten._fused_rms_norm.default, real(3, 4, 5), [5], weight, 1e-5
    yield aten._fused_rms_norm_backward.default, out, real(3, 4, 5), [5], rstd, weight, [True, True]
    running = (real(4), real(4).abs())
    yield aten._native_batch_norm_legit_no_training.default, real(3, 4, 2), real(4), real(4), *running, 0.1, 1e-5
    yield aten.native_batch_norm.default, real(3, 4, 2), real(4), real(4), *running, False, 0.1, 1e-5
    arguments = (real(3, 4, 2), real(3, 4, 2), real(4), *running, real(0), real(0), False, 1e-5, [True] * 3)
    yield aten.native_batch_norm_backward.default, *arguments
    arguments = (real(3, 4, 2), real(3, 4, 2), real(4), None, None, *running, True, 1e-5, [False, True, True])
    yield aten.native_batch_norm_backward.default, *arguments
    yield aten.native_group_norm.default, real(4, 4, 2), real(4), real(4), 4, 4, 2, 2, 1e-5
    yield from convolutions()


def convolutions() -> Iterator[tuple[Any, ...]]:
    for mask in ([True, True, True], [False, True, True], [True, False, False]):
        sizes = ([4], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, mask)
        yield aten.convolution_backward.default, real(4, 4, 2, 2), real(4, 4, 3, 3), real(4, 4, 2, 2), *sizes
    yield aten.convolution.default, real(3, 4, 5), real(6, 2, 3), real(6), [1], [1], [1], False, [0], 2
    yield aten.convolution.default, real(3, 4, 5), real(4, 6, 3), real(6), [2], [1], [1], True, [1], 1
    yield aten.avg_pool1d.default, real(3, 4, 6), [2]
    yield aten._upsample_bicubic2d_aa.default, real(2, 3, 4, 4), [2, 2], False
    yield aten._upsample_bicubic2d_aa_backward.default, real(2, 3, 2, 2), [2, 2], [2, 3, 4, 4], False
    yield aten.affine_grid_generator.default, real(3, 2, 3), [3, 3, 3, 3], False
    yield aten.pixel_shuffle.default, real(3, 4, 2, 2), 2
    yield aten.pixel_unshuffle.default, real(3, 4, 2, 2), 2
    yield aten.pixel_unshuffle.default, real(1, 4, 3, 3), 1
    yield aten.channel_shuffle.default, real(3, 4, 2, 2), 2
    yield aten.grid_sampler_3d_backward.default, *grid_backward()
    for rank, sides in ((1, [1, 1]), (3, [1] * 6)):
        before, after = (2, 3, *[2] * rank), (2, 3, *[4] * rank)
        for name in (f"reflection_pad{rank}d", f"replication_pad{rank}d"):
            yield getattr(aten, name).default, real(*before), sides
            yield getattr(aten, f"{name}_backward").default, real(*after), real(*before), sides
    yield aten.reflection_pad2d.default, real(2, 3, 4, 4), [1, 1, 1, 1]
    yield aten.reflection_pad2d_backward.default, real(2, 3, 6, 6), real(2, 3, 4, 4), [1, 1, 1, 1]


def grid_backward() -> tuple[Any, ...]:
    return real(2, 3, 2, 2, 2), real(2, 3, 3, 3, 3), real(2, 2, 2, 2, 3), 0, 0, False, [True, True]


def attention() -> Iterator[tuple[Any, ...]]:
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    for shape in ((3, 2, 5, 8), (4, 4, 4, 4)):
        query, key, value = real(*shape), real(*shape), real(*shape)
        length = shape[2]
        for mask in (None, real(length, length), real(shape[0], 1, length, length), real(1, 1, length, length)):
            causal = mask is None
            out, logsumexp = forward(query, key, value, 0.0, causal, attn_mask=mask)
            yield forward, query, key, value, 0.0, causal, {"attn_mask": mask}
            arguments = (real(*shape), query, key, value, out, logsumexp, 0.0, causal)
            yield backward, *arguments, {"attn_mask": mask}


def algebra() -> Iterator[tuple[Any, ...]]:
    square = real(3, 4, 4)
    positive = square @ square.mT + torch.eye(4)
    yield aten.linalg_matrix_exp.default, square
    yield aten.linalg_pinv.atol_rtol_tensor, square
    yield aten.linalg_pinv.atol_rtol_tensor, square, {"rtol": real(3).abs() / 100}
    yield aten._linalg_det.default, square
    yield aten._linalg_slogdet.default, square
    yield aten._linalg_svd.default, square
    yield aten._linalg_eigh.default, positive
    yield aten.linalg_eig.default, square
    yield aten.linalg_qr.default, square
    yield aten.linalg_cholesky_ex.default, positive
    yield aten.cholesky.default, positive
    yield aten.linalg_ldl_factor_ex.default, positive
    yield aten.triangular_solve.default, real(3, 4, 2), square
    yield aten.cholesky_inverse.default, torch.linalg.cholesky(positive)
    factors, pivots = torch.linalg.ldl_factor(positive)
    yield aten.linalg_ldl_solve.default, factors, pivots, real(3, 4, 2)
    yield aten._linalg_solve_ex.default, square, real(3, 4)
    yield aten.mm.default, real(4, 4), real(4, 4)
    yield aten.addmm.default, real(5), real(3, 4), real(4, 5)
    yield aten.bmm.default, real(4, 4, 4), real(4, 4, 4)
    yield aten._euclidean_dist.default, real(3, 4), real(5, 4)
    first, second = (real(size, 16).to(torch.float8_e4m3fn) for size in (6, 32))
    for scales in ((torch.tensor(0.5), torch.tensor(2.0)), (torch.rand(6, 1), torch.rand(1, 32))):
        yield aten._scaled_mm.default, first, second.t(), *scales, None, None, torch.float32


def losses() -> Iterator[tuple[Any, ...]]:
    for reduction in (0, 1, 2):
        grad = real(4, 5) if reduction == 0 else real()
        for name in ("mse_loss", "soft_margin_loss"):
            packet = getattr(aten, name)
            yield packet.default, real(4, 5), real(4, 5), reduction
            yield getattr(aten, f"{name}_backward").default, grad, real(4, 5), real(4, 5), reduction
        grad = real(4) if reduction == 0 else real()
        yield aten.multi_margin_loss.default, real(4, 5), index(5, 4), 1, 1.0, None, reduction
        yield aten.multi_margin_loss_backward.default, grad, real(4, 5), index(5, 4), 1, 1.0, None, reduction


def extras() -> Iterator[Recorded]:
    """All hand-written calls."""
    torch.manual_seed(0)
    for family in (views, pointwise, reductions, indices, layers, attention, algebra, factorisations, losses):
        for target, *arguments in family():
            keywords = arguments.pop() if arguments and isinstance(arguments[-1], dict) else {}
            yield run(target, *arguments, **keywords)
