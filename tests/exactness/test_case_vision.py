"""Convolutions, pooling, resampling and what else image models are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.exactness.cases import Case, Sizes, table, verify


def _images(s: Sizes) -> torch.Tensor:
    return s.x(s.B, s.D, s.H, s.H)


class _SqueezeExcite(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.conv, self.down, self.up = nn.Conv2d(s.D, s.D, 3, padding=1), nn.Linear(s.D, 2), nn.Linear(2, s.D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        gate = self.up(F.relu(self.down(x.mean((2, 3))))).sigmoid()
        return x * gate[:, :, None, None]


def _transformer(theta: torch.Tensor, x: torch.Tensor, **options: Any) -> torch.Tensor:
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False, **options)


def _unpooled(x: torch.Tensor) -> torch.Tensor:
    values, indices = F.max_pool2d(x, 2, return_indices=True)
    return F.max_unpool2d(values, indices, 2)


def _layer(name: str, make: Callable[[Sizes], nn.Module], inputs: Callable[[Sizes], torch.Tensor] = _images) -> Case:
    return Case(name, lambda net, x: net(x), inputs, make)


def _call(name: str, program: Callable[..., Any], inputs: Callable[[Sizes], Any] = _images) -> Case:
    return Case(name, program, inputs)


@table(
    _layer("Conv1d", lambda s: nn.Conv1d(s.D, s.C, 3), lambda s: s.x(s.B, s.D, s.H)),
    _layer("Conv2d", lambda s: nn.Conv2d(s.D, s.C, 3, stride=2, padding=1)),
    _layer("Conv2d padding same, reflect", lambda s: nn.Conv2d(s.D, s.C, 3, padding="same", padding_mode="reflect")),
    _layer("Conv2d circular", lambda s: nn.Conv2d(s.D, s.C, 3, padding=1, padding_mode="circular")),
    _layer("Conv2d dilated", lambda s: nn.Conv2d(s.D, s.C, 2, dilation=2, bias=False)),
    _layer("Conv3d", lambda s: nn.Conv3d(s.D, s.C, 2), lambda s: s.x(s.B, s.D, 3, 3, s.T)),
    _layer("grouped convolution", lambda s: nn.Conv2d(s.D, 2 * s.D, 3, groups=2)),
    _layer("depthwise convolution", lambda s: nn.Conv2d(s.D, s.D, 3, padding=1, groups=s.D)),
    _layer("ConvTranspose1d", lambda s: nn.ConvTranspose1d(s.D, s.C, 3, stride=2), lambda s: s.x(s.B, s.D, s.T)),
    _layer("ConvTranspose2d", lambda s: nn.ConvTranspose2d(s.D, s.C, 3, stride=2, padding=1, output_padding=1)),
    _layer("ConvTranspose2d grouped", lambda s: nn.ConvTranspose2d(s.D, 2 * s.D, 2, groups=2)),
    _layer("ConvTranspose3d", lambda s: nn.ConvTranspose3d(s.D, s.C, 2), lambda s: s.x(s.B, s.D, 2, 2, s.T)),
    _layer(
        "channels last",
        lambda s: nn.Conv2d(s.D, s.C, 3),
        lambda s: _images(s).detach().to(memory_format=torch.channels_last).requires_grad_(),
    ),
    _layer(
        "channels last inside",
        lambda s: nn.Sequential(nn.Conv2d(s.D, s.C, 3), nn.ReLU()).to(memory_format=torch.channels_last),
    ),
    _layer("squeeze and excitation", _SqueezeExcite),
    _layer("PReLU", lambda s: nn.PReLU(s.D)),
    _layer(
        "Bilinear of itself", lambda s: nn.Sequential(nn.Flatten(), nn.Linear(s.D * s.H * s.H, s.C), nn.LogSoftmax(1))
    ),
)
def test_convolution(case: Case) -> None:
    verify(case)


@table(
    _call("grid_sample", _transformer, lambda s: (s.x(s.B, 2, 3), s.x(s.B, s.D, s.H, s.H))),
    _call(
        "grid_sample nearest, border",
        lambda t, x: _transformer(t, x, mode="nearest", padding_mode="border"),
        lambda s: (s.x(s.B, 2, 3), s.x(s.B, s.D, s.H, s.H)),
    ),
    _call(
        "grid_sample bicubic, reflection",
        lambda t, x: _transformer(t, x, mode="bicubic", padding_mode="reflection"),
        lambda s: (s.x(s.B, 2, 3), s.x(s.B, s.D, s.H, s.H)),
    ),
    _call(
        "grid_sample of volumes",
        lambda x, g: F.grid_sample(x, g.tanh(), align_corners=True),
        lambda s: (s.x(s.B, s.D, 3, 3, 3), s.x(s.B, 2, 2, 2, 3)),
    ),
    _call(
        "grid_sample with one grid",
        lambda x: F.grid_sample(
            x,
            torch.linspace(-1, 1, 8, dtype=x.dtype).view(1, 2, 2, 2).expand(x.shape[0], -1, -1, -1),
            align_corners=False,
        ),
    ),
    _call("unfold", lambda x: F.unfold(x, 3, padding=1, stride=2)),
    _call("fold of unfold", lambda x: F.fold(F.unfold(x, 2, stride=2).sin(), x.shape[-2:], 2, stride=2)),
    _call("Tensor.unfold", lambda x: x.unfold(2, 2, 1).square().sum(-1)),
    _call("interpolate nearest", lambda x: F.interpolate(x, scale_factor=2)),
    _call("interpolate nearest-exact", lambda x: F.interpolate(x, size=(5, 3), mode="nearest-exact")),
    _call("interpolate bilinear", lambda x: F.interpolate(x, size=(5, 7), mode="bilinear", align_corners=True)),
    _call(
        "interpolate bilinear antialias", lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear", antialias=True)
    ),
    _call("interpolate bicubic", lambda x: F.interpolate(x, scale_factor=1.5, mode="bicubic")),
    _call("interpolate area", lambda x: F.interpolate(x, size=2, mode="area")),
    _call(
        "interpolate linear", lambda x: F.interpolate(x, scale_factor=2, mode="linear"), lambda s: s.x(s.B, s.D, s.T)
    ),
    _call(
        "interpolate trilinear",
        lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"),
        lambda s: s.x(s.B, s.D, 2, 2, s.T),
    ),
    _call("pixel_shuffle", lambda x: F.pixel_unshuffle(F.pixel_shuffle(x, 2).sin(), 2)),
    _call("channel_shuffle", lambda x: F.channel_shuffle(x, 2)),
    _call("pad constant", lambda x: F.pad(x, (1, 2, 0, 1), value=0.5)),
    _call("pad reflect", lambda x: F.pad(x, (1, 2, 0, 1), mode="reflect")),
    _call("pad replicate", lambda x: F.pad(x, (1, 2, 0, 1), mode="replicate")),
    _call("pad circular", lambda x: F.pad(x, (1, 2, 0, 1), mode="circular")),
    _call("crop and flip", lambda x: x[:, :, 1:, :-1].flip(-1)),
    Case(
        "per-sample crops",
        lambda x, p: torch.stack([x[i, :, 1:3] * p[i] for i in range(x.shape[0])]),
        lambda s: (s.x(s.B, s.D, s.H, s.H), s.p(s.B)),
        whole="each sample is chosen by its number",
    ),
    _call(
        "patches",
        lambda x: x.unflatten(2, (-1, 2)).unflatten(4, (-1, 2)).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2),
    ),
    _call(
        "total variation",
        lambda x: (x[..., 1:] - x[..., :-1]).abs().mean() + (x[:, :, 1:] - x[:, :, :-1]).square().sum(),
    ),
    _call("gram matrix", lambda x: ((f := x.flatten(2)) @ f.transpose(1, 2) / f.shape[-1]).square().mean()),
)
def test_resampling(case: Case) -> None:
    verify(case)


@table(
    _call("max_pool2d", lambda x: F.max_pool2d(x, 2)),
    _call("max_pool2d with indices", lambda x: F.max_pool2d(x, 3, stride=1, padding=1, return_indices=True)),
    _call("max_unpool2d", _unpooled),
    _call("max_pool1d with indices", lambda x: F.max_pool1d(x, 2, return_indices=True), lambda s: s.x(s.B, s.D, s.H)),
    _call(
        "max_pool3d with indices", lambda x: F.max_pool3d(x, 2, return_indices=True), lambda s: s.x(s.B, s.D, 2, 4, 4)
    ),
    _call("adaptive_max_pool2d with indices", lambda x: F.adaptive_max_pool2d(x, (2, 3), return_indices=True)),
    _call("adaptive_max_pool1d", lambda x: F.adaptive_max_pool1d(x, 2), lambda s: s.x(s.B, s.D, s.H)),
    _call("fractional_max_pool2d", lambda x: F.fractional_max_pool2d(x, 2, output_ratio=(0.5, 0.5))),
    _call("avg_pool2d", lambda x: F.avg_pool2d(x, 3, stride=2, padding=1, count_include_pad=False)),
    _call("avg_pool1d", lambda x: F.avg_pool1d(x, 2), lambda s: s.x(s.B, s.D, s.H)),
    _call("avg_pool3d", lambda x: F.avg_pool3d(x, 2), lambda s: s.x(s.B, s.D, 2, 4, 4)),
    _call("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, (2, 3))),
    _call("lp_pool2d", lambda x: F.lp_pool2d(x.abs() + 0.1, 2.0, 2)),
    _call("global max", lambda x: x.amax((2, 3))),
    _call("global mean", lambda x: x.mean((-2, -1))),
)
def test_pooling(case: Case) -> None:
    verify(case)
