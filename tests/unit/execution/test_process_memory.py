"""The memory of the process around a run: when large blocks come from the system, and what a default budget leaves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import koila
from koila import _malloc
from koila._budget import Budget
from koila.execution import out_of_memory, process_memory
from koila.execution.process_memory import run_kept_small, try_without_heap
from koila.ir.job import Wanted
from koila.planning.cut import Estimate
from koila.planning.decide import Decision
from koila.planning.peak import Projection

MIB = 2**20
CPU = torch.device("cpu")
LIMITED = Budget(allowed_bytes=100, is_default=True)


def decision(budget: Budget, mebibytes: int = 200) -> Decision:
    """A decision that needs so much."""
    return Decision("whole", Wanted(()), budget, 4, estimate=Estimate(None, Projection(mebibytes * MIB, "all of it")))


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Told of each change of the allocator, instead of the allocator."""
    changes: list[int] = []
    monkeypatch.setattr(_malloc, "_enter", lambda change, *sizes: changes.append(change))
    return changes


class Process:
    """A process as the kernel and the C library describe it."""

    growth_bytes = 400 * MIB
    held_back_bytes = 0


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    made: Any = Process()
    monkeypatch.setattr(process_memory, "growth_bytes", lambda: made.growth_bytes)
    monkeypatch.setattr(process_memory, "held_back_bytes", lambda: made.held_back_bytes)
    process_memory._left.clear()
    yield made
    process_memory._left.clear()


def run(made: Decision, entered: list[int], device: torch.device = CPU) -> bool:
    """Whether the allocator is another one while a decision runs; afterwards it is as before."""
    entered.clear()
    inside: list[int] = []
    run_kept_small(made, device, lambda: inside.extend(entered))
    assert sum(entered) == 0
    return inside == [1]


pytestmark = pytest.mark.usefixtures("process")


def test_a_first_run_under_a_limit_takes_large_blocks_from_the_system(entered: list[int]) -> None:
    made = decision(LIMITED, 160)
    assert run(made, entered)
    assert not run(made, entered)
    assert run(decision(LIMITED, 160), entered)


@pytest.mark.parametrize(("growth", "mebibytes"), [(400, 10), (208, 2), (170, 1), (3000, 32)])
def test_the_room_says_which_blocks_come_from_the_system(process: Process, growth: int, mebibytes: int) -> None:
    process.growth_bytes = growth * MIB
    made = decision(LIMITED, 160)
    assert process_memory._block_bytes(made) == mebibytes * MIB
    assert process_memory._block_bytes(decision(Budget(allowed_bytes=100, process=True), 160)) == MIB
    process_memory._not_in_heap.add(made)
    assert process_memory._block_bytes(made) == MIB


def test_a_heap_that_was_too_small_is_not_used_again(entered: list[int]) -> None:
    made = decision(LIMITED)
    assert not try_without_heap(made)
    run(made, entered)
    assert try_without_heap(made)
    assert run(made, entered) and run(made, entered)
    assert not try_without_heap(made)


def test_a_heap_is_used_while_it_fits(entered: list[int], process: Process) -> None:
    made = decision(LIMITED, 200)
    run(made, entered)
    process.growth_bytes, process.held_back_bytes = 200 * MIB, 299 * MIB
    assert run(made, entered)
    process.held_back_bytes = 300 * MIB
    assert not run(made, entered)


def test_what_the_heap_cannot_return_is_used(entered: list[int], process: Process) -> None:
    made = decision(LIMITED, 200)
    run(made, entered)
    assert try_without_heap(made)
    process.growth_bytes, process.held_back_bytes = 60 * MIB, 180 * MIB
    assert not run(made, entered) and not run(decision(LIMITED, 100), entered)
    assert run(decision(LIMITED, 60), entered)
    process.held_back_bytes = 30 * MIB
    assert run(made, entered)


def _fail() -> None:
    raise MemoryError("all of it")


def test_a_first_run_that_failed_is_no_run(entered: list[int]) -> None:
    made = decision(LIMITED)
    with pytest.raises(MemoryError, match="all of it"):
        run_kept_small(made, CPU, _fail)
    assert entered == [1, -1]
    assert run(made, entered)


def test_a_budget_for_the_process_holds_for_every_run(entered: list[int]) -> None:
    made = decision(Budget(allowed_bytes=100, process=True))
    assert run(made, entered) and run(made, entered)


@pytest.mark.parametrize("budget", [Budget(), Budget(allowed_bytes=100), Budget(is_default=True), Budget(chunk_size=1)])
def test_nothing_changes_where_no_limit_binds(budget: Budget, entered: list[int]) -> None:
    assert not run(decision(budget, 160), entered)


def test_a_named_budget_near_the_limit(entered: list[int]) -> None:
    near, far = (decision(Budget(allowed_bytes=900 * MIB), mebibytes) for mebibytes in (161, 159))
    assert not run(far, entered)
    assert run(near, entered) and run(near, entered)


def test_small_runs_are_not_looked_at(entered: list[int], process: Process) -> None:
    process.growth_bytes = 0
    assert not run(decision(LIMITED, 7), entered) and not run(decision(Budget(allowed_bytes=900), 7), entered)


def test_the_host_is_not_the_limit_of_an_accelerator(entered: list[int]) -> None:
    assert not run(decision(replace(LIMITED, process=True)), entered, torch.device("cuda"))


def test_memory_that_ran_out_in_the_heap_is_tried_without_it_first(
    entered: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, smaller = decision(LIMITED), decision(LIMITED)
    monkeypatch.setattr(out_of_memory, "_smaller", lambda job, found: smaller if found is made else None)
    run(made, entered)
    assert list(out_of_memory._attempts(None, made)) == [made, made, smaller, smaller]  # type: ignore[arg-type]
    assert list(out_of_memory._attempts(None, made)) == [made, smaller, smaller]  # type: ignore[arg-type]


@pytest.mark.parametrize("prepared", [False, True])
def test_the_scope_reaches_runs_of_every_kind(prepared: bool, entered: list[int]) -> None:
    weight = torch.ones(3, requires_grad=True)
    for _ in range(4 if prepared else 1):
        with koila.budget(process=True):
            entered.clear()
            (koila.lazy(torch.ones(2, 3)) * weight).sum().backward()
        assert entered == [1, -1]
    entered.clear()
    (koila.lazy(torch.ones(2, 3)) * weight).sum().backward()
    assert entered == []


# What a default budget leaves for what is alive.


def left(reserved_bytes: int = 0) -> int:
    return process_memory.left_for_live_bytes(reserved_bytes) // MIB


def test_the_heap_gets_its_share(process: Process) -> None:
    assert left() == (400 - 64) * 3 // 4
    assert left(40 * MIB) == (360 - 64) * 3 // 4


def test_what_the_heap_holds_back_is_free(process: Process) -> None:
    process.growth_bytes, process.held_back_bytes = 100 * MIB, 300 * MIB
    assert left() == (400 - 64) * 3 // 4


def test_an_amount_stays_while_it_fits_without_a_margin(process: Process) -> None:
    before = left()
    for room in (400, 380, 336, 440):
        process.growth_bytes = room * MIB
        assert left() == before
    process.growth_bytes = 335 * MIB
    assert left() == (335 - 64) * 3 // 4
    process.growth_bytes = 500 * MIB
    assert left() == (500 - 64) * 3 // 4


def test_nothing_is_left_of_nothing(process: Process) -> None:
    process.growth_bytes = 0
    assert left() == 0
