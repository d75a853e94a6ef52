"""Code of schedules that differ in sizes: what is taken from another size is what would be written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import koila
from benchmarks.sizes import LENGTHS, PROGRAMS
from koila.execution import codegen
from koila.execution.codegen import Loop
from koila.ir.cache import clear_all
from koila.planning.schedule import Schedule


@pytest.mark.parametrize("allowed", ["1500KiB", "600KiB", None])
@pytest.mark.parametrize("name", ["gpt", "resnet", "lstm", "gpt2"])
def test_code_from_another_size_is_what_would_be_written(
    name: str, allowed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, step = PROGRAMS[name]()
    clear_all()
    like, num_alike = codegen._like, 0

    def checked(loop: Loop, schedule: Schedule) -> Loop | None:
        nonlocal num_alike
        found = like(loop, schedule)
        if found is not None:
            sub_plans: Any = None  # No schedule that is filled from a pattern has one.
            fresh = codegen._Writer(schedule, sub_plans, {}).write()
            assert found.numbers == fresh.numbers and found.slots == fresh.slots and found.executed == fresh.executed
            assert found.wholes == fresh.wholes and found.sinks == fresh.sinks
            assert found.destinations == fresh.destinations
            assert found.function.__code__ is fresh.function.__code__
            mine, theirs = found.function.__globals__, fresh.function.__globals__
            assert {name: each for name, each in mine.items() if name != "__builtins__"} == {
                name: each for name, each in theirs.items() if name != "__builtins__"
            }
            num_alike += 1
        return found

    monkeypatch.setattr(codegen, "_like", checked)
    for batch, length in LENGTHS[:16]:
        with koila.budget(chunk_size=3) if allowed is None else koila.budget(allowed):
            try:
                step(model, batch, length, True).backward()
            except koila.BudgetError:
                continue
        model.zero_grad()
    assert num_alike > 0 or allowed is not None
