"""Plans that are made and not run, and reports of what ran: bytes that were projected, and bytes that were measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import koila
from koila import _bytes
from koila.planning.calibration import forget_corrections
from koila.planning.carrying import Carrying
from koila.planning.devices import rules_for
from koila.planning.in_force import forget_decisions
from koila.planning.peak import Projection
from koila.planning.plan import Plan
from koila.planning.search import Search
from tests.models import Task, vision

BATCH = 128
HERE = Path(__file__).name


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)).double()


def mlp_loss(model: nn.Module) -> torch.Tensor:
    x = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return model(koila.lazy(x)).square().mean()


def smallest(loss: torch.Tensor) -> int:
    """What the error of an impossible budget names."""
    with pytest.raises(koila.BudgetError, match=r"needs \d+ bytes .* at the smallest, allowed 10 ") as refused:
        koila.plan(loss, backward=True, budget=10)
    assert f"budget={refused.value.needed_bytes}" in str(refused.value)
    return refused.value.needed_bytes


# Plans.


def test_nothing_runs() -> None:
    model = mlp()
    koila.plan(mlp_loss(model), backward=True, budget="1GiB")
    assert koila.metrics.counter_value("runs") == 0
    assert koila.metrics.counter_value("nodes_executed") == 0
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_budget_that_an_error_names_is_accepted() -> None:
    loss = mlp_loss(mlp())
    needed = smallest(loss)
    assert koila.plan(loss, backward=True, budget=needed).projected_bytes <= needed
    with pytest.raises(koila.BudgetError, match=f"needs {needed} bytes"):
        koila.plan(loss, backward=True, budget=needed // 2)


def test_equal_inputs_give_equal_plans() -> None:
    needed = smallest(mlp_loss(mlp()))
    first = koila.plan(mlp_loss(mlp()), backward=True, budget=needed)
    forget_decisions()
    second = koila.plan(mlp_loss(mlp()), backward=True, budget=needed)
    assert first.plan is not second.plan
    assert first.plan == second.plan and hash(first.plan) == hash(second.plan)
    assert first == second and first.to_json() == second.to_json()


def test_other_budgets_give_other_plans() -> None:
    loss = mlp_loss(mlp())
    needed = smallest(loss)
    small, large = (koila.plan(loss, backward=True, budget=size) for size in (needed, 100 * needed))
    assert small.plan != large.plan and small != large and small.to_json() != large.to_json()
    assert small.chunk_size < large.chunk_size == BATCH
    assert small.projected_bytes < large.projected_bytes


def test_json_holds_every_decision() -> None:
    loss = mlp_loss(mlp())
    needed = smallest(loss)
    found = json.loads(koila.plan(loss, backward=True, budget=needed).to_json())
    assert (found["how"], found["allowed_bytes"], found["device"]) == ("split", needed, "cpu")
    assert sum(found["kinds"].values()) == found["projected_bytes"]
    size = found["plan"]["chunk_size"]
    assert found["chunk_size"] == size < BATCH == found["num_samples"]
    assert any("tanh_backward" in call for call in found["plan"]["phases"][-1]["loops"][str(size)])


def test_a_program_that_fits_is_planned_as_it_runs() -> None:
    planned = koila.plan(mlp_loss(mlp()), backward=True, budget="1GiB")
    found = json.loads(planned.to_json())
    assert (found["how"], found["plan"], found["chunk_size"]) == ("whole", None, BATCH)
    assert sum(found["kinds"].values()) == found["projected_bytes"]
    assert "all of it fits" in str(planned) and "by eager's own kernels" in str(planned)


def test_a_plan_can_be_read() -> None:
    task = vision(16, torch.float64, layers=2, size=6)
    batch = koila.lazy(*task.batches[0])
    loss = task.loss(task.logits(batch), batch)
    plan = koila.plan(loss, backward=True, budget=smallest(loss))
    text = str(plan)
    assert f"projected {_bytes.format_bytes(plan.projected_bytes)} of" in text and "on cpu" in text
    assert f"chunks of {plan.chunk_size} of 16 samples" in text
    for number in range(len(plan.plan.phases)):
        assert f"phase {number + 1}: " in text
    for kind, size in plan.kinds:
        assert f"{kind} {_bytes.format_bytes(size)}" in text
    assert sum(size for _, size in plan.kinds) == plan.projected_bytes
    assert {"gradients", "activations", "workspace"} <= {kind for kind, _ in plan.kinds}


def test_the_largest_value_at_the_peak_has_its_line() -> None:
    x = koila.lazy(torch.ones(4, 8))
    large = x.repeat(1, 32)
    plan = koila.plan(large.sum(), budget="1MiB")
    assert "[4, 256]" in plan.largest and "4.0 KiB" in plan.largest
    assert f"{HERE}:{test_the_largest_value_at_the_peak_has_its_line.__code__.co_firstlineno + 2}" in str(plan)


def test_a_device_that_is_not_here() -> None:
    plan = koila.plan(mlp_loss(mlp()), backward=True, device="cuda", total="24GiB")
    assert plan.device == "cuda" and plan.allowed_bytes == 24 * 2**30 - rules_for("cuda").context_bytes
    assert "on cuda" in str(plan) and plan.chunk_size == BATCH


def test_what_is_planned_is_what_runs() -> None:
    model = mlp()
    loss = mlp_loss(model)
    plan = koila.plan(loss, backward=True, budget=smallest(loss))
    with koila.measure(), koila.budget(plan.allowed_bytes):
        loss.backward()
    report = koila.last_report()
    assert (report.chunk_size, report.projected_bytes) == (plan.chunk_size, plan.projected_bytes)
    assert report.measured_bytes <= report.projected_bytes


# Reports.


def step(task: Task, **scope: int) -> koila.Report:
    """A step inside a scope, measured."""
    batch = koila.lazy(*task.batches[0])
    loss = task.loss(task.logits(batch), batch)
    with koila.measure() as seen, koila.budget(**scope):
        loss.backward()
    assert seen.reports == [koila.last_report()]
    assert seen.peak_bytes == koila.last_report().measured_bytes
    return koila.last_report()


def test_the_report_of_a_run_in_chunks() -> None:
    report = step(vision(16, torch.float64, layers=2, size=6), chunk_size=4)
    assert (report.how, report.num_samples, report.chunk_size, report.num_chunks) == ("split", 16, 4, 4)
    assert len(report.phase_seconds) > 1 and all(seconds > 0 for seconds in report.phase_seconds)
    assert sum(report.phase_seconds) <= report.seconds
    assert report.recomputed["aten.relu.default"] > 0
    assert (report.regions, report.fallbacks, report.retries, report.offloaded) == ((), (), 0, 0)
    assert report.projected_bytes is None and report.measured_bytes > 0
    assert "16 samples" in str(report) and "4 chunks of 4" in str(report) and "phase 1: " in str(report)
    assert "computed again: " in str(report)


def test_the_report_of_a_run_with_a_region() -> None:
    hidden = torch.randn(1, 64, 16, requires_grad=True)
    loss = nn.Linear(16, 512)(koila.lazy(hidden)).logsumexp(-1).sum()
    with koila.measure(), koila.budget("100KiB"):
        loss.backward()
    report = koila.last_report()
    assert report.measured_bytes <= report.projected_bytes <= 100 * 1024 == report.allowed_bytes
    assert report.regions and all(region in str(report) for region in report.regions)


def test_the_report_of_a_fallback() -> None:
    x = torch.ones(4, 2, requires_grad=True)
    out = koila.lazy(x) * 2
    out.register_hook(lambda gradient: gradient)
    with koila.budget(chunk_size=2):
        out.sum().backward()
    report = koila.last_report()
    assert report.how == "whole" and len(report.fallbacks) == 1 and "hooks" in report.fallbacks[0]
    assert "fell back: hooks" in str(report)


def test_without_measure_nothing_is_measured() -> None:
    koila.lazy(torch.ones(4)).sum().item()
    assert koila.last_report().measured_bytes is None


@pytest.mark.parametrize("tune", [True, False])
def test_a_projection_that_was_too_low_corrects_the_next_plan(monkeypatch: pytest.MonkeyPatch, tune: bool) -> None:
    """The search keeps some bytes to itself; the next plan knows of them, unless plans are frozen."""
    honest, hidden = Search.find, 40_000
    forget_corrections()

    def lie(search: Search, allowed: int, thorough: bool = True) -> tuple[Plan, Projection] | None:
        found = honest(search, allowed + hidden, thorough)
        return found and (found[0], replace(found[1], peak_bytes=found[1].peak_bytes - hidden))

    model = mlp()
    allowed = smallest(mlp_loss(model)) + hidden
    forget_decisions()
    monkeypatch.setattr(Search, "find", lie)
    monkeypatch.setattr(Carrying, "like", lambda *_: None)
    gaps, measured = [], []
    for _ in range(2):
        loss = mlp_loss(model)
        with koila.measure(), koila.budget(allowed, tune=tune):
            loss.backward()
        report = koila.last_report()
        gaps.append(report.measured_bytes - report.projected_bytes)
        measured.append(report.measured_bytes)
    forget_decisions()
    assert koila.metrics.counter_value("projection::too low") >= 1
    assert measured[0] > allowed and gaps[0] > 0
    if tune:
        assert measured[1] <= allowed and gaps[1] <= 0.1 * gaps[0]
    else:
        assert measured[1] == measured[0] and gaps[1] == gaps[0]


def test_a_refusal_is_remembered() -> None:
    weight = torch.randn(64, 64, requires_grad=True)
    texts = []
    for _ in range(2):
        koila.metrics.reset()
        with koila.budget(1000), pytest.raises(koila.errors.BudgetError, match="at the smallest") as error:
            (koila.lazy(torch.randn(32, 64)) @ weight).square().mean().backward()
        texts.append(str(error.value))
    assert texts[0] == texts[1]
    assert koila.metrics.counter_value("plan::refused again") == 1
    assert koila.metrics.counter_value("plans") == 0
