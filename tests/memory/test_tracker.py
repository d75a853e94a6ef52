"""The tracker itself: it counts what lives, and does not disturb what it watches."""

from __future__ import annotations

from contextlib import nullcontext

import torch

import koila
from koila.planning.tracker import StorageTracker
from tests.models import language


def test_births_peak_and_current() -> None:
    with StorageTracker(births=True) as tracker:
        kept = torch.zeros(256)
        for _ in range(3):
            (kept + 1).mul_(2).view(16, 16)
    assert tracker.current_bytes == 1024
    assert tracker.peak_bytes == 2048
    assert [birth.operator for birth in tracker.births] == ["aten.zeros.default"] + 3 * ["aten.add.Tensor"]
    assert str(tracker.largest) == "aten.zeros.default [256] float32, 1024 bytes"


def test_what_was_alive_before_counts_when_it_dies() -> None:
    before = torch.zeros(256)
    with StorageTracker() as tracker:
        made = before + 1
        del before
    assert tracker.current_bytes == 0 and tracker.peak_bytes == 1024
    assert made.sum() == 256


def test_nothing_after_the_scope_is_counted() -> None:
    with StorageTracker() as tracker:
        made = torch.zeros(256)
    del made
    torch.zeros(1024)
    assert tracker.current_bytes == 1024 and tracker.peak_bytes == 1024


def test_fake_tensors_have_no_bytes() -> None:
    with StorageTracker(births=True) as tracker:
        torch.zeros(256, device="meta")
        with torch._subclasses.FakeTensorMode():
            torch.zeros(256)
    assert tracker.births == []


def test_koila_records_and_traces_the_same_under_the_tracker() -> None:
    """A dispatch mode around recording, tracing and running changes no number."""

    def step(lazy: bool, tracked: bool) -> list[torch.Tensor]:
        task = language(5, torch.float64, vocabulary=23)
        batch = koila.lazy(*task.batches[0]) if lazy else task.batches[0]
        with koila.budget(chunk_size=2), StorageTracker() if tracked else nullcontext():
            task.loss(task.logits(batch), batch).backward()
        return [p.grad for p in task.model.parameters()]

    koila.metrics.reset()
    found = step(lazy=True, tracked=True)
    assert koila.metrics.counter_value("traces") == 1
    assert koila.metrics.counter_value("runs::split") == 1
    for mine, theirs in zip(found, step(lazy=True, tracked=False), strict=True):
        assert torch.equal(mine, theirs)
    torch.testing.assert_close(found, step(lazy=False, tracked=False), rtol=1e-10, atol=1e-14)
