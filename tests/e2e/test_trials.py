"""Other plans are tried in the steps of a loop: the numbers stay, the budget holds, the fastest one stays in force."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet, ref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import koila
from koila.execution import engine
from koila.planning import in_force, trials
from koila.planning.decide import Decision
from koila.planning.in_force import forget_decisions
from koila.planning.tracker import StorageTracker
from koila.planning.trials import NUM_STEPS, Trial

NUM_ROUNDS = 30


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[Decision, float]]:
    """Trials at every chance; a plan of fewer bytes takes less time, whatever the clock says."""
    monkeypatch.setattr(trials, "SHARE", 1e9)
    monkeypatch.setattr(in_force, "_WORTH_A_TRY", 100.0)
    seconds: dict[Decision, float] = {}
    note = engine.note_seconds

    def note_bytes(job: Any, decision: Decision, _: float) -> None:
        assert decision.projection is not None
        seconds[decision] = float(decision.projection.peak_bytes)
        note(job, decision, seconds[decision])

    monkeypatch.setattr(engine, "note_seconds", note_bytes)
    forget_decisions()
    yield seconds
    forget_decisions()


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 100, 4)).double()


def losses(
    model: nn.Module, lazy: bool, allowed: str = "5MiB", num_rounds: int = NUM_ROUNDS, **options: Any
) -> list[float]:
    """Training; with koila, inside a budget that a plan must cut for."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.01), []
    torch.manual_seed(1)
    for _ in range(num_rounds):
        x, y = torch.randn(64, 3, 12, 12, dtype=torch.float64), torch.randint(0, 4, (64,))
        with koila.budget(allowed, **options):
            batch = koila.lazy(x, y) if lazy else (x, y)
            loss = F.cross_entropy(model(batch[0]), batch[1])
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def losses_at(length: int) -> None:
    """A step with inputs of another size."""
    model = nn.Sequential(nn.Conv1d(3, 16, 3), nn.ReLU(), nn.Conv1d(16, 16, 3), nn.ReLU()).double()
    with koila.budget("100KiB"):
        model(koila.lazy(torch.randn(64, 3, length, dtype=torch.float64))).square().mean().backward()
    assert koila.last_report().how == "split"


def test_the_fastest_plan_stays(planned: dict[Decision, float]) -> None:
    plain, own = network(), network()
    expected = losses(plain, lazy=False)
    with koila.measure() as measured:
        found = losses(own, lazy=True)
    assert torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-9)
    for one, other in zip(own.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)
    assert koila.metrics.counter_value("plan::tried") >= 1
    assert len(planned) >= 2 and all(size <= 5 * 2**20 for size in planned.values())
    assert koila.last_report().projected_bytes == min(planned.values())
    assert measured.peak_bytes <= 5 * 2**20


def test_what_was_fastest_at_a_smaller_budget_is_tried(
    planned: dict[Decision, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan that fits a smaller budget fits a larger one, too."""
    losses(network(), lazy=True, allowed="2MiB")
    best = koila.last_report().projected_bytes
    monkeypatch.setattr(in_force, "_searched_otherwise", lambda job, best, way: None)
    losses(network(), lazy=True)
    assert best is not None and koila.last_report().projected_bytes == best


def test_the_time_of_a_plan_that_cuts_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no phases; its time is that of the run."""
    seconds: list[float] = []
    monkeypatch.setattr(engine, "note_seconds", lambda job, decision, taken: seconds.append(taken))
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Tanh())]
    model, x = nn.Sequential(*layers).double(), torch.randn(256, 32, dtype=torch.float64)
    with StorageTracker() as tracker:
        model(x).pow(4).sum().backward()
    model.zero_grad()
    with koila.budget(int(0.7 * tracker.peak_bytes)):
        model(koila.lazy(x)).pow(4).sum().backward()
    report = koila.last_report()
    assert report.how == "split" and report.phase_seconds == () and report.recomputed
    assert len(seconds) == 1 and seconds[0] > 0


def test_a_loop_ends_its_trials(planned: dict[Decision, float]) -> None:
    model = network()
    losses(model, lazy=True)
    koila.metrics.reset()
    losses(model, lazy=True)
    assert not koila.metrics.counter_value("plan::tried") and not koila.metrics.counter_value("plans")


def test_what_is_forgotten_has_no_trials(planned: dict[Decision, float]) -> None:
    losses(network(), lazy=True, num_rounds=2)
    assert not in_force.are_trials_over()
    forget_decisions()
    assert in_force.are_trials_over() and planned


def test_what_was_tried_for_a_plan_goes_with_it(
    planned: dict[Decision, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes that a loop has left: their plans are dropped from the cache of decisions, and nothing else holds them."""
    monkeypatch.setattr(in_force._decisions, "max_size", 1)
    made: WeakSet[Decision] = WeakSet()
    for length in range(10, 22):
        losses_at(length)
        made.update(planned)
        planned.clear()
    gc.collect()
    assert len(made) <= in_force.ALWAYS + 1  # The last report can still be drawn.
    assert {*in_force._trials, *in_force._siblings} <= set(made)


def test_the_best_plan_so_far_is_held_while_others_are_tried(planned: dict[Decision, float]) -> None:
    losses(network(), lazy=True, num_rounds=1 + NUM_STEPS)
    (first,) = planned
    first_bytes, known = planned.pop(first), ref(first)
    del first
    koila.metrics.reset()
    losses(network(), lazy=True, num_rounds=1)
    gc.collect()
    assert koila.metrics.counter_value("plan::tried") == 1 and known() is not None
    assert [trial.best for trial in in_force._trials.values()] == [known()] and first_bytes > min(planned.values())


def test_tuning_can_be_switched_off(planned: dict[Decision, float]) -> None:
    losses(network(), lazy=True, tune=False)
    assert not koila.metrics.counter_value("plan::tried") and len(planned) == 1


def test_a_process_that_is_kept_small_has_one_plan(planned: dict[Decision, float]) -> None:
    losses(network(), lazy=True, process=True)
    assert not koila.metrics.counter_value("plan::tried") and len(planned) == 1


def test_repeatable_algorithms_have_one_plan(planned: dict[Decision, float]) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        losses(network(), lazy=True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not koila.metrics.counter_value("plan::tried") and len(planned) == 1


def test_no_trial_before_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking for a plan takes a bounded share of the time of the steps."""
    monkeypatch.setattr(trials, "SHARE", 0.1)
    trial: Trial[str] = Trial(planning_seconds=1.0)
    for _ in range(19):
        trial.note(0.5)
    assert not trial.is_due
    for _ in range(2):
        trial.note(0.5)
    assert trial.is_due and trial.next_way("first") == "known"


def test_a_plan_that_is_no_faster_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "SHARE", 1.0)
    trial: Trial[str] = Trial(planning_seconds=0.0)
    for plan, seconds in (
        ("first", 1.0),
        ("other", 0.99),
        ("half", 0.98),
        ("less", 0.99),
        ("large", 1.1),
        ("uncut", 1.2),
    ):
        for step in range(1 + NUM_STEPS):
            assert not trial.is_due
            trial.note(9.0 if step == 0 else seconds)
        assert trial.is_due
        trial.next_way(plan)
        assert trial.best == "first"
    trial.note(0.1)
    assert trial.is_over and not trial.is_due
