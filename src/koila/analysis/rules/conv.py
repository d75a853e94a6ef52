"""Rules for convolution, pooling, padding and resampling: samples are independent, places in an image are not.

*Takes* calls of image operators and their backwards. *Gives* the table `ROWS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from koila.analysis.chunk_rule import Call, ChunkRule, Rule, sliced
from koila.analysis.rules._axes import Axes, follow, right
from koila.analysis.rules._rows import dense, either, letters, trailing
from koila.analysis.types import Sliced

aten = torch.ops.aten


def padded(call: Call) -> ChunkRule | None:
    """constant_pad_nd: a dimension that is not padded may hold the batch."""
    ndim, pad = call["self"].ndim, call["pad"]
    rigid = {ndim - 1 - place for place in range(len(pad) // 2) if pad[2 * place] or pad[2 * place + 1]}
    labels = right(ndim, rigid)
    return follow(call, Axes({"self": labels}, (labels,), broadcast=False))


def gridded(call: Call) -> ChunkRule | None:
    """affine_grid_generator: the number of samples is the first of `size`, which is the size of the images."""
    ruling = letters("theta=n_ -> n_")(call)
    if ruling is None:
        return None
    kind = ruling.result
    assert isinstance(kind, Sliced)

    def rewrite(arguments: dict[str, Any], num_samples: int) -> dict[str, Any]:
        return {**arguments, "size": [kind.extent(num_samples), *arguments["size"][1:]]}

    return replace(ruling, rewrite=rewrite)


def shuffled(call: Call) -> ChunkRule | None:
    """pixel_shuffle of an image that is cut: every row or column becomes several."""
    kind = sliced(call["self"])
    if kind is None or kind.dim < call["self"].ndim - 2 or kind.granule > 1:
        return None
    return ChunkRule({"self": kind}, replace(kind, inner=kind.inner * call["upscale_factor"]))


def unshuffled(call: Call) -> ChunkRule | None:
    """pixel_unshuffle of an image that is cut: several rows or columns become one."""
    kind, factor = sliced(call["self"]), call["downscale_factor"]
    if kind is None or kind.dim < call["self"].ndim - 2 or kind.inner % factor:
        return None
    return ChunkRule({"self": kind}, replace(kind, inner=kind.inner // factor))


def _with_samples(call: Call) -> bool:
    return bool(call["input"].ndim == call["weight"].ndim)


def _batched(ndim: int) -> Callable[[Call], bool]:
    return lambda call: bool(call["self"].ndim == ndim)


_INPUT_SIZE = ("input_size",)

ROWS: dict[Any, Rule] = {
    aten.convolution.default: letters("input=n_ weight=_ -> n_", when=_with_samples),
    aten.convolution_backward.default: letters("grad_output=n_ input=n_ weight=_ -> n_ _+ _+", when=_with_samples),
    aten.avg_pool1d.default: trailing(1),
    aten.avg_pool2d.default: trailing(2),
    aten.avg_pool2d_backward.default: trailing(2),
    aten.avg_pool3d.default: trailing(3),
    aten.avg_pool3d_backward.default: trailing(3),
    aten.max_pool2d_with_indices.default: trailing(2),
    aten.max_pool2d_with_indices_backward.default: trailing(2),
    aten.max_pool3d_with_indices.default: trailing(3),
    aten.max_pool3d_with_indices_backward.default: trailing(3),
    aten.max_unpool2d.default: trailing(2),
    aten.max_unpool3d.default: trailing(3),
    aten._adaptive_avg_pool2d.default: trailing(2),
    aten._adaptive_avg_pool2d_backward.default: trailing(2),
    aten._adaptive_avg_pool3d.default: trailing(3),
    aten._adaptive_avg_pool3d_backward.default: trailing(3),
    aten.adaptive_max_pool2d.default: trailing(2),
    aten.adaptive_max_pool2d_backward.default: trailing(2),
    aten.adaptive_max_pool3d.default: trailing(3),
    aten.adaptive_max_pool3d_backward.default: dense(trailing(3), "indices"),
    aten.fractional_max_pool2d.default: letters("self=nc_ random_samples=nc_ -> nc_ nc_", when=_batched(4)),
    aten.fractional_max_pool2d_backward.default: dense(trailing(2), "indices"),
    aten.fractional_max_pool3d.default: letters("self=nc_ random_samples=nc_ -> nc_ nc_", when=_batched(5)),
    aten.fractional_max_pool3d_backward.default: dense(trailing(3), "indices"),
    aten.upsample_nearest1d.default: trailing(1),
    aten.upsample_nearest2d.default: trailing(2),
    aten.upsample_nearest3d.default: trailing(3),
    aten._upsample_nearest_exact1d.default: trailing(1),
    aten._upsample_nearest_exact2d.default: trailing(2),
    aten._upsample_nearest_exact3d.default: trailing(3),
    aten.upsample_linear1d.default: trailing(1),
    aten.upsample_bilinear2d.default: trailing(2),
    aten._upsample_bilinear2d_aa.default: trailing(2),
    aten.upsample_bicubic2d.default: trailing(2),
    aten._upsample_bicubic2d_aa.default: trailing(2),
    aten.upsample_trilinear3d.default: trailing(3),
    aten.upsample_nearest1d_backward.default: trailing(1, sizes=_INPUT_SIZE),
    aten.upsample_nearest2d_backward.default: trailing(2, sizes=_INPUT_SIZE),
    aten.upsample_nearest3d_backward.default: trailing(3, sizes=_INPUT_SIZE),
    aten._upsample_nearest_exact1d_backward.default: trailing(1, sizes=_INPUT_SIZE),
    aten._upsample_nearest_exact2d_backward.default: trailing(2, sizes=_INPUT_SIZE),
    aten._upsample_nearest_exact3d_backward.default: trailing(3, sizes=_INPUT_SIZE),
    aten.upsample_linear1d_backward.default: trailing(1, sizes=_INPUT_SIZE),
    aten.upsample_bilinear2d_backward.default: trailing(2, sizes=_INPUT_SIZE),
    aten._upsample_bilinear2d_aa_backward.default: trailing(2, sizes=_INPUT_SIZE),
    aten.upsample_bicubic2d_backward.default: trailing(2, sizes=_INPUT_SIZE),
    aten._upsample_bicubic2d_aa_backward.default: trailing(2, sizes=_INPUT_SIZE),
    aten.upsample_trilinear3d_backward.default: trailing(3, sizes=_INPUT_SIZE),
    aten.grid_sampler_2d.default: letters("input=nc_ grid=n_ -> nc_"),
    aten.grid_sampler_3d.default: letters("input=nc_ grid=n_ -> nc_"),
    aten.grid_sampler_2d_backward.default: letters("grad_output=n_ input=n_ grid=n_ -> n_ n_"),
    aten.grid_sampler_3d_backward.default: letters("grad_output=n_ input=n_ grid=n_ -> n_ n_"),
    aten.affine_grid_generator.default: gridded,
    aten.im2col.default: letters("self=n_ -> n_", when=_batched(4)),
    aten.col2im.default: letters("self=n_ -> n_", when=_batched(3)),
    aten.pixel_shuffle.default: either(trailing(3), shuffled),
    aten.pixel_unshuffle.default: either(trailing(3), unshuffled),
    aten.channel_shuffle.default: letters("self=n_ -> n_"),
    aten.constant_pad_nd.default: padded,
    aten.reflection_pad1d.default: trailing(1),
    aten.reflection_pad2d.default: trailing(2),
    aten.reflection_pad3d.default: trailing(3),
    aten.replication_pad1d.default: trailing(1),
    aten.replication_pad2d.default: trailing(2),
    aten.replication_pad3d.default: trailing(3),
    aten.reflection_pad1d_backward.default: trailing(1),
    aten.reflection_pad2d_backward.default: trailing(2),
    aten.reflection_pad3d_backward.default: trailing(3),
    aten.replication_pad1d_backward.default: trailing(1),
    aten.replication_pad2d_backward.default: trailing(2),
    aten.replication_pad3d_backward.default: trailing(3),
}
