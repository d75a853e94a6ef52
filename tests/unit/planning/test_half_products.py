"""Half-precision products in float32: the error of eager's kernel, where the processor has none of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._ops import OpOverload

import koila
from benchmarks.witness import Watch, call_outside
from koila.execution.kernels import HALF_PRODUCTS
from koila.planning import half_products
from koila.planning.half_products import PRODUCTS, float32_bytes, runs_in_float32

aten = torch.ops.aten
HALVES = (torch.bfloat16, torch.float16)
NOT_NATIVE = pytest.mark.skipif(half_products._is_native(), reason="this processor multiplies bfloat16 itself")


def operands(target: OpOverload, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    batch = () if target in (aten.mm.default, aten.addmm.default) else (3,)
    factors = torch.randn(*batch, 33, 65).to(dtype), torch.randn(*batch, 65, 17).to(dtype)
    bias = torch.randn(*batch, 33, 17).to(dtype)
    return factors if target in (aten.mm.default, aten.bmm.default) else (bias, *factors)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("target", PRODUCTS, ids=str)
def test_the_error_is_that_of_the_kernel(target: OpOverload, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    given = operands(target, dtype)
    exact = target(*(each.double() for each in given))
    error = lambda found: float((found.double() - exact).norm() / exact.norm())  # noqa: E731
    found, own = HALF_PRODUCTS[target](*given), target(*given)
    assert found.dtype is dtype and found.shape == own.shape
    assert error(found) <= 1.02 * error(own)


def test_only_half_precision_is_computed_in_float32() -> None:
    value = torch.ones(2, 2)
    assert not any(runs_in_float32(target, value) for target in PRODUCTS)
    assert not runs_in_float32(aten.add.Tensor, value.bfloat16())


def bytes_of_products() -> list[tuple[int, int]]:
    """(measured, counted) for each product; runs under the hook."""
    torch.set_num_threads(1)
    found = []
    for target, product in HALF_PRODUCTS.items():
        given = operands(target, torch.bfloat16)
        result = product(*given)
        with Watch() as watch:
            kept = product(*given)
        found.append((watch.peak_bytes - watch.kept_bytes, float32_bytes([*given, result])))
        del kept
    return found


def test_the_bytes_are_counted() -> None:
    for measured, counted in call_outside("tests.unit.planning.test_half_products:bytes_of_products"):
        assert measured <= counted + 8192
        assert counted <= 1.25 * measured + 8192


@NOT_NATIVE
@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_program_in_half_precision(size: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8)).bfloat16()
    x = torch.randn(7, 64).bfloat16()

    def gradients(given: Any) -> torch.Tensor:
        model.zero_grad()
        model(given).float().square().mean().backward()
        return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])

    expected = gradients(x)
    model.double()
    x64 = x.double()
    model.zero_grad()
    model(x64).square().mean().backward()
    exact = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.bfloat16()
    with koila.budget(chunk_size=size):
        found = gradients(koila.lazy(x))
    assert float((found - exact).norm()) <= 1.5 * float((expected - exact).norm())
