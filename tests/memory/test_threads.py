"""Another number of threads is another plan: kernels have buffers for each, and a budget holds at any number."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import koila
from koila import events
from koila.ir.cache import clear_all

BUDGET = "3MiB"


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1))


def projected_bytes(num_threads: int) -> int | None:
    torch.set_num_threads(num_threads)
    loss = network()(koila.lazy(torch.randn(16, 3, 16, 16))).square().mean()
    return koila.plan(loss, backward=True, budget=BUDGET).projected_bytes


@pytest.mark.parametrize("order", [(1, 8), (8, 1)])
def test_what_was_planned_before_with_others_is_not_taken(order: tuple[int, int]) -> None:
    expected = []
    for num_threads in order:
        clear_all()
        expected.append(projected_bytes(num_threads))
    clear_all()
    assert [projected_bytes(num_threads) for num_threads in order] == expected
    if expected[0] == expected[1]:
        pytest.skip("on this processor the number of threads makes no difference here")


def test_a_prepared_run_is_looked_at_again() -> None:
    """It fits a budget with the threads that it was prepared with."""
    model, x = network(), torch.randn(16, 3, 16, 16)

    def step() -> int:
        before = events.counters().get("prepared runs", 0)
        model.zero_grad()
        with koila.budget("1GiB"):
            model(koila.lazy(x)).square().mean().backward()
        return events.counters().get("prepared runs", 0) - before

    torch.set_num_threads(1)
    assert [step() for _ in range(4)][-1] == 1
    torch.set_num_threads(2)
    assert step() == 0
    assert [step() for _ in range(4)][-1] == 1
