"""Bytes of eager code behind a program's leaves, against the storage tracker."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import koila
from koila.planning.eager_history import eager_history as behind
from koila.planning.tracker import StorageTracker


def impulse(decay: torch.Tensor, mixing: torch.Tensor) -> torch.Tensor:
    """The kernel of a state-space layer, from its parameters alone."""
    powers = torch.exp(-F.softplus(decay)[..., None] * torch.arange(64.0))
    return (mixing[..., None] * powers).sum(1)


def parameters() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.rand(32, 8, requires_grad=True), torch.randn(32, 8, requires_grad=True)


def test_what_autograd_saved_is_held() -> None:
    decay, mixing = parameters()
    with StorageTracker() as tracker:
        made = impulse(decay, mixing)
    saved = 32 * 8 * 64 * 4
    assert saved < behind([made]).held_bytes <= tracker.current_bytes + 1024


def test_the_backward_of_what_was_made() -> None:
    made = impulse(*parameters())
    seed, found = torch.ones_like(made), behind([made])
    with StorageTracker() as tracker:
        made.backward(seed)
    assert tracker.peak_bytes <= found.backward_bytes <= 2 * tracker.peak_bytes


def test_leaves_without_a_history_hold_nothing() -> None:
    assert behind([torch.ones(3), *parameters()]).held_bytes == 0


def test_a_budget_counts_it() -> None:
    """Nearly all bytes of the step are those of the kernel, which no plan sees."""
    decay, mixing = parameters()
    layer, x = nn.Linear(32, 1), torch.randn(4, 32, 64)

    def step(allowed: int) -> koila.Report:
        with koila.measure():
            layer((koila.lazy(x, budget=allowed) * impulse(decay, mixing)).sum(-1)).square().sum().backward()
        return koila.last_report()

    with pytest.raises(koila.BudgetError, match="at the smallest") as refused:
        step(1)
    needed = refused.value.needed_bytes
    assert needed > 32 * 8 * 64 * 4
    assert step(needed).projected_bytes <= needed
