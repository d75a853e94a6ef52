"""S15: `torch.inference_mode` is recorded like any other mode, obeys budgets, and gives inference tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import koila

pytestmark = pytest.mark.semantics("S15")
BUDGETS: list[dict[str, Any]] = [{}, {"chunk_size": 2}, {"allowed": "12KiB"}]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 3)).double().eval()


def data() -> torch.Tensor:
    return torch.randn(31, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return float((found - expected).norm()) <= 1e-10 * float(expected.norm())


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("made_inside", [True, False])
def test_calls_are_recorded_and_the_budget_holds(budget: dict[str, Any], made_inside: bool) -> None:
    net, real = model(), data()
    with torch.inference_mode():
        expected = net(real).square().sum(1)
    outside = koila.lazy(real)
    with koila.budget(**budget), torch.inference_mode():
        found = net(koila.lazy(real) if made_inside else outside).square().sum(1)
        assert "pending" in repr(found)
        result = found.run()
    assert close(result, expected)
    assert result.is_inference() and found.is_inference()
    report = koila.last_report()
    assert report is not None and report.how == ("split" if budget else "whole")
    assert not [name for name in koila.metrics.counter_names() if name.startswith("eager")]


@pytest.mark.parametrize("budget", BUDGETS)
def test_read_after_the_block(budget: dict[str, Any]) -> None:
    net, real = model(), data()
    with torch.inference_mode():
        expected = net(real)
        found = net(koila.lazy(real))
    with koila.budget(**budget):
        assert close(found.run(), expected)
    assert found.run().is_inference()


@pytest.mark.parametrize("budget", BUDGETS[:2])
def test_what_eager_refuses_outside_is_refused(budget: dict[str, Any]) -> None:
    weight = torch.ones(3, 3, dtype=torch.float64, requires_grad=True)
    with koila.budget(**budget):
        with torch.inference_mode():
            found = model()(koila.lazy(data()))
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
            (found @ weight).sum().backward()
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
            found.add_(1.0)
        assert (found + weight[0]).requires_grad  # Nothing is saved: eager allows it.


@pytest.mark.parametrize("budget", BUDGETS[:2])
def test_a_training_value_forced_inside_is_still_differentiable(budget: dict[str, Any]) -> None:
    real, weights = data(), [torch.ones(6, 2, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    (real @ weights[0]).tanh().sum().backward()
    with koila.budget(**budget):
        loss = (koila.lazy(real) @ weights[1]).tanh().sum()
        with torch.inference_mode():
            value = loss.item()
        assert not loss.run().is_inference()
        loss.backward()
    assert value == pytest.approx((real @ weights[0]).tanh().sum().item(), rel=1e-10)
    assert weights[0].grad is not None and weights[1].grad is not None
    assert close(weights[1].grad, weights[0].grad)


@pytest.mark.parametrize("budget", BUDGETS[:2])
def test_writes_and_views_inside(budget: dict[str, Any]) -> None:
    def program(x: torch.Tensor) -> list[torch.Tensor]:
        h = x * 2
        part = h[:, 1:3]
        h.add_(1.0)
        part.mul_(x.mean(0)[1:3])
        h[:, 0] = 7.0
        return [h, part, x[1:]]

    with torch.inference_mode():
        expected = program(data())
    with koila.budget(**budget):
        with torch.inference_mode():
            found = program(koila.lazy(data()))
        for mine, theirs in zip(found, expected, strict=True):
            assert close(mine.run(), theirs)
            assert mine.is_inference() == theirs.is_inference() == mine.run().is_inference()


def test_random_numbers_inside() -> None:
    real = data()
    with torch.inference_mode():
        torch.manual_seed(4)
        expected = [nn.functional.dropout(real, 0.4), torch.rand_like(real), torch.rand(3)]
        torch.manual_seed(4)
        found = [nn.functional.dropout(koila.lazy(real), 0.4), torch.rand_like(koila.lazy(real)), torch.rand(3)]
        with koila.budget(chunk_size=3):
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(koila.run(found), expected, strict=True))


def test_versions_are_refused_as_in_eager() -> None:
    with torch.inference_mode():
        found = koila.lazy(data()) * 2
        with pytest.raises(RuntimeError, match="Inference tensors do not track version counter"):
            _ = found._version
