"""The arena: the same bits with it and without it, within what was projected, and nothing left of it after a run."""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import koila
from benchmarks import witness
from koila._torch import RunMode
from koila.planning.in_force import forget_decisions
from koila.planning.placement import LARGE_BYTES, switched
from koila.planning.timeline import plan_timeline
from koila.planning.tracker import StorageTracker
from tests.models import Task, language

MIB = 2**20
BATCH = 8


def gpt(dtype: torch.dtype = torch.float32) -> Task:
    return language(BATCH, dtype, context=64, width=128, heads=4, layers=2, vocabulary=512, dropout=0.0)


def step(task: Task, mode: str = "auto", budget: int | None = None, **others: Any) -> list[torch.Tensor]:
    task.model.zero_grad()
    batch = koila.lazy(*task.batches[0])
    with koila.budget(budget, process=True, **others), switched.inside(mode):
        loss = task.loss(task.logits(batch), batch)
        loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in task.model.parameters() if p.grad is not None)]


def planned(task: Task, budget: int | str | None = None, process: bool = True, **others: Any) -> Any:
    batch = koila.lazy(*task.batches[0])
    with koila.budget(budget, process=process, **others):
        return koila.plan(task.loss(task.logits(batch), batch), backward=True)


def same(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("chunk_size", [1, 3, 4])
def test_the_same_bits(dtype: torch.dtype, chunk_size: int) -> None:
    task = gpt(dtype)
    expected = step(task, "off", chunk_size=chunk_size)
    forget_decisions()
    found = step(task, "on", chunk_size=chunk_size)
    assert same(found, expected) and same(step(task, "on", chunk_size=chunk_size), expected)


def test_it_is_used_where_it_holds_most_results() -> None:
    plan = planned(gpt(), chunk_size=4).plan
    assert plan.arena is not None and plan.arena.num_bytes >= LARGE_BYTES
    assert f"{plan.arena.num_values} results" in str(plan)
    assert plan.to_dict()["arena"]["bytes"] == plan.arena.num_bytes


def test_it_is_not_used_where_no_limit_binds() -> None:
    assert planned(gpt(), process=False, chunk_size=4).plan.arena is None


def test_it_is_not_used_for_convolutions() -> None:
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Conv2d(16, 16, 3), nn.GroupNorm(4, 16))))
    with koila.budget(chunk_size=4, process=True):
        loss = model(koila.lazy(torch.randn(8, 16, 48, 48))).square().mean()
        assert koila.plan(loss, backward=True).plan.arena is None


def test_the_explanation_says_so() -> None:
    task = gpt()
    batch = koila.lazy(*task.batches[0])
    with koila.budget(chunk_size=4, process=True):
        text = str(koila.explain(task.loss(task.logits(batch), batch), backward=True))
    assert "results lie in one buffer of" in text


def test_no_budget_is_refused_because_of_it() -> None:
    task = gpt()
    with pytest.raises(koila.BudgetError) as refused:
        planned(task, budget=1)
    needed = refused.value.needed_bytes
    with switched.inside("off"):
        forget_decisions()
        with pytest.raises(koila.BudgetError) as without:
            planned(task, budget=1)
    assert needed == without.value.needed_bytes
    forget_decisions()
    assert planned(task, budget=needed).projected_bytes <= needed


def warmed(share: float) -> tuple[Any, int, Any]:
    """A program that has run once in a share of what it needs unsplit, the bytes of the share, and its plan."""
    task = gpt()
    allowed = int(share * planned(task, budget="1GiB").projected_bytes)
    plan = planned(task, budget=allowed)
    step(task, budget=allowed)
    task.model.zero_grad()
    gc.collect()
    return task, allowed, plan


@pytest.mark.parametrize("share", [0.95, 0.6, 0.45, 0.3])
def test_measured_projected_allowed(share: float) -> None:
    task, allowed, plan = warmed(share)
    with StorageTracker() as tracker:
        step(task, budget=allowed)
    assert tracker.peak_bytes <= plan.projected_bytes <= allowed
    if plan.plan.arena is not None:
        assert dict(plan.kinds)["arena"] == plan.plan.arena.held_bytes
        assert plan.plan.arena.num_bytes <= tracker.peak_bytes
        most = max(moment.num_bytes for stretch in plan_timeline(plan.plan) for moment in stretch.moments)
        assert most == plan.projected_bytes - dict(plan.kinds).get("objects and drawn numbers", 0)


def outside(share: float) -> tuple[int, int, int, bool]:
    """Measured by the malloc hook, projected, allowed, and whether there is an arena."""
    task, allowed, plan = warmed(share)
    with witness.Watch() as watch:
        step(task, budget=allowed)
    return watch.peak_bytes, plan.projected_bytes, allowed, plan.plan.arena is not None


def test_the_outside_witness_agrees() -> None:
    measured, projected, allowed, is_used = witness.call_outside("tests.memory.test_arena:outside", 0.6)
    assert is_used and measured <= projected <= allowed
    assert projected <= 1.1 * measured + 2 * MIB


class Buffers(RunMode):
    """Watches for large buffers of bytes; holds none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format and result.dtype is torch.uint8:
            self.sizes.append(result.numel())
        return result


def test_every_run_has_its_own_and_leaves_nothing() -> None:
    task = gpt()
    step(task, chunk_size=4)
    task.model.zero_grad()
    gc.collect()
    with StorageTracker() as tracker, Buffers() as buffers:
        for _ in range(2):
            step(task, chunk_size=4)
            task.model.zero_grad()
            gc.collect()
    assert len(buffers.sizes) == 2, "one for each run, whatever the number of chunks"
    assert tracker.current_bytes < LARGE_BYTES


def test_threads_do_not_share_it() -> None:
    tasks, found = [gpt(), gpt()], dict[int, list[torch.Tensor]]()
    expected = step(tasks[0], "off", chunk_size=2)

    def work(number: int) -> None:
        for _ in range(3):
            found[number] = step(tasks[number], chunk_size=2)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same(found[0], expected) and same(found[1], expected)


def test_results_outlive_it() -> None:
    task = gpt()
    batch = koila.lazy(*task.batches[0])
    with koila.budget(chunk_size=2), switched.inside("on"):
        logits = koila.run(task.logits(batch))
    kept = logits.clone()
    step(task, "on", chunk_size=2)
    assert torch.equal(logits, kept)
    assert logits.untyped_storage().nbytes() == logits.numel() * logits.itemsize


def test_streams_have_one_buffer() -> None:
    task = gpt()
    batch = koila.lazy(*task.batches[0])
    with torch.no_grad(), koila.budget(chunk_size=2), switched.inside("on"):
        expected = koila.run(task.logits(batch))
        with Buffers() as buffers:
            found = torch.cat(list(koila.stream(task.logits(batch))))
            pieces = list(koila.stream(task.logits(batch).sum()))
    assert torch.equal(found, expected) and len(pieces) == 1
    assert len(buffers.sizes) == 2, "one for each"


@pytest.mark.parametrize("how", ["as_strided", "slice_scatter"])
def test_operators_that_look_at_a_whole_storage(how: str) -> None:
    """A value in the buffer would show them its neighbours."""
    x = torch.randn(6, 64, dtype=torch.float64)

    def value(given: torch.Tensor) -> torch.Tensor:
        other, found = given.cos(), given.exp()
        if how == "as_strided":
            found = found.t().contiguous().as_strided((32, given.shape[0]), (given.shape[0], 1), 0).t()
        else:
            found = torch.slice_scatter(found, other[:, :8], 1, 4, 12)
        return (found.sin() * other[:, : found.shape[1]]).sum(1)

    with koila.budget(chunk_size=2), switched.inside("on"), StorageTracker() as tracker:
        found = koila.run(value(koila.lazy(x)))
    assert torch.equal(found, value(x))
    assert tracker.peak_bytes <= 16 * x.numel() * 8
