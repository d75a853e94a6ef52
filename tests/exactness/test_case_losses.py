"""Every loss of `torch.nn`, with every reduction and every option."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.exactness.cases import Case, Sizes, check, table, verify

REDUCTIONS = ("mean", "sum", "none")
Inputs = Callable[[Sizes], tuple[torch.Tensor, ...]]


def _signs(s: Sizes, *shape: int) -> torch.Tensor:
    return s.bits(*shape) * 2 - 1


def _classes(s: Sizes) -> tuple[torch.Tensor, ...]:
    return s.x(s.B, s.C), s.y(s.B)


def _pixels(s: Sizes) -> tuple[torch.Tensor, ...]:
    return s.x(s.B, s.C, s.T, s.H), s.y(s.B, s.T, s.H)


def _pair(s: Sizes) -> tuple[torch.Tensor, ...]:
    return s.x(s.B, s.D), s.x(s.B, s.D)


def _triple(s: Sizes) -> tuple[torch.Tensor, ...]:
    return s.x(s.B, s.D), s.x(s.B, s.D), s.x(s.B, s.D)


def _weights(s: Sizes) -> torch.Tensor:
    return torch.linspace(0.3, 2.0, s.C, dtype=s.dtype)


LOSSES: dict[str, tuple[Callable[[Sizes, str], nn.Module], Inputs]] = {
    "L1Loss": (lambda s, r: nn.L1Loss(reduction=r), _pair),
    "MSELoss": (lambda s, r: nn.MSELoss(reduction=r), _pair),
    "CrossEntropyLoss": (lambda s, r: nn.CrossEntropyLoss(reduction=r), _classes),
    "CrossEntropyLoss weights": (lambda s, r: nn.CrossEntropyLoss(_weights(s), reduction=r), _classes),
    "CrossEntropyLoss ignore_index": (lambda s, r: nn.CrossEntropyLoss(ignore_index=1, reduction=r), _classes),
    "CrossEntropyLoss label_smoothing": (lambda s, r: nn.CrossEntropyLoss(label_smoothing=0.1, reduction=r), _classes),
    "CrossEntropyLoss all options": (
        lambda s, r: nn.CrossEntropyLoss(_weights(s), ignore_index=2, label_smoothing=0.2, reduction=r),
        _classes,
    ),
    "CrossEntropyLoss pixels": (lambda s, r: nn.CrossEntropyLoss(reduction=r), _pixels),
    "CrossEntropyLoss pixels all options": (
        lambda s, r: nn.CrossEntropyLoss(_weights(s), ignore_index=2, label_smoothing=0.2, reduction=r),
        _pixels,
    ),
    "CrossEntropyLoss probabilities": (
        lambda s, r: nn.CrossEntropyLoss(_weights(s), label_smoothing=0.1, reduction=r),
        lambda s: (s.x(s.B, s.C), s.p(s.B, s.C)),
    ),
    "NLLLoss": (lambda s, r: nn.NLLLoss(reduction=r), _classes),
    "NLLLoss all options": (lambda s, r: nn.NLLLoss(_weights(s), ignore_index=0, reduction=r), _classes),
    "NLLLoss pixels": (lambda s, r: nn.NLLLoss(_weights(s), ignore_index=0, reduction=r), _pixels),
    "PoissonNLLLoss": (lambda s, r: nn.PoissonNLLLoss(reduction=r), lambda s: (s.x(s.B, s.D), s.p(s.B, s.D))),
    "PoissonNLLLoss full": (
        lambda s, r: nn.PoissonNLLLoss(log_input=False, full=True, reduction=r),
        lambda s: (s.p(s.B, s.D), s.p(s.B, s.D, grad=False) * 5),
    ),
    "GaussianNLLLoss": (
        lambda s, r: nn.GaussianNLLLoss(reduction=r),
        lambda s: (s.x(s.B, s.D), s.x(s.B, s.D), s.p(s.B, s.D)),
    ),
    "GaussianNLLLoss full": (
        lambda s, r: nn.GaussianNLLLoss(full=True, reduction=r),
        lambda s: (s.x(s.B, s.D), s.x(s.B, s.D), s.p(s.B, 1)),
    ),
    "KLDivLoss": (lambda s, r: nn.KLDivLoss(reduction=r), lambda s: (s.x(s.B, s.C), s.p(s.B, s.C))),
    "KLDivLoss log_target": (
        lambda s, r: nn.KLDivLoss(reduction=r, log_target=True),
        lambda s: (s.x(s.B, s.C), s.x(s.B, s.C)),
    ),
    "BCELoss": (lambda s, r: nn.BCELoss(reduction=r), lambda s: (s.p(s.B, s.D), s.bits(s.B, s.D))),
    "BCELoss weight": (
        lambda s, r: nn.BCELoss(torch.linspace(0.3, 2, s.D, dtype=s.dtype), reduction=r),
        lambda s: (s.p(s.B, s.D), s.p(s.B, s.D)),
    ),
    "BCEWithLogitsLoss": (lambda s, r: nn.BCEWithLogitsLoss(reduction=r), lambda s: (s.x(s.B, s.D), s.bits(s.B, s.D))),
    "BCEWithLogitsLoss pos_weight": (
        lambda s, r: nn.BCEWithLogitsLoss(pos_weight=torch.linspace(0.3, 2, s.D, dtype=s.dtype), reduction=r),
        lambda s: (s.x(s.B, s.D), s.bits(s.B, s.D)),
    ),
    "BCEWithLogitsLoss weight": (
        lambda s, r: nn.BCEWithLogitsLoss(
            torch.linspace(0.3, 2, s.B, dtype=s.dtype)[:, None],
            pos_weight=torch.linspace(0.3, 2, s.D, dtype=s.dtype),
            reduction=r,
        ),
        lambda s: (s.x(s.B, s.D), s.bits(s.B, s.D)),
    ),
    "MarginRankingLoss": (
        lambda s, r: nn.MarginRankingLoss(0.2, reduction=r),
        lambda s: (s.x(s.B), s.x(s.B), _signs(s, s.B)),
    ),
    "HingeEmbeddingLoss": (
        lambda s, r: nn.HingeEmbeddingLoss(0.7, reduction=r),
        lambda s: (s.x(s.B, s.D), _signs(s, s.B, s.D)),
    ),
    "MultiLabelMarginLoss": (
        lambda s, r: nn.MultiLabelMarginLoss(reduction=r),
        lambda s: (s.x(s.B, s.C), torch.where(torch.arange(s.C) < 2, torch.rand(s.B, s.C).argsort(1), -1)),
    ),
    "HuberLoss": (lambda s, r: nn.HuberLoss(reduction=r, delta=0.8), _pair),
    "SmoothL1Loss": (lambda s, r: nn.SmoothL1Loss(reduction=r, beta=0.6), _pair),
    "SoftMarginLoss": (lambda s, r: nn.SoftMarginLoss(reduction=r), lambda s: (s.x(s.B, s.D), _signs(s, s.B, s.D))),
    "MultiLabelSoftMarginLoss": (
        lambda s, r: nn.MultiLabelSoftMarginLoss(_weights(s), reduction=r),
        lambda s: (s.x(s.B, s.C), s.bits(s.B, s.C)),
    ),
    "CosineEmbeddingLoss": (
        lambda s, r: nn.CosineEmbeddingLoss(0.1, reduction=r),
        lambda s: (s.x(s.B, s.D), s.x(s.B, s.D), _signs(s, s.B)),
    ),
    "MultiMarginLoss": (lambda s, r: nn.MultiMarginLoss(reduction=r), _classes),
    "MultiMarginLoss weights": (lambda s, r: nn.MultiMarginLoss(2, 0.7, _weights(s), reduction=r), _classes),
    "TripletMarginLoss": (lambda s, r: nn.TripletMarginLoss(reduction=r), _triple),
    "TripletMarginLoss swap": (lambda s, r: nn.TripletMarginLoss(0.5, p=1.0, swap=True, reduction=r), _triple),
    "TripletMarginWithDistanceLoss": (
        lambda s, r: nn.TripletMarginWithDistanceLoss(distance_function=lambda a, b: (a - b).abs().sum(1), reduction=r),
        _triple,
    ),
}


def test_every_loss_of_torch_nn_is_in_a_table() -> None:
    named = {name.split()[0] for name in LOSSES} | {
        "CTCLoss",
        "AdaptiveLogSoftmaxWithLoss",
        "NLLLoss2d",
        "LinearCrossEntropyLoss",
    }
    assert {name for name in dir(nn) if name.endswith(("Loss", "Loss2d"))} - named == set()


WHOLE = {
    "GaussianNLLLoss": "it looks at the variances in Python",
    "GaussianNLLLoss full": "it looks at the variances in Python",
    "MultiLabelMarginLoss": "the operator has no rule",
}
"""Losses that may run whole, and why."""


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss by both")
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_loss(name: str, reduction: str) -> None:
    make, inputs = LOSSES[name]
    check(lambda loss, *tensors: loss(*tensors), inputs, lambda s: make(s, reduction), whole=WHOLE.get(name, ""))


def _log_probabilities(s: Sizes) -> torch.Tensor:
    return s.x(s.T + 4, s.B, s.C)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("zero_infinity", [False, True])
def test_ctc(reduction: str, zero_infinity: bool) -> None:
    check(
        lambda scores, targets, inputs, lengths: F.ctc_loss(
            scores.log_softmax(2), targets, inputs, lengths, reduction=reduction, zero_infinity=zero_infinity
        ),
        lambda s: (
            _log_probabilities(s),
            s.y(s.B, s.T, high=s.C - 1) + 1,
            torch.randint(s.T + 1, s.T + 5, (s.B,)),
            torch.randint(1, s.T, (s.B,)),
        ),
        batch=(1, 0, 0, 0),
    )


def test_ctc_lengths_as_tuples() -> None:
    check(
        lambda scores, targets: F.ctc_loss(
            scores.log_softmax(2), targets, (scores.shape[0],) * scores.shape[1], (2,) * scores.shape[1]
        ),
        lambda s: (_log_probabilities(s), s.y(s.B, s.T, high=s.C - 1) + 1),
        batch=(1, 0),
    )


def test_adaptive_log_softmax_with_loss() -> None:
    check(
        lambda net, x, y: net(x, y).loss,
        lambda s: (s.x(s.B, s.D), s.y(s.B, high=8)),
        lambda s: nn.AdaptiveLogSoftmaxWithLoss(s.D, 8, [2, 5], div_value=2.0),
        whole="the rows of each cluster depend on data",
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_linear_cross_entropy(reduction: str) -> None:
    if not hasattr(F, "linear_cross_entropy"):
        pytest.skip("this torch has none")
    check(
        lambda net, x, y: F.linear_cross_entropy(x, net.weight, y, reduction=reduction),
        lambda s: (s.x(s.B, s.D), s.y(s.B)),
        lambda s: nn.Linear(s.D, s.C, bias=False),
    )


def _head(s: Sizes) -> nn.Module:
    return nn.Linear(s.D, s.C)


def _padded(rows: slice) -> Callable[[Sizes], tuple[torch.Tensor, ...]]:
    def make(s: Sizes) -> tuple[torch.Tensor, ...]:
        labels = s.y(s.B, s.T)
        labels[rows] = -100
        return s.x(s.B, s.T, s.D), labels

    return make


def _token_loss(**options: Any) -> Callable[..., torch.Tensor]:
    return lambda net, x, y: F.cross_entropy(net(x).flatten(0, 1), y.flatten(), **options)


@table(
    Case("chunk with no valid target", _token_loss(), _padded(slice(1, 3)), _head),
    Case("first and last chunk with no valid target", _token_loss(), _padded(slice(None, None, 3)), _head),
    Case("batch with no valid target", _token_loss(), _padded(slice(None)), _head),
    Case("batch with no valid target, sum", _token_loss(reduction="sum"), _padded(slice(None)), _head),
    Case("batch with no valid target, label_smoothing", _token_loss(label_smoothing=0.1), _padded(slice(None)), _head),
    Case(
        "batch with no valid target, nll_loss",
        lambda net, x, y: F.nll_loss(net(x).log_softmax(-1).flatten(0, 1), y.flatten()),
        _padded(slice(None)),
        _head,
    ),
    Case(
        "valid targets of weight zero",
        lambda net, x, y, w: F.cross_entropy(net(x), y, weight=w),
        lambda s: (s.x(s.B, s.D), s.y(s.B), torch.zeros(s.C, dtype=s.dtype)),
        _head,
        options={"batch": (0, 0, None)},
    ),
)
def test_targets(case: Case) -> None:
    verify(case)
