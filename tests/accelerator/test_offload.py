"""Values that wait on the host: between phases and inside a chunk, with copies that arrive late."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache, partial

import pytest

import koila
from tests.accelerator import sim
from tests.accelerator.trial import Outcome, assert_kept, distance, step


@cache
def eager(name: str) -> Outcome:
    return step(name)


@pytest.mark.parametrize("copies", [nullcontext, sim.asynchronous], ids=["at once", "late"])
@pytest.mark.parametrize("share", [0.4, 0.25])
def test_values_between_phases_come_back_as_they_were(share: float, copies: type) -> None:
    before = sim.counts()["bytes_down"]
    with copies():
        budget = int(share * eager("cnn").peak_bytes)
        found = step("cnn", koila.lazy, partial(koila.budget, budget, offload=True))
    assert found.report.offloaded > 0
    assert sim.counts()["bytes_down"] > before + 100_000
    assert sim.counts()["pinned"] == 0, "pinned memory is given back"
    assert_kept(found)
    assert distance(found, eager("cnn")) < 1e-10


@pytest.mark.parametrize("copies", [nullcontext, sim.asynchronous], ids=["at once", "late"])
def test_values_inside_a_chunk_come_back_as_they_were(copies: type) -> None:
    with pytest.raises(koila.errors.BudgetError, match="at the smallest") as refused:
        step("gpt", koila.lazy, partial(koila.budget, "1KiB", offload=True))
    before = sim.counts()["bytes_up"]
    with copies():
        found = step("gpt", koila.lazy, partial(koila.budget, refused.value.needed_bytes, offload=True))
    assert sim.counts()["bytes_up"] > before
    assert_kept(found)
    assert distance(found, eager("gpt")) < 1e-10
