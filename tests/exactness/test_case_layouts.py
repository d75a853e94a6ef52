"""The batch folded into other dims and back, moved, repeated, paired and shuffled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.exactness.cases import EVEN, Case, Sizes, check, table, verify


def _cube(s: Sizes) -> torch.Tensor:
    return s.x(s.B, s.T, s.D)


def _net(s: Sizes) -> nn.Module:
    return nn.Linear(s.D, s.D)


def _case(name: str, program: Callable[..., Any], inputs: Callable[[Sizes], Any] = _cube, **options: Any) -> Case:
    return Case(name, program, inputs, _net, options=options)


def _beams(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    count, beams = x.shape[0], 3
    wide = net(x.mean(1)).repeat_interleave(beams, 0) + torch.arange(beams, dtype=x.dtype).repeat(count)[:, None]
    scores = wide.log_softmax(1).view(count, -1)
    best, index = scores.topk(beams, dim=1)
    rows = (torch.arange(count)[:, None] * beams + index // x.shape[-1]).view(-1)
    return wide.index_select(0, rows).view(count, beams, -1).mean(1) * best.sum(1, keepdim=True)


def _augmented(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    views = torch.cat([x, x.flip(1), x * 0.9 + 0.1], dim=0)
    a, b, c = net(views).chunk(3, dim=0)
    return F.mse_loss(a, b.detach()) + F.cosine_similarity(b, c, dim=-1).mean() + a.sum()


def _interleaved(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    views = torch.stack([x, x.flip(1)], dim=1).flatten(0, 1)
    out = net(views).unflatten(0, (-1, 2))
    return (out[:, 0] - out[:, 1].detach()).square().mean() + out.mean()


def _mixup(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    order = torch.randperm(x.shape[0])
    share = torch.rand(()).item()
    logits = net(share * x + (1 - share) * x[order]).mean(1)
    return share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, y[order])


def _mixup_per_sample(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    order = torch.randperm(x.shape[0])
    share = torch.rand(x.shape[0], dtype=x.dtype)
    logits = net(share[:, None, None] * x + (1 - share[:, None, None]) * x[order]).mean(1)
    return (share * F.cross_entropy(logits, y, reduction="none")).mean() + F.cross_entropy(logits, y[order])


def _mixup_of_features(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    features = net(x)
    mixed = 0.3 * features + 0.7 * features[torch.randperm(x.shape[0])]
    return F.cross_entropy(mixed.mean(1), y)


def _cutmix(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    order = torch.randperm(x.shape[0])
    mixed = x.clone()
    mixed[:, 1:] = x[order, 1:]
    return F.cross_entropy(net(mixed).sum(1), y) + F.cross_entropy(net(mixed).mean(1), y[order])


def _labelled(s: Sizes) -> tuple[torch.Tensor, ...]:
    return s.x(s.B, s.T, s.D), s.y(s.B, high=s.D)


@pytest.mark.semantics("S4")
@table(
    _case("view(B*T)", lambda net, x: net(x.view(x.shape[0] * x.shape[1], -1)).view(x.shape).square()),
    _case("view(B*T) kept flat", lambda net, x: net(x.view(-1, x.shape[-1])).log_softmax(0)),
    _case("view(B*T) and a mean", lambda net, x: net(x.reshape(-1, x.shape[2])).square().mean()),
    _case("flatten(0, 1) and unflatten", lambda net, x: net(x.flatten(0, 1)).unflatten(0, x.shape[:2]).sin()),
    _case("flatten everything", lambda net, x: net(x).flatten().sin() * torch.arange(x.numel(), dtype=x.dtype)),
    _case("permute then reshape", lambda net, x: net(x).permute(1, 0, 2).reshape(x.shape[1] * x.shape[0], -1).sin()),
    _case(
        "permute, reshape and back",
        lambda net, x: (
            net(x).permute(2, 0, 1).reshape(x.shape[2], -1).sin().view(x.shape[2], x.shape[0], -1).permute(1, 2, 0)
        ),
    ),
    _case("reshape to (T, B*D)", lambda net, x: net(x).transpose(0, 1).reshape(x.shape[1], -1).softmax(0)),
    _case("[T, B] inside", lambda net, x: net(x.transpose(0, 1).contiguous()).cumsum(0).transpose(0, 1)),
    _case("[T, B] inputs", lambda net, x: net(x.sin()).sum(0), lambda s: s.x(s.T, s.B, s.D), batch=1),
    _case(
        "[T, B] inputs, flattened",
        lambda net, x: net(x.flatten(0, 1)).view(x.shape).mean(0),
        lambda s: s.x(s.T, s.B, s.D),
        batch=1,
    ),
    _case(
        "heads folded in front",
        lambda net, x: (
            net(x)
            .view(*x.shape[:2], 2, -1)
            .transpose(1, 2)
            .reshape(x.shape[0] * 2, x.shape[1], -1)
            .softmax(1)
            .view(x.shape[0], 2, x.shape[1], -1)
        ),
    ),
    _case("heads folded outside", lambda net, x: torch.cat(net(x).split(2, dim=2), dim=0).softmax(1)),
    _case("repeat_interleave", lambda net, x: net(x.repeat_interleave(3, 0)).sin()),
    _case("repeat_interleave within samples", lambda net, x: net(x.repeat_interleave(2, dim=1)).sin()),
    _case("repeat", lambda net, x: net(x.repeat(2, 1, 1)).sin()),
    _case("tile and reshape", lambda net, x: net(x.tile(1, 2, 1)).view(x.shape[0], 2, *x.shape[1:]).prod(1)),
    _case("expand and fold", lambda net, x: net(x[:, None].expand(-1, 3, -1, -1).reshape(-1, *x.shape[1:])).sin()),
    _case("beams", _beams, _labelled),
    _case("chunk of cat", _augmented),
    _case("cat with itself, kept", lambda net, x: net(torch.cat([x, x.flip(1)])).softmax(0)),
    _case("stack of two views, flattened", _interleaved),
    _case("split of the batch", lambda net, x: sum(part.square().sum() for part in net(x).split(2))),
    _case(
        "halves of the batch", lambda net, x: (net(x)[: x.shape[0] // 2] - net(x)[-(x.shape[0] // 2) :]).square().mean()
    ),
    _case("unbind within samples", lambda net, x: torch.stack([net(step).sin() for step in x.unbind(1)], 1)),
    _case("stack of steps in front", lambda net, x: torch.stack([net(step).sin() for step in x.unbind(1)])),
    _case("cat of a token", lambda net, x: net(torch.cat([net.bias.expand(x.shape[0], 1, -1), x], 1)).sin()),
    _case(
        "cat of a memory along the batch",
        lambda net, x: torch.cat([net(x), net.weight[None].expand(2, -1, -1)[:, :1].expand(-1, x.shape[1], -1)]).sin(),
    ),
    _case("roll over the batch", lambda net, x: net(x).roll(1, 0) * net(x)),
    _case("flip over the batch", lambda net, x: net(x).flip(0) * net(x)),
    Case("roll of the input", lambda net, x: net(x.roll(-2, 0)).sin(), _cube, _net),
    Case(
        "shuffled inputs",
        lambda net, x, y: F.cross_entropy(net(x[p := torch.randperm(x.shape[0])]).mean(1), y[p]),
        _labelled,
        _net,
    ),
    _case("mixup with randperm", _mixup, _labelled),
    _case("mixup per sample", _mixup_per_sample, _labelled),
    _case("mixup of features", _mixup_of_features, _labelled),
    _case("cutmix", _cutmix, _labelled),
    _case("squeeze() without a dim", lambda net, x: net(x)[:, :, :1].sum(1, keepdim=True).squeeze().sin()),
    _case("unsqueeze in front", lambda net, x: net(x)[None].sin()),
    _case("movedim and swapaxes", lambda net, x: net(x).movedim(0, -1).swapaxes(0, 1).sin()),
    _case("as_strided", lambda net, x: net(x).as_strided((x.shape[0], x.shape[2]), (x.stride(0), 1)).sin()),
    _case("expand of a scalar per sample", lambda net, x: net(x).mean((1, 2), keepdim=True).expand_as(x) * x),
    _case("broadcast against all pairs", lambda net, x: (net(x)[:, None] * x[None]).sum((2, 3)).softmax(1)),
    _case("transpose of a matrix", lambda net, x: net(x.sum(1)).t().sin()),
)
def test_layout(case: Case) -> None:
    verify(case)


@pytest.mark.parametrize(
    "pairs", ["view(B//2, 2)", "reshape(2, B//2)", "view(B//2, 2*T)", "x[0::2], x[1::2]", "chunk(2)"]
)
def test_pairs(pairs: str) -> None:
    programs: dict[str, Callable[..., torch.Tensor]] = {
        "view(B//2, 2)": lambda net, x: net(x).view(x.shape[0] // 2, 2, *x.shape[1:]).diff(dim=1).square(),
        "reshape(2, B//2)": lambda net, x: net(x).reshape(2, x.shape[0] // 2, *x.shape[1:]).diff(dim=0).square(),
        "view(B//2, 2*T)": lambda net, x: net(x).view(x.shape[0] // 2, 2 * x.shape[1], -1).softmax(1),
        "x[0::2], x[1::2]": lambda net, x: (net(x)[0::2] - net(x)[1::2]).square(),
        "chunk(2)": lambda net, x: (net(x).chunk(2)[0] - net(x).chunk(2)[1]).square(),
    }
    check(programs[pairs], _cube, _net, sizes=EVEN, chunks=(1, 2, 3, 4, 6))
