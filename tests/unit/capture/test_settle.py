"""koila.settle runs what is pending; what a loop carries from batch to batch does not keep the batches."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import koila
from koila.capture.carried import WHY

CHUNKS = pytest.mark.parametrize("chunk_size", [None, 2])


@CHUNKS
def test_writes_that_koila_cannot_see_are_safe_after_settle(chunk_size: int | None) -> None:
    with koila.budget(chunk_size=chunk_size):
        parameter = torch.ones(3, requires_grad=True)
        product = koila.lazy(torch.ones(3)) * parameter
        koila.settle()
        parameter.data.add_(1)
        assert product.run().tolist() == [1.0] * 3
        data = torch.ones(3)
        copy = koila.lazy(data) * 1
        koila.settle()
        data.numpy()[:] = 7
        assert copy.run().tolist() == [1.0] * 3


def test_writes_that_koila_sees_are_no_error_after_settle() -> None:
    parameter = torch.ones(3, requires_grad=True)
    product = koila.lazy(torch.ones(3)) * parameter
    koila.settle()
    with torch.no_grad():
        parameter.add_(1)
    assert product.run().tolist() == [1.0] * 3
    product.sum().backward()
    assert parameter.grad is not None and parameter.grad.tolist() == [1.0] * 3


def test_settle_runs_values_and_buffers_together() -> None:
    norm = nn.BatchNorm1d(3)
    out, other = norm(koila.lazy(torch.randn(4, 3))), koila.lazy(torch.ones(7)) * 2
    koila.settle()
    assert "ready" in repr(out) and "ready" in repr(other)
    assert norm.num_batches_tracked == 1


def test_settle_runs_nothing_twice_and_nothing_that_is_not_held() -> None:
    x = koila.lazy(torch.ones(4))
    total = x.sum()
    x.exp()
    koila.settle()
    assert koila.metrics.counter_value("executed::Tensor.exp") == 0
    runs = koila.metrics.counter_value("runs")
    koila.settle()
    assert koila.metrics.counter_value("runs") == runs and total.item() == 4.0


def test_settle_runs_the_others_before_it_says_what_cannot_be_run() -> None:
    source = torch.ones(3)
    stale = koila.lazy(source) * 2
    with koila.budget(chunk_size=2):
        torch.add(source, 1, out=source)
        good = koila.lazy(torch.ones(5)) * 3
        with pytest.raises(koila.StaleInputError, match="was changed after the call was recorded"):
            koila.settle()
        assert "ready" in repr(good) and "pending" in repr(stale)


def _batches(seen: list[weakref.ref[torch.Tensor]]) -> Any:
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        x = torch.randn(6, 32, generator=generator)
        y = torch.randint(0, 5, (6,), generator=generator)
        seen.append(weakref.ref(x))
        yield x, y


def _alive(seen: list[weakref.ref[torch.Tensor]]) -> int:
    return sum(reference() is not None for reference in seen)


@CHUNKS
def test_a_sum_over_batches_does_not_keep_the_batches(chunk_size: int | None) -> None:
    torch.manual_seed(0)
    model, most = nn.Linear(32, 5), 0
    results = []
    for lazy in (lambda *values: values, koila.lazy):
        seen: list[weakref.ref[torch.Tensor]] = []
        total: Any = 0.0
        with torch.no_grad(), koila.budget(chunk_size=chunk_size):
            for real_x, real_y in _batches(seen):
                x, y = lazy(real_x, real_y)
                total += F.cross_entropy(model(x), y)
                most = max(most, _alive(seen))
        results.append(float(total))
    assert most <= 4, "not the inputs of all forty batches"
    assert results[0] == pytest.approx(results[1], rel=1e-6)
    places = koila.metrics.counter_sites(f"forced::{WHY}")
    assert len(places) == 1 and "test_settle.py:" in next(iter(places))


@CHUNKS
def test_outputs_that_are_collected_do_not_keep_the_batches(chunk_size: int | None) -> None:
    model = nn.Linear(32, 5)
    seen: list[weakref.ref[torch.Tensor]] = []
    outs, most = [], 0
    with torch.no_grad(), koila.budget(chunk_size=chunk_size):
        for real_x, _ in _batches(seen):
            x = koila.lazy(real_x)
            outs.append(model(x))
            most = max(most, _alive(seen))
        assert most <= 4
        expected = torch.cat([model(x) for x, _ in _batches([])])
        torch.testing.assert_close(torch.cat(outs).run(), expected)


@CHUNKS
def test_a_sum_of_losses_in_training_does_not_keep_the_batches(chunk_size: int | None) -> None:
    model = nn.Linear(32, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[weakref.ref[torch.Tensor]] = []
    total, most = torch.zeros(()), 0
    with koila.budget(chunk_size=chunk_size):
        for real_x, real_y in _batches(seen):
            x, y = koila.lazy(real_x, real_y)
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total = total + loss.detach()
            gc.collect()
            most = max(most, _alive(seen))
        assert most <= 4 and float(total) > 0


def test_losses_that_are_still_to_be_differentiated_stay_pending() -> None:
    weight = torch.ones(32, requires_grad=True)
    total: Any = 0.0
    for real_x, _ in _batches([]):
        total = total + (koila.lazy(real_x) * weight).sum()
    assert koila.metrics.counter_value("runs") == 0
    total.backward()
    expected = sum(x.sum(0) for x, _ in _batches([]))
    torch.testing.assert_close(weight.grad, expected)


def test_nothing_runs_between_the_tensors_of_one_batch() -> None:
    x = koila.lazy(torch.randn(8, 32))
    mask = x.mean(1) > 0
    y = koila.lazy(torch.randn(8))
    assert koila.metrics.counter_value("runs") == 0
    assert (y * mask).sum().run().shape == ()


def test_what_cannot_be_run_early_is_no_error_of_koila_lazy() -> None:
    source = torch.ones(64)
    total = koila.lazy(source).sum()
    torch.add(source, 1, out=source)
    for _ in range(3):
        koila.lazy(torch.ones(2))
    assert koila.metrics.counter_value("carried::left pending") == 1
    with pytest.raises(koila.StaleInputError, match="was changed after the call was recorded"):
        total.item()
