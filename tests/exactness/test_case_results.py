"""Values that are asked for: whole, or streamed chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import koila
from tests.exactness.cases import EQUAL, PRIME, Largest, Sizes, assert_same, assert_split, fallbacks

OUTPUTS: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "a matrix": lambda net, x: net(x).sin(),
    "a vector": lambda net, x: net(x).sum(1),
    "labels": lambda net, x: net(x).argmax(1),
    "booleans": lambda net, x: net(x) > 0,
    "batch in dim 1": lambda net, x: net(x).T.softmax(0),
    "batch folded into a dim": lambda net, x: net(x).unsqueeze(1).expand(-1, 2, -1).reshape(2 * x.shape[0], -1).exp(),
    "after statistics of the batch": lambda net, x: (net(x) - net(x).mean(0)) / net(x).std(0),
    "after a gather": lambda net, x: (net(x) @ net(x).T).softmax(1),
}


def _made(s: Sizes) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Linear(s.D, s.C).double(), s.x(s.B, s.D, grad=False)


@pytest.mark.parametrize("sizes", [PRIME, EQUAL], ids=["prime", "equal"])
@pytest.mark.parametrize("name", OUTPUTS)
def test_run(name: str, sizes: Sizes) -> None:
    net, x = _made(sizes)
    expected = OUTPUTS[name](net, x)
    for chunk in (1, 2, 3, sizes.B):
        koila.metrics.reset()
        with koila.budget(chunk_size=chunk):
            found = koila.run(OUTPUTS[name](net, koila.lazy(x)))
        assert type(found) is torch.Tensor and found.requires_grad == expected.requires_grad
        assert found.stride() == expected.stride()
        assert_same(found, expected, f"{name} in chunks of {chunk}")
        if chunk < sizes.B:
            assert_split(name)


@pytest.mark.parametrize("sizes", [PRIME, EQUAL], ids=["prime", "equal"])
@pytest.mark.parametrize("name", OUTPUTS)
def test_stream(name: str, sizes: Sizes) -> None:
    net, x = _made(sizes)
    expected = OUTPUTS[name](net, x).detach()
    dim = 1 if name == "batch in dim 1" else 0
    for chunk in (1, 2, 3):
        koila.metrics.reset()
        pieces = list(koila.stream(OUTPUTS[name](net, koila.lazy(x)), chunk_size=chunk))
        assert fallbacks() == []
        assert_same(torch.cat(pieces, dim), expected, f"{name} in chunks of {chunk}")
        factor = expected.shape[dim] // sizes.B
        counts = [factor * min(chunk, sizes.B - start) for start in range(0, sizes.B, chunk)]
        assert [piece.shape[dim] for piece in pieces] == counts
        assert not any(piece.requires_grad for piece in pieces)


def test_stream_of_what_cannot_be_cut_comes_in_one_piece() -> None:
    net, x = _made(PRIME)
    pieces = list(koila.stream(net(koila.lazy(x)).mean(0), chunk_size=2))
    assert len(pieces) == 1
    assert_same(pieces[0], net(x).mean(0).detach(), "mean")


def test_stream_takes_the_chunk_size_of_the_scope() -> None:
    net, x = _made(PRIME)
    with koila.budget(chunk_size=3):
        assert [len(piece) for piece in koila.stream(net(koila.lazy(x)))] == [3, 3, 1]
    assert [len(piece) for piece in koila.stream(net(koila.lazy(x)))] == [1] * 7


def test_stream_never_holds_the_value_whole() -> None:
    x = torch.randn(16, 4, dtype=torch.float64)
    weight = torch.randn(4, 1000, dtype=torch.float64)

    def program() -> Any:
        return (koila.lazy(x) @ weight).softmax(1)

    assert len(list(koila.stream(program(), chunk_size=2))) == 8
    with Largest() as watch:
        for _ in koila.stream(program(), chunk_size=2):
            pass
    assert watch.num_elements < 16 * 1000, watch.operator


def test_run_of_several_values_is_one_run() -> None:
    net, x = _made(PRIME)
    lazy = koila.lazy(x)
    hidden = net(lazy)
    with koila.budget(chunk_size=2):
        found = koila.run(
            {"hidden": hidden, "mean": hidden.mean(0), "largest": hidden.max(), "loss": hidden.square().mean()}
        )
    hidden = net(x)
    expected = {"hidden": hidden, "mean": hidden.mean(0), "largest": hidden.max(), "loss": hidden.square().mean()}
    for name, value in expected.items():
        assert_same(found[name], value, name)
    assert koila.metrics.counter_value("runs") == 1


@pytest.mark.semantics("S17")
def test_gradient_through_a_value_that_was_run() -> None:
    net, x = _made(PRIME)
    with koila.budget(chunk_size=2):
        out = koila.run(net(koila.lazy(x)).sin())
        (out * out.detach().cos()).sum().backward()
    found = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    out = net(x).sin()
    (out * out.detach().cos()).sum().backward()
    for mine, p in zip(found, net.parameters(), strict=True):
        assert_same(mine, p.grad, "gradient")


@pytest.mark.semantics("S15")
def test_run_under_no_grad_and_inference_mode() -> None:
    net, x = _made(PRIME)
    with torch.no_grad(), koila.budget(chunk_size=2):
        found = koila.run(net(koila.lazy(x)))
    assert not found.requires_grad
    assert_same(found, net(x), "no_grad")
    assert_split("no_grad")
    koila.metrics.reset()
    with torch.inference_mode(), koila.budget(chunk_size=2):
        found = koila.run(net(koila.lazy(x)))
    assert_same(found, net(x), "inference_mode")
