"""S19: random numbers. Every kind of draw, in every layout, once, twice and recomputed, with eager draws, new seeds,
forks and loaders between: the numbers and the generator afterwards are eager's.

`KOILA_NIGHTLY=1` runs the whole matrix; without it, every draw meets every layout, and the other two axes go round.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import distributions as D
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.semantics.compare import Lazy, same_as_eager

pytestmark = pytest.mark.semantics("S19")

SHAPE = (4, 3, 4, 4)
"""Samples, and the dimensions of an image or of heads, positions and features."""

Draw = Callable[[torch.Tensor], torch.Tensor]


def _attention(x: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.4)


def _lstm(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)
    net = nn.LSTM(4, 4, num_layers=2, dropout=0.5, batch_first=True).double()
    return net(x.reshape(-1, *x.shape[-2:]))[0].reshape(x.shape)


def _multinomial(x: torch.Tensor) -> torch.Tensor:
    rows = x.detach().abs().reshape(-1, x.shape[-1]) + 0.1
    return x + torch.multinomial(rows, 4, replacement=True).view(x.shape)


DRAWS: dict[str, Draw] = {
    "randn": lambda x: x + torch.randn(x.shape, dtype=x.dtype),
    "randn_like": lambda x: x + torch.randn_like(x),
    "randn_like on a device": lambda x: x + torch.randn_like(x, device="cpu"),
    "randint_like on a device": lambda x: x * torch.randint_like(x, 5, device="cpu"),
    "normal_": lambda x: x + torch.empty_like(x).normal_(),
    "normal": lambda x: x + torch.normal(x.detach(), 1.0),
    "uniform_": lambda x: x * x.detach().clone().uniform_(),
    "rand": lambda x: x * torch.rand(x.shape, dtype=x.dtype),
    "rand_like": lambda x: x * torch.rand_like(x),
    "randint": lambda x: x * torch.randint(0, 5, x.shape),
    "randint_like": lambda x: x * torch.randint_like(x, 5),
    "bernoulli": lambda x: x * torch.bernoulli(torch.sigmoid(x.detach())),
    "bernoulli_": lambda x: x * torch.empty_like(x).bernoulli_(0.3),
    "dropout": lambda x: F.dropout(x, 0.4, True),
    "dropout1d": lambda x: F.dropout1d(x.reshape(-1, *x.shape[2:]), 0.4, True).reshape(x.shape),
    "dropout2d": lambda x: F.dropout2d(x, 0.4, True),
    "dropout3d": lambda x: F.dropout3d(x.unsqueeze(-1), 0.4, True).squeeze(-1),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.4, True),
    "attention": _attention,
    "LSTM": _lstm,
    "rrelu": lambda x: F.rrelu(x, 0.1, 0.4, True),
    "poisson": lambda x: x + torch.poisson(x.detach().abs()),
    "multinomial": _multinomial,
    "randperm": lambda x: x[torch.randperm(x.shape[0])],
    "exponential_": lambda x: x + torch.empty_like(x).exponential_(),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, hard=True),
    "Normal": lambda x: D.Normal(x, 1.0).rsample(),
    "Categorical": lambda x: x + D.Categorical(logits=x.detach()).sample()[..., None],
    "Gamma": lambda x: D.Gamma(x.abs() + 1, 1.0).rsample(),
    "Bernoulli": lambda x: x * D.Bernoulli(logits=x.detach()).sample(),
    "Dirichlet": lambda x: D.Dirichlet(x.abs() + 1).rsample(),
    "RelaxedOneHotCategorical": lambda x: D.RelaxedOneHotCategorical(torch.tensor(0.5), logits=x).rsample(),
}

LAYOUTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    "batch first": (lambda x: x, 0),
    "time first": (lambda x: x.transpose(0, 1).contiguous(), 1),
    "transposed": (lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), 0),
    "channels_last": (lambda x: x.to(memory_format=torch.channels_last), 0),
}
"""How the tensor lies in memory, and the dimension of its batch."""


def _once(draw: Draw, h: torch.Tensor) -> torch.Tensor:
    return draw(h)


def _twice(draw: Draw, h: torch.Tensor) -> torch.Tensor:
    return draw(draw(h).tanh()) + draw(h)


def _recomputed(draw: Draw, h: torch.Tensor) -> torch.Tensor:
    """Read before the backward pass, so that a run in chunks computes it again for its gradient."""
    out = draw(h)
    out.detach().sum().item()
    return out * 2


TIMES = {"once": _once, "twice": _twice, "recomputed": _recomputed}


def _loader_between() -> None:
    loader = DataLoader(TensorDataset(torch.arange(6)), batch_size=2, shuffle=True)
    assert sum(len(batch) for (batch,) in loader) == 6


BETWEEN: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "an eager draw": lambda: torch.rand(3),
    "a new seed": lambda: torch.manual_seed(11),
    "a restored state": lambda: torch.set_rng_state(torch.get_rng_state()),
    "a loader": _loader_between,
}


def check(draw: str, layout: str, times: str, between: str, in_bytes: bool = False) -> None:
    change, batch = LAYOUTS[layout]

    def program(lazy: Lazy) -> Any:
        x = change(torch.randn(SHAPE, dtype=torch.float64))
        weight = torch.randn(4, dtype=torch.float64, requires_grad=True)
        x = lazy(x, batch=batch)
        forked = between == "fork_rng"
        first = F.dropout(x * weight, 0.2, True)
        if not forked:
            BETWEEN[between]()
        with torch.random.fork_rng(devices=[]) if forked else nullcontext():
            out = TIMES[times](DRAWS[draw], first)
        after = torch.rand(2)
        last = F.dropout(out, 0.3, True)
        loss = last.square().sum() / 10
        loss.backward()
        return loss.detach(), out.detach(), weight.grad, after, torch.rand(2)

    same_as_eager(program, (3,), in_bytes)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("draw", DRAWS)
def test_every_draw_in_every_layout(draw: str, layout: str) -> None:
    """The other two axes go round, so that every pair of values of any two of the four is met somewhere."""
    number = list(DRAWS).index(draw) + list(LAYOUTS).index(layout)
    times, between = list(TIMES), [*BETWEEN, "fork_rng"]
    check(draw, layout, times[number % len(times)], between[number % len(between)])


@pytest.mark.parametrize("between", [*BETWEEN, "fork_rng"])
@pytest.mark.parametrize("times", TIMES)
def test_dropout_at_every_time(times: str, between: str) -> None:
    check("dropout", "transposed", times, between, in_bytes=between == "nothing")


MATRIX = [*product(DRAWS, LAYOUTS, TIMES, [*BETWEEN, "fork_rng"])] if "KOILA_NIGHTLY" in os.environ else []


@pytest.mark.slow
@pytest.mark.parametrize(("draw", "layout", "times", "between"), MATRIX)
def test_the_whole_matrix(draw: str, layout: str, times: str, between: str) -> None:
    check(draw, layout, times, between)


def test_generators_of_ones_own() -> None:
    def program(lazy: Lazy) -> Any:
        generator = torch.Generator().manual_seed(9)
        x = lazy(torch.randn(4, 3, dtype=torch.float64))
        weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
        noise = torch.randn(4, 3, dtype=torch.float64, generator=generator)
        mask = torch.empty_like(x).bernoulli_(0.5, generator=generator)
        out = (x * weight + noise) * mask
        picked = x[torch.randperm(4, generator=generator)]
        (out.square().sum() + (picked * weight).sum()).backward()
        return out.detach(), weight.grad, generator.get_state(), torch.rand(1, generator=generator)

    same_as_eager(program, (1, 3))
