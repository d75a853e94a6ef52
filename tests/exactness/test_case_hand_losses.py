"""Losses written by hand; none of them holds a tensor of batch × vocabulary whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import koila
from tests.exactness.cases import Case, Largest, Sizes, assert_split, check, held_elements, table, verify

VOCABULARY = 32000
WIDTH = 2
"""Narrow, so that the head's weight is far smaller than batch × vocabulary."""


def _classes(s: Sizes) -> tuple[torch.Tensor, ...]:
    return s.x(s.B, s.D), s.y(s.B)


def _head(s: Sizes) -> nn.Module:
    return nn.Linear(s.D, s.C)


def _smoothed(logp: torch.Tensor, y: torch.Tensor, epsilon: float = 0.1) -> torch.Tensor:
    chosen = logp.gather(-1, y.unsqueeze(-1)).squeeze(-1)
    return -((1 - epsilon) * chosen + epsilon * logp.mean(-1)).mean()


def _smoothed_target(logp: torch.Tensor, y: torch.Tensor, epsilon: float = 0.1) -> torch.Tensor:
    target = torch.full_like(logp, epsilon / (logp.shape[-1] - 1))
    target.scatter_(-1, y.unsqueeze(-1), 1 - epsilon)
    return (-target * logp).sum(-1).mean()


def _one_hot(logp: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return -(F.one_hot(y, logp.shape[-1]).to(logp.dtype) * logp).sum(-1).mean()


def _focal(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    logp = -F.cross_entropy(logits, y, reduction="none")
    return -(((1 - logp.exp()) ** 2) * logp).mean()


def _all_together(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    logits = net(x)
    penalty = sum(p.square().sum() for p in net.parameters()) + sum(p.abs().sum() for p in net.parameters())
    return F.cross_entropy(logits, y) + 0.3 * logits.square().mean() + 0.1 * logits.logsumexp(1).mean() + 0.01 * penalty


def _calibrated(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    probabilities = net(x).softmax(1)
    usage = probabilities.mean(0)
    return F.nll_loss(probabilities.log(), y) + (usage * usage.log()).sum()


@table(
    Case(
        "logp[arange(B), y]",
        lambda net, x, y: -net(x).log_softmax(1)[torch.arange(x.shape[0]), y].mean(),
        _classes,
        _head,
    ),
    Case(
        "logp[range(B), y]",
        lambda net, x, y: -net(x).log_softmax(1)[range(x.shape[0]), y].mean(),
        _classes,
        _head,
    ),
    Case(
        "logp[arange(B)[:, None], arange(T), y]",
        lambda net, x, y: -net(x).log_softmax(2)[torch.arange(x.shape[0])[:, None], torch.arange(x.shape[1]), y].mean(),
        lambda s: (s.x(s.B, s.T, s.D), s.y(s.B, s.T)),
        _head,
    ),
    Case("gather", lambda net, x, y: -net(x).log_softmax(1).gather(1, y[:, None]).mean(), _classes, _head),
    Case(
        "take_along_dim", lambda net, x, y: -net(x).log_softmax(1).take_along_dim(y[:, None], 1).mean(), _classes, _head
    ),
    Case("one_hot", lambda net, x, y: _one_hot(net(x).log_softmax(1), y), _classes, _head),
    Case(
        "logsumexp minus chosen",
        lambda net, x, y: (net(x).logsumexp(1) - net(x).gather(1, y[:, None])[:, 0]).mean(),
        _classes,
        _head,
    ),
    Case("square().mean()", lambda net, x, y: (net(x) - y[:, None]).square().mean(), _classes, _head),
    Case("pow(2).sum() / B", lambda net, x, y: (net(x) - y[:, None]).pow(2).sum() / x.shape[0], _classes, _head),
    Case("pow(2).sum() / numel", lambda net, x, y: (out := net(x)).pow(2).sum() / out.numel(), _classes, _head),
    Case("root of the mean square", lambda net, x, y: net(x).square().mean().sqrt(), _classes, _head),
    Case("norm of everything", lambda net, x, y: torch.linalg.vector_norm(net(x) - 1), _classes, _head),
    Case("mean of means", lambda net, x, y: net(x).sin().mean(1).exp().mean(), _classes, _head),
    Case("focal", lambda net, x, y: _focal(net(x), y), _classes, _head),
    Case(
        "dice over the batch",
        lambda net, x, y: 1 - 2 * ((p := net(x).softmax(1)) * F.one_hot(y, p.shape[1])).sum() / (p.sum() + x.shape[0]),
        _classes,
        _head,
    ),
    Case("log of the sum of exponents of everything", lambda net, x, y: net(x).flatten().logsumexp(0), _classes, _head),
    Case("largest of everything", lambda net, x, y: net(x).max() - net(x).amin() + net(x).mean(), _classes, _head),
    Case("variance of everything", lambda net, x, y: net(x).var() + net(x).std(), _classes, _head),
    Case("median of everything", lambda net, x, y: net(x).median() + net(x).mean(), _classes, _head),
    Case("usage of the classes", _calibrated, _classes, _head),
    Case(
        "KL of two heads",
        lambda net, x, y: F.kl_div(net(x).log_softmax(1), net(2 * x).softmax(1), reduction="batchmean"),
        _classes,
        _head,
    ),
    Case(
        "KL to a detached teacher",
        lambda net, x, y: (
            F.kl_div((net(x) / 2).log_softmax(1), (net(x + 1).detach() / 2).softmax(1), reduction="batchmean") * 4
        ),
        _classes,
        _head,
    ),
    Case("label smoothing", lambda net, x, y: _smoothed(net(x).log_softmax(1), y), _classes, _head),
    Case("label smoothing by scatter_", lambda net, x, y: _smoothed_target(net(x).log_softmax(1), y), _classes, _head),
    Case(
        "per-sample weights",
        lambda net, x, y, w: (F.cross_entropy(net(x), y, reduction="none") * w).sum() / w.sum(),
        lambda s: (*_classes(s), s.p(s.B)),
        _head,
    ),
    Case(
        "per-sample weights, mean",
        lambda net, x, y, w: (F.cross_entropy(net(x), y, reduction="none") * w).mean(),
        lambda s: (*_classes(s), s.p(s.B)),
        _head,
    ),
    # Regularisers run eagerly, before the deferred forward: a parameter's gradients are summed in another order.
    Case("several losses and regularisers", _all_together, _classes, _head, options={"repeats": False}),
    Case(
        "regulariser alone beside a sum",
        lambda net, x, y: net(x).sum() + 0.5 * torch.stack([p.norm() for p in net.parameters()]).sum(),
        _classes,
        _head,
    ),
    Case(
        "losses with different denominators",
        lambda net, x, y: (
            F.cross_entropy(net(x), y)
            + F.cross_entropy(net(-x), y, reduction="sum") / 3
            + F.mse_loss(net(x)[:, 0], y.to(x.dtype))
        ),
        _classes,
        _head,
    ),
    Case(
        "loss * its own detached scale",
        lambda net, x, y: (loss := net(x).square().mean()) / (loss.detach() + 1),
        _classes,
        _head,
    ),
    Case(
        "log of a loss",
        lambda net, x, y: F.cross_entropy(net(x), y).log() + F.mse_loss(net(x), net(x).detach() + 1).sqrt(),
        _classes,
        _head,
    ),
)
def test_loss_by_hand(case: Case) -> None:
    verify(case)


def _tokens(s: Sizes) -> tuple[torch.Tensor, ...]:
    mask = s.bits(s.B, s.T)
    mask[1], mask[0, 0] = 0, 1
    return s.x(s.B, s.T, s.D), s.y(s.B, s.T), mask


def _token_losses(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(net(x).transpose(1, 2), y, reduction="none")


@table(
    Case(
        "loss.sum() / mask.sum()", lambda net, x, y, m: (_token_losses(net, x, y) * m).sum() / m.sum(), _tokens, _head
    ),
    Case(
        "mean over the samples of means over tokens",
        lambda net, x, y, m: ((_token_losses(net, x, y) * m).sum(1) / m.sum(1).clamp_min(1)).mean(),
        _tokens,
        _head,
    ),
    Case(
        "mean over samples that have tokens",
        lambda net, x, y, m: (
            ((_token_losses(net, x, y) * m).sum(1) / m.sum(1).clamp_min(1)).sum() / (m.sum(1) > 0).sum()
        ),
        _tokens,
        _head,
    ),
    Case(
        "masked_select",
        lambda net, x, y, m: _token_losses(net, x, y).masked_select(m.bool()).mean(),
        _tokens,
        _head,
        "the number of tokens depends on data",
    ),
    Case(
        "loss[mask].mean()",
        lambda net, x, y, m: _token_losses(net, x, y)[m.bool()].mean(),
        _tokens,
        _head,
        "the number of tokens depends on data",
    ),
    Case(
        "where",
        lambda net, x, y, m: torch.where(m > 0, _token_losses(net, x, y), 0.0).sum() / m.count_nonzero(),
        _tokens,
        _head,
    ),
    Case(
        "shifted labels",
        lambda net, x, y, m: F.cross_entropy(
            net(x)[:, :-1].reshape(-1, net.out_features),
            y.masked_fill(m == 0, -100)[:, 1:].reshape(-1),
            ignore_index=-100,
        ),
        _tokens,
        _head,
    ),
    Case(
        "no token in the batch",
        lambda net, x, y, m: (_token_losses(net, x, y) * (m * 0)).sum() / (m * 0).sum(),
        _tokens,
        _head,
    ),
    Case(
        "tokens of two losses",
        lambda net, x, y, m: (
            (_token_losses(net, x, y) * m).sum() / m.sum() + (net(x).square().mean(-1) * (1 - m)).sum() / (1 - m).sum()
        ),
        _tokens,
        _head,
    ),
)
def test_token_weighted_mean(case: Case) -> None:
    verify(case)


def _wide(length: int | None) -> Callable[[Sizes], tuple[torch.Tensor, ...]]:
    def make(s: Sizes) -> tuple[torch.Tensor, ...]:
        shape = (s.B,) if length is None else (s.B, length)
        return s.x(*shape, WIDTH), s.y(*shape, high=VOCABULARY)

    return make


def _wide_head(s: Sizes) -> nn.Module:
    return nn.Linear(WIDTH, VOCABULARY, bias=False)


WIDE: dict[str, tuple[Callable[..., Any], int | None]] = {
    "cross_entropy": (lambda net, x, y: F.cross_entropy(net(x), y), None),
    "cross_entropy of tokens": (lambda net, x, y: F.cross_entropy(net(x).flatten(0, 1), y.flatten()), 2),
    "cross_entropy, label_smoothing": (lambda net, x, y: F.cross_entropy(net(x), y, label_smoothing=0.1), None),
    "logp[arange(B), y]": (lambda net, x, y: -net(x).log_softmax(1)[torch.arange(x.shape[0]), y].mean(), None),
    "gather": (lambda net, x, y: -net(x).log_softmax(2).gather(2, y[:, :, None]).mean(), 2),
    "square().mean()": (lambda net, x, y: net(x).square().mean(), None),
    "one_hot": (lambda net, x, y: _one_hot(net(x).log_softmax(1), y), None),
    "KL of two heads": (
        lambda net, x, y: F.kl_div(net(x).log_softmax(1), net(2 * x).softmax(1), reduction="batchmean"),
        None,
    ),
    "KL by hand": (
        lambda net, x, y: ((p := net(2 * x).softmax(1)) * (p.log() - net(x).log_softmax(1))).sum(1).mean(),
        None,
    ),
    "label smoothing": (lambda net, x, y: _smoothed(net(x).log_softmax(-1), y), 2),
    "label smoothing by scatter_": (lambda net, x, y: _smoothed_target(net(x).log_softmax(-1), y), None),
    "per-sample weights": (
        lambda net, x, y: (F.cross_entropy(net(x), y, reduction="none") * x[:, 0]).sum() / x[:, 0].abs().sum(),
        None,
    ),
    "z-loss added": (lambda net, x, y: F.cross_entropy(net(x), y) + 1e-2 * net(x).logsumexp(1).square().mean(), None),
    "regularised": (lambda net, x, y: F.cross_entropy(net(x), y) + net.weight.square().sum(), None),
}


@pytest.mark.parametrize("name", WIDE)
def test_vocabulary_is_never_held_for_the_batch(name: str) -> None:
    program, length = WIDE[name]
    sizes = (Sizes(B=7), Sizes(B=2, T=2, D=2)) if length is not None else (Sizes(B=7),)
    check(program, _wide(length), _wide_head, sizes=sizes, chunks=(1, 3))
    s = sizes[0]
    torch.manual_seed(0)
    whole = s.B * (length or 1) * VOCABULARY
    net, inputs = _wide_head(s).double(), koila.lazy(*_wide(length)(s))
    with koila.budget(chunk_size=1):
        explanation = koila.explain(program(net, *inputs), backward=True)
        assert held_elements(explanation) < whole, str(explanation)
        koila.metrics.reset()
        with Largest() as watch:
            program(net, *inputs).backward()
        assert_split(name)
    assert watch.num_elements < whole, watch.operator
