"""Normalisation: statistics of the whole batch in forward and backward, running statistics updated once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from tests.exactness.cases import Case, Sizes, check, table, verify

BATCH_NORMS: dict[str, tuple[type[nn.Module], Callable[[Sizes], torch.Tensor]]] = {
    "BatchNorm1d": (nn.BatchNorm1d, lambda s: s.x(s.B, s.D)),
    "BatchNorm1d of sequences": (nn.BatchNorm1d, lambda s: s.x(s.B, s.D, s.T)),
    "BatchNorm2d": (nn.BatchNorm2d, lambda s: s.x(s.B, s.D, s.T, s.H)),
    "BatchNorm3d": (nn.BatchNorm3d, lambda s: s.x(s.B, s.D, s.T, 2, s.T)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "momentum": {"momentum": 0.3},
    "momentum=None": {"momentum": None},
    "without statistics": {"track_running_stats": False},
    "not affine": {"affine": False},
}


def _trained(make: Callable[[Sizes], nn.Module]) -> Callable[[Sizes], nn.Module]:
    """A module whose scales and running statistics are not their first values."""

    def build(s: Sizes) -> nn.Module:
        net = make(s)
        for tensor in (*net.parameters(), *net.buffers()):
            if tensor.is_floating_point():
                tensor.data.uniform_(0.5, 1.5)
        return net

    return build


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", BATCH_NORMS)
def test_batch_norm(name: str, options: str) -> None:
    make, inputs = BATCH_NORMS[name]
    check(lambda net, x: net(x), inputs, _trained(lambda s: make(s.D, **OPTIONS[options])))


@pytest.mark.parametrize("name", BATCH_NORMS)
def test_batch_norm_in_eval_mode(name: str) -> None:
    make, inputs = BATCH_NORMS[name]
    check(lambda net, x: net(x), inputs, _trained(lambda s: make(s.D).eval()))


def test_batch_norm_fifty_in_a_row() -> None:
    def make(s: Sizes) -> nn.Module:
        layers = [
            layer for _ in range(50) for layer in (nn.Linear(s.D, s.D, bias=False), nn.BatchNorm1d(s.D), nn.Tanh())
        ]
        return nn.Sequential(*layers)

    check(lambda net, x: net(x), lambda s: s.x(s.B, s.D), make, sizes=(Sizes(),), chunks=(3,), tolerance=1e-9)


def test_batch_norm_after_a_gather() -> None:
    check(
        lambda net, x: net(torch.cdist(x, x)).square().sum() + net(F.normalize(x, dim=0) @ x.detach().T).mean(),
        lambda s: s.x(s.B, s.D),
        _trained(lambda s: nn.BatchNorm1d(s.B)),
    )


def test_batch_norm_used_twice() -> None:
    check(lambda net, x: net(net(x).sin()), lambda s: s.x(s.B, s.D), _trained(lambda s: nn.BatchNorm1d(s.D)))


def test_batch_norm_of_two_steps() -> None:
    def steps(net: nn.Module, x: torch.Tensor) -> Any:
        first = net(x).square().mean()
        return first + net(x + 1).abs().mean()

    check(
        steps,
        lambda s: s.x(s.B, s.D),
        _trained(lambda s: nn.Sequential(nn.Linear(s.D, s.D, False), nn.BatchNorm1d(s.D))),
    )


def test_batch_norm_in_a_convolutional_net() -> None:
    def make(s: Sizes) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(s.D, s.C, 3, padding=1, bias=False),
            nn.BatchNorm2d(s.C),
            nn.ReLU(inplace=True),
            nn.Conv2d(s.C, s.C, 3, padding=1, bias=False),
            nn.BatchNorm2d(s.C),
            nn.Dropout2d(0.3),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(s.C, s.C),
        )

    check(lambda net, x, y: F.cross_entropy(net(x), y), lambda s: (s.x(s.B, s.D, s.H, s.H), s.y(s.B)), make)


def test_batch_norm_by_hand() -> None:
    def norm(x: torch.Tensor) -> torch.Tensor:
        mean, var = x.mean(0, keepdim=True), x.var(0, unbiased=False, keepdim=True)
        return (x - mean) / torch.sqrt(var + 1e-5)

    check(norm, lambda s: s.x(s.B, s.D))
    check(lambda x: (x - x.mean()) / x.std(), lambda s: s.x(s.B, s.D))
    check(lambda x: torch.var_mean(x, (0, 2), correction=0), lambda s: s.x(s.B, s.D, s.T))


def test_sync_of_frozen_statistics() -> None:
    check(
        lambda x, mean, var: F.batch_norm(x, mean, var, training=False),
        lambda s: (s.x(s.B, s.D), s.x(s.D, grad=False), s.p(s.D, grad=False)),
        batch=(0, None, None),
    )


@table(
    Case(
        "GroupNorm", lambda net, x: net(x), lambda s: s.x(s.B, s.D, s.T, s.H), _trained(lambda s: nn.GroupNorm(2, s.D))
    ),
    Case(
        "GroupNorm of vectors", lambda net, x: net(x), lambda s: s.x(s.B, s.D), _trained(lambda s: nn.GroupNorm(2, s.D))
    ),
    Case(
        "GroupNorm of one group",
        lambda net, x: net(x),
        lambda s: s.x(s.B, s.D, s.T),
        _trained(lambda s: nn.GroupNorm(1, s.D, affine=False)),
    ),
    Case(
        "InstanceNorm1d",
        lambda net, x: net(x),
        lambda s: s.x(s.B, s.D, s.T),
        _trained(lambda s: nn.InstanceNorm1d(s.D)),
    ),
    Case(
        "InstanceNorm2d",
        lambda net, x: net(x),
        lambda s: s.x(s.B, s.D, s.T, s.H),
        _trained(lambda s: nn.InstanceNorm2d(s.D, affine=True)),
    ),
    Case(
        "InstanceNorm2d with statistics",
        lambda net, x: net(x),
        lambda s: s.x(s.B, s.D, s.T, s.H),
        _trained(lambda s: nn.InstanceNorm2d(s.D, affine=True, track_running_stats=True)),
        "its statistics are not written functionally",
    ),
    Case(
        "InstanceNorm2d with statistics, eval",
        lambda net, x: net(x),
        lambda s: s.x(s.B, s.D, s.T, s.H),
        _trained(lambda s: nn.InstanceNorm2d(s.D, track_running_stats=True).eval()),
    ),
    Case(
        "InstanceNorm3d",
        lambda net, x: net(x),
        lambda s: s.x(s.B, s.D, s.T, 2, 3),
        _trained(lambda s: nn.InstanceNorm3d(s.D)),
    ),
    Case("LayerNorm", lambda net, x: net(x), lambda s: s.x(s.B, s.T, s.D), _trained(lambda s: nn.LayerNorm(s.D))),
    Case(
        "LayerNorm over two dims",
        lambda net, x: net(x),
        lambda s: s.x(s.B, s.T, s.D),
        _trained(lambda s: nn.LayerNorm([s.T, s.D])),
    ),
    Case(
        "LayerNorm without bias",
        lambda net, x: net(x),
        lambda s: s.x(s.B, s.T, s.D),
        _trained(lambda s: nn.LayerNorm(s.D, bias=False)),
    ),
    Case(
        "LayerNorm not affine",
        lambda net, x: net(x),
        lambda s: s.x(s.B, s.D),
        lambda s: nn.LayerNorm(s.D, elementwise_affine=False),
    ),
    Case("RMSNorm", lambda net, x: net(x), lambda s: s.x(s.B, s.T, s.D), _trained(lambda s: nn.RMSNorm(s.D))),
    Case(
        "RMSNorm by hand",
        lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
        lambda s: s.x(s.B, s.T, s.D),
    ),
    Case("LocalResponseNorm", lambda net, x: net(x), lambda s: s.x(s.B, s.D, s.T), lambda s: nn.LocalResponseNorm(3)),
    Case(
        "LocalResponseNorm of images",
        lambda net, x: net(x),
        lambda s: s.x(s.B, s.D, s.T, s.H),
        lambda s: nn.LocalResponseNorm(2),
    ),
    Case("normalize", lambda x: F.normalize(x, dim=1), lambda s: s.x(s.B, s.D)),
    Case("normalize over the batch", lambda x: F.normalize(x, dim=0), lambda s: s.x(s.B, s.D)),
    Case("weight norm", lambda net, x: net(x), lambda s: s.x(s.B, s.D), lambda s: weight_norm(nn.Linear(s.D, s.C))),
    Case(
        "weight norm of a convolution",
        lambda net, x: net(x),
        lambda s: s.x(s.B, s.D, s.H),
        lambda s: weight_norm(nn.Conv1d(s.D, s.C, 3)),
    ),
    Case("spectral norm", lambda net, x: net(x), lambda s: s.x(s.B, s.D), lambda s: spectral_norm(nn.Linear(s.D, s.C))),
    Case(
        "spectral norm of a convolution",
        lambda net, x: net(x),
        lambda s: s.x(s.B, s.D, s.H),
        lambda s: spectral_norm(nn.Conv1d(s.D, s.C, 3)),
    ),
)
def test_norm(case: Case) -> None:
    verify(case)
