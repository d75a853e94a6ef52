"""Where the batch is, how many batches there are, and inputs that have none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import koila
from tests.exactness.cases import Case, Sizes, check, table, verify


def _net(s: Sizes) -> nn.Module:
    return nn.Linear(s.D, s.C)


@table(
    Case("dim 1", lambda net, x: net(x.sin()).square(), lambda s: s.x(s.T, s.B, s.D), _net, options={"batch": 1}),
    Case(
        "dim 2", lambda net, x: net(x.sin()).softmax(1), lambda s: s.x(s.T, s.H, s.B, s.D), _net, options={"batch": 2}
    ),
    Case("dim -1", lambda net, x: net(x.T).log_softmax(1), lambda s: s.x(s.D, s.B), _net, options={"batch": -1}),
    Case(
        "dim -1 of signals",
        lambda x: F.conv1d(x.permute(2, 0, 1), torch.ones(2, x.shape[0], 2, dtype=x.dtype)),
        lambda s: s.x(s.D, s.T, s.B),
        options={"batch": -1},
    ),
    Case(
        "dims that differ",
        lambda net, x, y: F.cross_entropy(net(x).permute(1, 2, 0), y),
        lambda s: (s.x(s.T, s.B, s.D), s.y(s.B, s.T)),
        _net,
        options={"batch": (1, 0)},
    ),
    Case(
        "a sum over dim 0 where the batch is dim 1",
        lambda net, x: net(x).sum(0).mean(),
        lambda s: s.x(s.T, s.B, s.D),
        _net,
        options={"batch": 1},
    ),
)
def test_batch_dimension(case: Case) -> None:
    verify(case)


@table(
    Case(
        "a table",
        lambda net, x, table: net(x) @ table,
        lambda s: (s.x(s.B, s.D), s.x(s.C, s.T)),
        _net,
        options={"batch": (0, None)},
    ),
    Case(
        "a table of the batch's size",
        lambda net, x, table: net(x) @ table,
        lambda s: (s.x(s.B, s.D), s.x(s.C, s.B)),
        _net,
        options={"batch": (0, None)},
    ),
    Case(
        "a square table of the batch's size",
        lambda x, table: table @ x + table.mT @ x,
        lambda s: (s.x(s.B, s.D), s.x(s.B, s.B)),
        options={"batch": (0, None)},
    ),
    Case(
        "a row that is added",
        lambda net, x, row: net(x + row),
        lambda s: (s.x(s.B, s.D), s.x(s.D)),
        _net,
        options={"batch": (0, None)},
    ),
    Case("a temperature", lambda net, x, t: (net(x) / t.exp()).softmax(1), lambda s: (s.x(s.B, s.D), s.x()), _net),
    Case(
        "a real tensor of the batch's size",
        lambda net, x: net(x) * torch.arange(x.shape[0], dtype=x.dtype)[:, None],
        lambda s: s.x(s.B, s.D),
        _net,
    ),
    Case(
        "a context for cross-attention",
        lambda x, c: (x @ c.T).softmax(-1) @ c,
        lambda s: (s.x(s.B, s.T, s.D), s.x(s.H, s.D)),
        options={"batch": (0, None)},
    ),
    Case(
        "a batch of one that is expanded",
        lambda net, x, row: net(x + row.expand_as(x)),
        lambda s: (s.x(s.B, s.D), s.x(1, s.D)),
        _net,
        options={"batch": (0, None)},
    ),
)
def test_shared_input(case: Case) -> None:
    verify(case)


def _both(net: nn.Module, x: torch.Tensor, y: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    consistency = F.mse_loss(net(u).softmax(1), net(u * 1.1).softmax(1).detach())
    return F.cross_entropy(net(x), y) + 0.5 * consistency + net(u).logsumexp(1).mean()


@pytest.mark.parametrize("others", [1, 3, 7, 14])
def test_groups_of_different_batch_sizes(others: int) -> None:
    def groups(x: torch.Tensor, y: torch.Tensor, u: torch.Tensor) -> Any:
        return (*koila.lazy(x, y), koila.lazy(u))

    def inputs(s: Sizes) -> Any:
        return s.x(s.B, s.D), s.y(s.B), s.x(others, s.D)

    check(_both, inputs, _net, batch=groups, sizes=(Sizes(),), chunks=(1, 2, 3, 5))


def test_groups_that_meet_in_all_pairs() -> None:
    check(
        lambda net, x, u: (net(x) @ net(u).T).softmax(1),
        lambda s: (s.x(s.B, s.D), s.x(s.B + 2, s.D)),
        _net,
        batch=lambda x, u: (koila.lazy(x), koila.lazy(u)),
        chunks=(1, 2, 3),
    )


def test_groups_of_one_size() -> None:
    check(
        lambda net, x, u: (net(x) - net(u)).square().mean(),
        lambda s: (s.x(s.B, s.D), s.x(s.B, s.D)),
        _net,
        batch=lambda x, u: (koila.lazy(x), koila.lazy(u)),
    )


@table(
    Case("[B]", lambda net, x, y: F.cross_entropy(net(x).mean(1), y), lambda s: (s.x(s.B, s.T, s.D), s.y(s.B)), _net),
    Case(
        "[B, T]", lambda net, x, y: F.cross_entropy(net(x).mT, y), lambda s: (s.x(s.B, s.T, s.D), s.y(s.B, s.T)), _net
    ),
    Case(
        "[B, 1]",
        lambda net, x, y: F.cross_entropy(net(x).mean(1), y.squeeze(1)),
        lambda s: (s.x(s.B, s.T, s.D), s.y(s.B, 1)),
        _net,
    ),
    Case(
        "[B, T, C]",
        lambda net, x, y: F.binary_cross_entropy_with_logits(net(x), y),
        lambda s: (s.x(s.B, s.T, s.D), s.bits(s.B, s.T, s.C)),
        _net,
    ),
    Case(
        "boxes [B, N, 4] and classes [B, N]",
        lambda net, x, b, y: F.smooth_l1_loss(net(x)[..., :4], b) + F.cross_entropy(net(x).flatten(0, 1), y.flatten()),
        lambda s: (s.x(s.B, s.T, s.D), s.x(s.B, s.T, 4), s.y(s.B, s.T)),
        _net,
    ),
    Case(
        "a dict of ranks",
        lambda net, d: F.cross_entropy(net(d["x"]).mean(1), d["y"]) + (net(d["x"]).mean((1, 2)) * d["w"]).mean(),
        lambda s: ({"x": s.x(s.B, s.T, s.D), "y": s.y(s.B), "w": s.p(s.B)},),
        _net,
    ),
)
def test_labels_of_rank(case: Case) -> None:
    verify(case)


def _ragged(s: Sizes) -> tuple[torch.Tensor, ...]:
    lengths = torch.arange(s.B) % (s.T + 1)
    return s.x(s.B, s.T, s.D), torch.arange(s.T) < lengths[:, None], s.y(s.B, s.T)


@table(
    Case("mean over tokens", lambda net, x, m, y: (net(x).square().mean(-1) * m).sum() / m.sum(), _ragged, _net),
    Case(
        "mean of each sample",
        lambda net, x, m, y: (net(x) * m[..., None]).sum(1) / m.sum(1, keepdim=True).clamp(min=1),
        _ragged,
        _net,
    ),
    Case(
        "max of each sample",
        lambda net, x, m, y: net(x).masked_fill(~m[..., None], -1e9).amax(1).clamp(min=-5),
        _ragged,
        _net,
    ),
    Case(
        "softmax over tokens",
        lambda net, x, m, y: net(x).masked_fill(~m[..., None], float("-inf")).softmax(1),
        _ragged,
        _net,
    ),
    Case(
        "labels filled with ignore_index",
        lambda net, x, m, y: F.cross_entropy(net(x).flatten(0, 1), y.masked_fill(~m, -100).flatten()),
        _ragged,
        _net,
    ),
    Case(
        "lengths from the mask",
        lambda net, x, m, y: net(x)[torch.arange(x.shape[0]), (m.sum(1) - 1).clamp(min=0)],
        _ragged,
        _net,
    ),
    Case(
        "packed by the mask",
        lambda net, x, m, y: F.cross_entropy(net(x[m]), y[m]),
        _ragged,
        _net,
        "the number of tokens depends on data",
    ),
)
def test_ragged_as_padding_and_mask(case: Case) -> None:
    verify(case)
