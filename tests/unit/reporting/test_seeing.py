"""What can be seen while koila works: progress, scalars, ranges of the profiler, a line when planning takes long."""

from __future__ import annotations

import io
import logging
import sys
import time

import pytest
import torch

import koila
from koila import events
from koila.events import patience


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run_in_chunks() -> None:
    with koila.budget(chunk_size=2):
        (koila.lazy(torch.ones(4, 8)) * 2).sum().item()


@pytest.mark.parametrize(("terminal", "variable", "shown"), [(True, "", True), (True, "1", False), (False, "", False)])
def test_progress_is_shown_where_somebody_watches(
    terminal: bool, variable: str, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("CI", variable)
    with koila.progress():
        run_in_chunks()
    assert ("samples in chunks of 2" in stream.getvalue()) == shown


def test_scalars_of_every_run_are_written() -> None:
    written: list[tuple[str, float, int]] = []

    class Writer:
        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

    weight = torch.ones(8, requires_grad=True)
    with koila.log_to(Writer(), prefix="mine"), koila.budget("512KiB"):
        for _ in range(2):
            values = koila.lazy(torch.ones(4, 8)) * weight
            loss = values.sum()
            loss.item()
            loss.backward()
            (values > 0).sum().item()  # Reads what the run left; no run that a person would count.
    run_in_chunks()
    seconds = [(name, step) for name, _, step in written if name == "mine/seconds"]
    assert sorted(set(seconds)) == [("mine/seconds", 0), ("mine/seconds", 1)]
    assert {name for name, _, _ in written} >= {"mine/allowed_bytes", "mine/projected_bytes", "mine/fallbacks"}


def test_phases_are_ranges_of_the_profiler() -> None:
    with torch.profiler.profile() as profile:
        run_in_chunks()
    assert [event.count for event in profile.key_averages() if event.key == "koila: phase 1 of 1"] == [1]


def test_planning_that_takes_long_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(patience, "PATIENCE_SECONDS", 0.01)
    with caplog.at_level(logging.WARNING, logger="koila"), events.waiting("looking for a plan for 7 calls"):
        while not caplog.records:
            time.sleep(0.001)
    assert caplog.messages == ["koila: looking for a plan for 7 calls"]


def test_the_last_report_is_what_a_person_would_call_a_run() -> None:
    layer = torch.nn.Linear(8, 3)
    x, y = koila.lazy(torch.randn(12, 8), torch.randint(0, 3, (12,)))
    with koila.budget(chunk_size=4):
        logits = layer(x)
        torch.nn.functional.cross_entropy(logits, y).backward()
        (logits.argmax(1) == y).sum().item()
    assert koila.last_report().num_chunks == 3 and len(koila.last_report().phase_seconds) >= 1
