"""S5: `torch.tensor`, `torch.as_tensor` and their relatives of lazy tensors give eager's numbers and spoil no cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

import koila
from koila.ir.cache import clear_all

pytestmark = pytest.mark.semantics("S5")
REAL = torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
BUDGETS: list[dict[str, Any]] = [{}, {"chunk_size": 1}, {"allowed": "10KiB"}]
FACTORIES: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda x: torch.tensor([x.mean()]),
    "tensor of a scalar": lambda x: torch.tensor(float(x.mean())),
    "tensor of scalars": lambda x: torch.tensor([x[0, 0], x[1, 1] * 2, 3.0], dtype=torch.float32),
    "tensor, nested": lambda x: torch.tensor([[x.mean(), 1.0], [2.0, x.sum()]]),
    "as_tensor": lambda x: torch.as_tensor([x.mean(), x.std()]),
    "as_tensor of a tensor": lambda x: torch.as_tensor(x.mean(0)),
    "as_tensor, other dtype": lambda x: torch.as_tensor(x.mean(0), dtype=torch.float32),
    "asarray": lambda x: torch.asarray(x.mean(0)),
    "asarray of a list": lambda x: torch.asarray([x.mean(), x.sum()]),
    "new_tensor": lambda x: x.new_tensor([1.0, 2.0]),
    "new_tensor of lazy": lambda x: REAL.new_tensor([x.mean(), x.sum()]),
    "scalar_tensor": lambda x: torch.scalar_tensor(x.mean().item()),
    "full": lambda x: torch.full((2, 2), x.mean().item()),
    "numpy": lambda x: torch.from_numpy(numpy.array([float(x.mean()), float(x.sum())])),
    "stack": lambda x: torch.stack([x.mean(), x.sum()]),
    "zeros_like": lambda x: torch.zeros_like(x) + x.new_ones(4),
    "FloatTensor": lambda x: torch.FloatTensor([x.mean(), x.sum()]),
    "tensor of a vector": lambda x: torch.tensor([row.sum() for row in x]),
}


def same(found: Any, expected: torch.Tensor) -> None:
    real = koila.run(found)
    assert type(real) is torch.Tensor and real.dtype == expected.dtype
    torch.testing.assert_close(real, expected, rtol=1e-6 if real.dtype == torch.float32 else 1e-10, atol=0)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", FACTORIES)
def test_eagers_numbers_twice_and_for_others(name: str, budget: dict[str, Any]) -> None:
    clear_all()
    with koila.budget(**budget):
        for _ in range(2):
            same(FACTORIES[name](koila.lazy(REAL)), FACTORIES[name](REAL))
        assert koila.lazy(REAL).mean().item() == pytest.approx(REAL.mean().item(), rel=1e-10)


@pytest.mark.parametrize("read", [lambda loss: torch.tensor([loss]), lambda loss: torch.as_tensor([loss])])
def test_a_program_that_is_first_run_inside_torch_tensor_is_traced_as_any_other(read: Any) -> None:
    clear_all()
    loss = lambda: koila.lazy(REAL, budget=2336).mean()  # noqa: E731
    assert read(loss()).item() == pytest.approx(REAL.mean().item(), rel=1e-10)
    assert loss().item() == pytest.approx(REAL.mean().item(), rel=1e-10)
    report = koila.last_report()
    assert report is not None and report.how == "split"


def test_the_program_is_cut_afterwards() -> None:
    clear_all()
    with koila.budget(chunk_size=1):
        torch.tensor([koila.lazy(REAL).mean()])
        koila.lazy(REAL).mean().item()
    report = koila.last_report()
    assert report is not None and report.how == "split"


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True")
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_value_read_by_torch_tensor_can_still_be_differentiated(budget: dict[str, Any]) -> None:
    weight = torch.ones(4, dtype=torch.float64, requires_grad=True)
    with koila.budget(**budget):
        loss = (koila.lazy(REAL) * weight).square().mean()
        assert torch.tensor([loss]).item() == pytest.approx(REAL.square().mean().item(), rel=1e-10)
        loss.backward()
    torch.testing.assert_close(weight.grad, 2 * REAL.square().mean(0) / 4, rtol=1e-10, atol=0)


def test_values_that_are_first_recorded_inside_torch_tensor() -> None:
    """Reading elements one by one records calls below the keys that shape inference needs."""
    clear_all()

    class Pair:
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

        def __float__(self) -> float:
            return float(torch.nn.functional.dropout(self.value * 2, 0.5).mean())

    torch.manual_seed(1)
    expected = float(Pair(REAL))
    torch.manual_seed(1)
    assert torch.tensor(float(Pair(koila.lazy(REAL)))).item() == pytest.approx(expected, rel=1e-6)
    torch.manual_seed(1)
    assert float(Pair(koila.lazy(REAL))) == pytest.approx(expected, rel=1e-10)
