"""Values that wait on the host: between phases and inside a chunk, with copies that arrive late."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache, partial

import pytest
import torch

import koila
from koila import events
from koila.execution.copies import Copies
from koila.ir.cache import clear_all
from koila.planning import cut
from tests.accelerator import sim
from tests.accelerator.trial import Outcome, assert_kept, distance, step


@cache
def eager(name: str) -> Outcome:
    return step(name)


@pytest.fixture
def nothing_held_for_a_while(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Searches that keep all between phases or nothing: else a small program finds a way without the host."""
    clear_all()
    monkeypatch.setattr(cut, "ALL", cut.ALL - {"keep"})
    yield
    clear_all()


@pytest.mark.usefixtures("nothing_held_for_a_while")
@pytest.mark.parametrize("copies", [nullcontext, sim.asynchronous], ids=["at once", "late"])
@pytest.mark.parametrize("share", [0.3, 0.25])
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


@pytest.mark.usefixtures("nothing_held_for_a_while")
def test_copies_go_beside_the_kernels_and_ahead_of_them() -> None:
    """With room for two copies, chunks come back before they are asked for; nothing is read before it is there."""
    races = sim.counts()["races"]
    with sim.asynchronous():
        budget = int(0.3 * eager("cnn").peak_bytes)
        found = step("cnn", koila.lazy, partial(koila.budget, budget, offload=True))
    assert sim.counts()["races"] == races
    assert events.counters()["offload::fetched ahead"] > 0
    assert distance(found, eager("cnn")) < 1e-10


class TestCopies:
    """The copies of a run, alone."""

    DEVICE = torch.device("sim:0")

    @pytest.fixture(autouse=True)
    def late(self) -> Iterator[None]:
        with sim.asynchronous():
            yield

    @pytest.mark.parametrize("room", [0, 10_000])
    def test_a_value_may_be_written_over_as_soon_as_it_is_let_go(self, room: int) -> None:
        copies, handles = Copies(self.DEVICE, room), []
        for number in range(5):
            value = torch.full((256,), float(number), device="sim")
            handles.append(copies.down(value))
            del value
        found = [copies.up(handle).cpu() for handle in handles]
        copies.finish()
        assert all(torch.equal(each, torch.full((256,), float(n))) for n, each in enumerate(found))

    def test_no_more_is_held_than_there_is_room_for(self) -> None:
        copies, before = Copies(self.DEVICE, 2 * (1024 + 32)), sim.live()
        kept = []
        for _ in range(6):
            kept.append(copies.down(torch.ones(256, device="sim")))
            assert sim.live() - before <= 2 * 1024
        copies.finish()
        assert sim.live() == before

    def test_the_host_does_not_wait(self) -> None:
        copies = Copies(self.DEVICE, 10_000)
        value, before = torch.ones(256, device="sim"), sim.counts()["waits"]
        handle = copies.down(value)
        copies.begin_up(handle)
        result = copies.up(handle) * 2
        copies.finish()
        assert sim.counts()["waits"] == before
        assert torch.equal(result.cpu(), torch.full((256,), 2.0))

    def test_pinned_bytes_are_bounded(self) -> None:
        copies, before = Copies(self.DEVICE, pinned_bytes=2 * 1024), sim.counts()["pinned"]
        handles = [copies.down(torch.ones(256, device="sim")) for _ in range(4)]
        assert sim.counts()["pinned"] - before == 2 * 1024
        assert events.counters()["offload::not pinned"] == 2
        assert all(torch.equal(copies.up(handle).cpu(), torch.ones(256)) for handle in handles)
        handles.clear()
        copies.finish()
        assert sim.counts()["pinned"] == before
        assert copies.down(torch.ones(256, device="sim")).place.is_pinned(), "what was given back may be pinned again"
