"""measured ≤ allowed; a budget that cannot be met is refused before anything runs, with the smallest that can."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import koila
from koila.planning.tracker import StorageTracker
from tests.memory.test_peak import BATCH, TASKS
from tests.models import Task


def gradients(task: Task, allowed: int | None) -> tuple[int, torch.Tensor]:
    """The measured peak of a run inside a budget, and its gradients."""
    torch.manual_seed(0)
    task.model.zero_grad()
    batch = task.batches[0] if allowed is None else koila.lazy(*task.batches[0])
    with koila.budget(allowed):
        loss = task.loss(task.logits(batch), batch)
        with StorageTracker() as tracker:
            loss.backward()
    return tracker.peak_bytes, torch.cat([p.grad.double().flatten() for p in task.model.parameters()])


@pytest.mark.parametrize("name", TASKS)
def test_what_is_measured_fits_and_the_smallest_budget_is_accepted(name: str) -> None:
    task = TASKS[name](BATCH)
    with pytest.raises(koila.BudgetError, match=r"needs .* at the smallest, allowed 1000") as refused:
        gradients(task, 1000)
    assert all(p.grad is None for p in task.model.parameters())
    smallest = refused.value.needed_bytes
    assert refused.value.allowed_bytes == 1000 and f"budget={smallest}" in str(refused.value)

    _, expected = gradients(task, None)
    for allowed in (smallest, 4 * smallest):
        measured, found = gradients(task, allowed)
        assert measured <= allowed
        assert float((found - expected).norm()) <= 1e-5 * float(expected.norm())
    with pytest.raises(koila.BudgetError, match="at the smallest"):
        gradients(task, smallest // 2)


def test_a_program_without_a_batch_is_planned_as_one_sample() -> None:
    """Nothing is cut along a batch; parts of it are along other axes, and values are computed again."""
    x, weight = torch.randn(64, 64, dtype=torch.float64), torch.randn(64, 64, dtype=torch.float64, requires_grad=True)

    def loss(inputs: torch.Tensor) -> torch.Tensor:
        return ((inputs @ weight).tanh() @ weight).tanh().sum()

    loss(x).backward()
    expected, weight.grad = weight.grad, None
    whole = koila.plan(loss(koila.lazy(x, batch=None)), backward=True, budget="1GiB").projected_bytes
    with pytest.raises(koila.BudgetError) as refused:
        loss(koila.lazy(x, batch=None, budget=1)).backward()
    assert refused.value.needed_bytes < whole
    with koila.measure() as seen:
        loss(koila.lazy(x, batch=None, budget=refused.value.needed_bytes)).backward()
    report = seen.reports[-1]
    assert report.how == "split" and report.measured_bytes <= report.projected_bytes <= refused.value.needed_bytes
    torch.testing.assert_close(weight.grad, expected, rtol=1e-10, atol=1e-10)


def test_a_refusal_keeps_nothing_alive() -> None:
    """Frames of an error hold whoever asked; the refusal itself is remembered."""
    weight = torch.randn(64, 64, requires_grad=True)
    gc.collect()
    gc.disable()
    try:
        loss = (koila.lazy(torch.randn(8, 64), budget=1) @ weight).square().sum()
        asked = weakref.ref(loss)
        with pytest.raises(koila.BudgetError):
            loss.item()
        del loss
        assert asked() is None
    finally:
        gc.enable()
