"""Losses in which samples see each other: the embeddings are gathered, the encoder runs in chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.exactness.cases import EVEN, Case, Sizes, check, table, verify


def _encoder(s: Sizes) -> nn.Module:
    return nn.Sequential(nn.Linear(s.D, s.D), nn.Tanh(), nn.Linear(s.D, s.C))


def _views(s: Sizes) -> tuple[torch.Tensor, ...]:
    return s.x(s.B, s.D), s.x(s.B, s.D)


def _labelled(s: Sizes) -> tuple[torch.Tensor, ...]:
    return s.x(s.B, s.D), torch.arange(s.B) % 2


def _infonce(net: nn.Module, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    scores = F.normalize(net(a), dim=1) @ F.normalize(net(b), dim=1).T / 0.1
    return F.cross_entropy(scores, torch.arange(a.shape[0]))


class _Clip(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.image, self.text = _encoder(s), _encoder(s)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        scores = self.scale.exp() * F.normalize(self.image(a), dim=1) @ F.normalize(self.text(b), dim=1).t()
        labels = torch.arange(scores.shape[0], device=scores.device)
        return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.t(), labels)) / 2


def _siglip(net: nn.Module, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    scores = F.normalize(net(a), dim=1) @ F.normalize(net(b), dim=1).T
    return -F.logsigmoid(scores * (2 * torch.eye(a.shape[0]) - 1)).sum() / a.shape[0]


def _ntxent(net: nn.Module, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    z = F.normalize(net(torch.cat([a, b])), dim=1)
    count = a.shape[0]
    scores = (z @ z.T / 0.5).masked_fill(torch.eye(2 * count, dtype=torch.bool), float("-inf"))
    return F.cross_entropy(scores, (torch.arange(2 * count) + count) % (2 * count))


def _triplet_in_batch(net: nn.Module, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    anchor, positive = net(a), net(b)
    return F.triplet_margin_loss(anchor, positive, positive.roll(1, 0))


def _triplet_all(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = net(x)
    distance = (z[:, None] - z[None]).square().sum(-1)
    same = y[:, None] == y[None]
    terms = F.relu(distance[:, :, None] - distance[:, None, :] + 0.3)
    valid = same[:, :, None] & ~same[:, None, :]
    return (terms * valid).sum() / valid.sum()


def _supervised(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = F.normalize(net(x), dim=1)
    others = ~torch.eye(x.shape[0], dtype=torch.bool)
    scores = (z @ z.T / 0.2).masked_fill(~others, -1e9)
    positives = ((y[:, None] == y[None, :]) & others).to(z.dtype)
    return -((scores.log_softmax(1) * positives).sum(1) / positives.sum(1).clamp(min=1)).mean()


def _batch_hard(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = net(x)
    distance = torch.cdist(z, z)
    same = y[:, None] == y[None]
    hardest_positive = distance.masked_fill(~same, 0.0).max(1).values
    hardest_negative = distance.masked_fill(same, float("inf")).min(1).values
    return F.softplus(hardest_positive - hardest_negative).mean()


def _hard_topk(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(net(x).sum(1), y.to(x.dtype), reduction="none").topk(3).values.mean()


def _hard_argsort(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    losses = F.mse_loss(net(x).sum(1), y.to(x.dtype), reduction="none")
    return losses[losses.argsort(descending=True)[:3]].mean() + net(x)[losses.argsort()[:2]].square().sum()


def _hard_sort(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    losses = F.mse_loss(net(x).sum(1), y.to(x.dtype), reduction="none")
    return (losses.sort().values * torch.linspace(0, 1, x.shape[0], dtype=x.dtype)).sum() + losses.kthvalue(2).values


def _barlow(net: nn.Module, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    za, zb = net(a), net(b)
    za, zb = (za - za.mean(0)) / za.std(0), (zb - zb.mean(0)) / zb.std(0)
    cross = za.T @ zb / a.shape[0]
    on = (torch.diagonal(cross) - 1).pow(2).sum()
    off = (cross - torch.diag(torch.diagonal(cross))).pow(2).sum()
    return on + 0.01 * off


def _vicreg(net: nn.Module, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    loss = F.mse_loss(net(a), net(b))
    for z in (net(a), net(b)):
        z = z - z.mean(dim=0)
        covariance = z.T @ z / (z.shape[0] - 1)
        off = covariance - torch.diag(covariance.diagonal())
        loss = loss + F.relu(1 - torch.sqrt(z.var(dim=0) + 1e-4)).mean() + off.pow(2).sum() / z.shape[1]
    return loss


def _mmd(net: nn.Module, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    def kernel(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.exp(-torch.cdist(one, other).square()).mean()

    x, y = net(a), net(b)
    return kernel(x, x) + kernel(y, y) - 2 * kernel(x, y)


def _coral(net: nn.Module, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (torch.cov(net(a).T) - torch.cov(net(b).T)).square().sum()


class _Moco(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.query, self.key = _encoder(s), _encoder(s)
        self.register_buffer("queue", F.normalize(torch.randn(s.C, 2 * s.B), dim=0))

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for mine, other in zip(self.query.parameters(), self.key.parameters(), strict=True):
                other.mul_(0.9).add_(mine, alpha=0.1)
            k = F.normalize(self.key(b), dim=1)
        q = F.normalize(self.query(a), dim=1)
        positive = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
        negative = torch.einsum("nc,ck->nk", q, self.queue.clone().detach())
        scores = torch.cat([positive, negative], dim=1) / 0.2
        self.queue[:, : a.shape[0]] = k.T
        return F.cross_entropy(scores, torch.zeros(a.shape[0], dtype=torch.long))


class _Dino(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.student, self.teacher = _encoder(s), _encoder(s)
        self.register_buffer("center", torch.zeros(1, s.C))

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            teacher = self.teacher(b)
            target = ((teacher - self.center) / 0.04).softmax(-1)
            self.update(teacher.mean(0, keepdim=True))
        return -(target * (self.student(a) / 0.1).log_softmax(-1)).sum(-1).mean()

    def update(self, mean: torch.Tensor) -> None:
        self.center = self.center * 0.9 + mean * 0.1


class _DinoCopied(_Dino):
    def update(self, mean: torch.Tensor) -> None:
        self.center.copy_(self.center * 0.9 + mean * 0.1)


class _DinoInPlace(_Dino):
    def update(self, mean: torch.Tensor) -> None:
        self.center.mul_(0.9).add_(mean, alpha=0.1)


def _sinkhorn(net: nn.Module, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        q = (net(b) / 0.5).exp().t()
        q = q / q.sum()
        for _ in range(2):
            q = q / q.sum(1, keepdim=True) / q.shape[0]
            q = q / q.sum(0, keepdim=True) / q.shape[1]
        q = (q * q.shape[1]).t()
    return -(q * net(a).log_softmax(1)).sum(1).mean()


def _row(name: str, program: Callable[..., Any], inputs: Callable[[Sizes], Any] = _views, **more: Any) -> Case:
    return Case(name, program, inputs, more.pop("module", _encoder), options=more)


def _called(net: nn.Module, *inputs: torch.Tensor) -> Any:
    return net(*inputs)


@table(
    _row("InfoNCE", _infonce),
    _row("CLIP", _called, module=_Clip),
    _row("SigLIP", _siglip),
    _row("NT-Xent", _ntxent),
    _row("triplet with in-batch negatives", _triplet_in_batch),
    _row("triplet, all of the batch", _triplet_all, _labelled),
    _row("pairwise distances by cdist", lambda net, a, b: torch.cdist(net(a), net(b)).mean()),
    _row("pairwise distances by pdist", lambda net, a, b: F.pdist(net(a)).mean() + net(b).mean()),
    _row("pairwise distances by broadcasting", lambda net, a, b: (net(a)[:, None] - net(b)[None]).abs().sum(-1).mean()),
    _row(
        "cosine similarity of all pairs",
        lambda net, a, b: F.cosine_similarity(net(a)[:, None], net(b)[None], dim=-1).square().mean(),
    ),
    _row("supervised contrastive", _supervised, _labelled),
    _row("batch-hard mining", _batch_hard, _labelled),
    _row("mining by topk over the batch", _hard_topk, _labelled),
    _row("mining by argsort over the batch", _hard_argsort, _labelled),
    _row("mining by sort over the batch", _hard_sort, _labelled),
    _row("DINO centering", _called, module=_Dino),
    _row("DINO centering, copied", _called, module=_DinoCopied),
    _row("DINO centering, in place", _called, module=_DinoInPlace),
    _row("Sinkhorn assignment", _sinkhorn),
    _row("Barlow Twins", _barlow),
    _row("VICReg", _vicreg),
    _row("MMD", _mmd),
    _row("CORAL", _coral),
    _row("MoCo queue", _called, module=_Moco),
)
def test_across_samples(case: Case) -> None:
    verify(case)


def test_pairs_within_the_batch() -> None:
    check(
        lambda net, x, y: F.relu(net(x).view(x.shape[0] // 2, 2, -1).diff(dim=1).square().sum(-1) - 0.5).mean(),
        _labelled,
        _encoder,
        sizes=EVEN,
        chunks=(1, 2, 3, 4, 5),
    )


def test_attention_over_the_batch() -> None:
    check(
        lambda net, a, b: F.scaled_dot_product_attention(net(a)[None], net(b)[None], net(b)[None])[0],
        _views,
        _encoder,
    )
