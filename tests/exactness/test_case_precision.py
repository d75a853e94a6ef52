"""Half precision: merges accumulate in float32, so that a batch of 4096 in chunks of one is no worse than eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import koila
from tests.exactness.cases import PRIME, Sizes, assert_split, observe

BATCH = 4096
HALVES = [torch.bfloat16, torch.float16]
FEWER = 256
"""For the models whose chunks take longer."""

Maker = Callable[[torch.dtype], tuple[nn.Module, tuple[torch.Tensor, ...]]]


def _linear(dtype: torch.dtype) -> Any:
    return nn.Linear(4, 3), (torch.randn(BATCH, 4), torch.randn(BATCH, 3))


def _shifted(dtype: torch.dtype) -> Any:
    """A gradient whose terms all have one sign: a sum in half precision would stop growing."""
    return nn.Linear(4, 3), (torch.rand(BATCH, 4) + 0.5, torch.rand(BATCH, 3) - 8)


def _convolution(dtype: torch.dtype) -> Any:
    net = nn.Sequential(nn.Conv1d(2, 3, 3, padding=1), nn.GroupNorm(1, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3))
    return net, (torch.randn(FEWER, 2, 4), torch.randn(FEWER, 3))


def _normed(dtype: torch.dtype) -> Any:
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 3)), (
        torch.randn(FEWER, 4),
        torch.randn(FEWER, 3),
    )


def _embedded(dtype: torch.dtype) -> Any:
    return nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 3)), (torch.randint(0, 3, (FEWER,)), torch.randn(FEWER, 3))


MODELS: dict[str, Maker] = {
    "linear": _linear,
    "linear, terms of one sign": _shifted,
    "convolution": _convolution,
    "layer norm": _normed,
    "embedding": _embedded,
}


def _errors(
    net: nn.Module, inputs: tuple[Any, ...], chunk: int | None, truth: dict[str, torch.Tensor]
) -> dict[str, float]:
    """The relative error of the loss and of each gradient against float64."""
    net.zero_grad()
    loss = _loss(net, inputs, chunk)
    found = {"loss": loss, **{name: p.grad for name, p in net.named_parameters()}}
    return {name: float((found[name].double() - true).norm() / true.norm()) for name, true in truth.items()}


def _loss(net: nn.Module, inputs: tuple[Any, ...], chunk: int | None) -> torch.Tensor:
    with koila.budget(chunk_size=chunk):
        x, y = inputs if chunk is None else koila.lazy(*inputs)
        loss = F.mse_loss(net(x), y)
        loss.backward()
        return koila.run(loss, detach=True) if chunk is not None else loss.detach()


def _trial(name: str, dtype: torch.dtype, seed: int) -> tuple[dict[str, float], dict[str, float]]:
    """The errors of koila and of eager for one model and one batch."""
    torch.manual_seed(seed)
    net, inputs = MODELS[name](dtype)
    net = net.to(dtype)
    halves = tuple(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in inputs)
    net.double()
    loss = _loss(net, tuple(tensor.double() if tensor.is_floating_point() else tensor for tensor in halves), None)
    truth = {"loss": loss, **{name: p.grad.clone() for name, p in net.named_parameters()}}
    net.zero_grad()
    net.to(dtype)
    return _errors(net, halves, 1, truth), _errors(net, halves, None, truth)


@pytest.mark.semantics("S4")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_half_precision_in_chunks_of_one(name: str, dtype: torch.dtype) -> None:
    """On average over a few batches: the roundings of a single small one scatter."""
    trials = [_trial(name, dtype, seed) for seed in range(1 if name.startswith("linear") else 4)]
    assert_split(name)
    # Both round their result once more; what that may cost is not an error of the merge.
    rounding = torch.finfo(dtype).eps / 2
    mine, eager = (
        {key: sum(trial[who][key] for trial in trials) / len(trials) for key in trials[0][who]} for who in (0, 1)
    )
    worse = {key: (mine[key], eager[key]) for key in mine if mine[key] > max(1.1 * eager[key], rounding)}
    assert worse == {}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_precision_sums(dtype: torch.dtype) -> None:
    """4096 ones, and a sum that a half cannot count by ones."""
    x = torch.ones(BATCH, 2, dtype=dtype)
    with koila.budget(chunk_size=1):
        lazy = koila.lazy(x)
        total, mean, rows = koila.run(((lazy * 1).sum(), (lazy * 2).mean(), (lazy * 1).sum(0)))
    assert total.dtype == dtype and float(total) == 2 * BATCH
    assert float(mean) == 2.0
    assert rows.tolist() == [BATCH, BATCH]
    assert_split("sums")


@pytest.mark.semantics("S4")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_precision_whole_is_eager(dtype: torch.dtype) -> None:
    sizes = Sizes(dtype=dtype)

    def program(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return net(x).float().square().mean()

    def make(chunk: int | None) -> Any:
        return observe(program, lambda s: s.x(s.B, s.D), lambda s: nn.Linear(s.D, s.C), sizes, chunk)

    eager, mine = make(None), make(PRIME.B)
    assert torch.equal(eager.outputs[0], mine.outputs[0])
    assert all(torch.equal(eager.gradients[name], mine.gradients[name]) for name in eager.gradients)


@pytest.mark.semantics("S15")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_autocast(dtype: torch.dtype) -> None:
    """Parameters in float32, products in half: the merged gradient is no worse than eager's."""
    torch.manual_seed(0)
    net, x, y = nn.Linear(4, 3), torch.randn(64, 4), torch.randn(64, 3)

    def gradients(chunk: int | None) -> dict[str, torch.Tensor]:
        net.zero_grad()
        with koila.budget(chunk_size=chunk):
            a, b = (x, y) if chunk is None else koila.lazy(x, y)
            with torch.autocast("cpu", dtype=dtype):
                loss = F.mse_loss(net(a).float(), b)
            loss.backward()
        return {name: p.grad.clone() for name, p in net.named_parameters()}

    eager, mine, whole = gradients(None), gradients(1), gradients(64)
    net.double()
    x, y = x.double(), y.double()
    net.zero_grad()
    F.mse_loss(net(x), y).backward()
    for name, p in net.named_parameters():
        assert torch.equal(whole[name], eager[name])
        size = p.grad.norm()
        error = float((mine[name].double() - p.grad).norm() / size)
        assert error <= max(2 * float((eager[name].double() - p.grad).norm() / size), torch.finfo(dtype).eps), name
