"""Allocations that fail in the middle of a run: it finishes with eager's numbers, or raises with nothing changed.

A dispatch mode raises what an allocator raises: once, at 100 places chosen once and for all by a seed; or at every
storage above a size. Runs with a byte budget, with a chunk size and without a budget.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import koila
from koila._torch import RunMode
from koila.planning.in_force import forget_decisions
from tests.exactness.test_faults import State, assert_eager, assert_unchanged, record, start, state_of
from tests.models import Task, language, vision

TASKS: dict[str, Callable[[], Task]] = {
    "cnn": lambda: vision(8, torch.float64, layers=2, size=16),
    "gpt": lambda: language(16, torch.float64, context=16, layers=1, width=8),
}
PLACES_PER_SETUP = 17
SETUPS = [(name, how) for name in TASKS for how in ("bytes", "chunks", "nothing")]
"""Six: 102 places."""


def cpu_error(num_bytes: int) -> RuntimeError:
    fact = "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to allocate"
    return RuntimeError(f"{fact} {num_bytes} bytes. Error code 12 (Cannot allocate memory)")


def accelerator_error(num_bytes: int) -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {num_bytes} bytes.")


ERRORS = (cpu_error, accelerator_error)


class RunsOut(RunMode):
    """Raises an allocator's error at one operator, or at each that makes a storage above a size."""

    def __init__(self, place: int | None = None, above: int | None = None, kind: int = 0) -> None:
        super().__init__()
        self.place, self.above, self.error = place, above, ERRORS[kind]
        self.count = 0
        self.largest = 0
        """Bytes of the largest new storage."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace != "aten" or not _is_new(func, result):
            return result
        num_bytes = result.untyped_storage().nbytes()
        self.largest = max(self.largest, num_bytes)
        self.count += 1
        if self.count - 1 == self.place or (self.above is not None and num_bytes > self.above):
            raise self.error(num_bytes)
        return result


def _is_new(func: Any, result: Any) -> bool:
    """Whether an operator made a real storage."""
    return type(result) is torch.Tensor and not result.is_meta and not func.is_view and not func._schema.is_mutable


def budget_of(task: Task, how: str) -> dict[str, int]:
    """A scope in which the run is cut, with room for smaller plans; or none."""
    if how == "chunks":
        return {"chunk_size": 2}
    if how == "nothing":
        return {}
    with pytest.raises(koila.BudgetError, match="at the smallest") as refused:
        koila.plan(record(task), backward=True, budget=1)
    koila.settle()
    return {"allowed": int(3 * refused.value.needed_bytes)}


def eager_state(name: str) -> State:
    task = TASKS[name]()
    start(task, kept=False)
    record(task, lazy=False).backward()
    return state_of(task.model)


def finishes(task: Task, scope: dict[str, int], mode: RunsOut) -> bool:
    """Whether a run finishes; if not, nothing has changed."""
    koila.metrics.reset()
    start(task, kept=False)
    loss = record(task)
    before = state_of(task.model)
    try:
        with koila.budget(**scope), mode:
            loss.backward()
    except koila.BudgetError as error:
        assert "memory ran out" in str(error)
        assert_unchanged(task.model, before, f"after {error}")
        return False
    return True


def prepared(name: str, how: str) -> tuple[Task, dict[str, int], RunsOut]:
    """A task that is traced and planned, its scope, and what a run of it allocates."""
    forget_decisions()  # What ran out in an earlier test is remembered.
    task = TASKS[name]()
    scope, mode = budget_of(task, how), RunsOut()
    assert finishes(task, scope, RunsOut()) and finishes(task, scope, mode)
    assert koila.last_report().how == ("whole" if how == "nothing" else "split")
    return task, scope, mode


@pytest.mark.parametrize(("name", "how"), SETUPS)
def test_one_allocation_that_fails(name: str, how: str) -> None:
    task, scope, seen = prepared(name, how)
    expected, finished = eager_state(name), 0
    places = random.Random(f"{name} {how}").sample(range(seen.count), PLACES_PER_SETUP)
    for number, place in enumerate(sorted(places)):
        if how == "nothing":
            forget_decisions()  # The next run is unsplit again, and fails in its forward or in its backward pass.
        if finishes(task, scope, RunsOut(place, kind=number % 2)):
            finished += 1
            where = f"{name}, {how}, storage {place} of {seen.count}"
            assert_eager(task, expected, exact=False, where=where)
            assert koila.last_report().retries == koila.metrics.counter_value("retries") == 1, where
    assert finished >= 0.9 * PLACES_PER_SETUP


@pytest.mark.parametrize(("name", "how"), [setup for setup in SETUPS if setup != ("cnn", "chunks")])
def test_large_allocations_fail_again_and_again(name: str, how: str) -> None:
    """The plans become smaller until nothing is too large. (With a chunk size, what phases keep stays as it is.)"""
    task, scope, seen = prepared(name, how)
    assert finishes(task, scope, RunsOut(above=int(0.6 * seen.largest)))
    assert_eager(task, eager_state(name), exact=False, where=f"{name}, {how}")
    report = koila.last_report()
    assert report.retries == koila.metrics.counter_value("retries") >= 1
    assert report.how == "split" and f"memory ran out {report.retries} time" in str(report)


@pytest.mark.parametrize(("name", "how"), SETUPS)
def test_what_never_fits_raises_and_nothing_has_changed(name: str, how: str) -> None:
    task, scope, _ = prepared(name, how)
    assert not finishes(task, scope, RunsOut(above=64, kind=SETUPS.index((name, how)) % 2))
    assert all(parameter.grad is None for parameter in task.model.parameters())
    assert finishes(task, scope, RunsOut())
    assert_eager(task, eager_state(name), exact=False, where=f"{name}, {how}, after failures")
