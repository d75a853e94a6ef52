"""Does it work at all: one small program through every stage."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import koila


def test_nothing_runs_before_a_value_is_needed() -> None:
    x = koila.lazy(torch.arange(6.0).view(3, 2))
    y = (x * 2).sum()
    assert isinstance(y, koila.LazyTensor) and "pending" in repr(y)
    assert y.item() == 30.0
    assert "ready" in repr(y)


@pytest.mark.parametrize("chunk_size", [None, 1, 2, 3, 5, 100])
def test_a_step_has_the_gradient_of_the_whole_batch(chunk_size: int | None) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 3).double()
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 2, -100, 1, 1])
    F.cross_entropy(layer(x), y).backward()
    expected = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()

    lazy_x, lazy_y = koila.lazy(x, y)
    with koila.budget(chunk_size=chunk_size):
        loss = F.cross_entropy(layer(lazy_x), lazy_y)
        loss.backward()

    torch.testing.assert_close([p.grad for p in layer.parameters()], expected, rtol=1e-12, atol=1e-15)
    assert type(layer.weight.grad) is torch.Tensor


def test_chunks_are_run_and_counted() -> None:
    koila.metrics.reset()
    x = koila.lazy(torch.randn(7, 3))
    with koila.budget(chunk_size=2):
        total = (x @ torch.randn(3, 3)).relu().sum().item()
    assert isinstance(total, float)
    assert koila.metrics.counter_value("chunks") == 4
    assert koila.metrics.counter_value("runs::split") == 1


def test_inference_in_chunks() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 3).double().eval()
    x = torch.randn(5, 4, dtype=torch.float64)
    with torch.no_grad(), koila.budget(chunk_size=2):
        found = koila.run(layer(koila.lazy(x)))
        torch.testing.assert_close(found, layer(x), rtol=1e-12, atol=1e-15)
    assert not found.requires_grad
