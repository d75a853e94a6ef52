"""What public training loops write: it is exact, and it stays part of the program."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import koila

BUDGETS: list[dict[str, Any]] = [{}, {"chunk_size": 1}, {"chunk_size": 4}]


def overlay(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The label written into the first columns of the sample (the forward-forward algorithm)."""
    written = x.clone()
    written[:, :3] *= 0.0
    written[range(len(x)), y] = x.max()
    written.sub_(0.5).div_(2.0)
    written += 1
    return written


def step(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (overlay(x, y) @ weight).relu_().square().mean()


@pytest.mark.semantics("S2")
@pytest.mark.parametrize("budget", BUDGETS, ids=str)
def test_methods_that_write_in_place_are_recorded(budget: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(7, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (7,), generator=generator)
    weight = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    plain, lazy = weight.clone().requires_grad_(), weight.clone().requires_grad_()
    expected = step(x, y, plain)
    expected.backward()
    koila.metrics.reset()
    with koila.budget(**budget):
        loss = step(*koila.lazy(x, y), lazy)
        assert koila.metrics.counter_value("runs") == 0, "nothing needed a value yet"
        loss.backward()
    assert plain.grad is not None
    torch.testing.assert_close(loss.item(), expected.item(), rtol=1e-12, atol=0)
    torch.testing.assert_close(lazy.grad, plain.grad, rtol=1e-12, atol=1e-14)
    eager = [name for name in koila.metrics.counter_names() if name.startswith(("eager", "fallback"))]
    assert not eager, f"ran beside the program: {eager}"
