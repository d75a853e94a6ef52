"""Regions in schedules: what was handed on before is handed on after."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

import koila
from koila.analysis.program import program_of
from koila.execution.split_run import CompiledPlan, run_chunked
from koila.ir.job import Demand, Wanted
from koila.planning.levers import region
from koila.planning.levers.growth import Drawing
from koila.planning.levers.region import _split_around, split_regions
from koila.planning.phases import make_layout
from koila.planning.plan import make_plan
from koila.planning.schedule import Schedule
from koila.planning.step import Kind, Step

BATCH, CHUNK = 6, 2


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_that_is_no_sum_in_its_region_is_handed_on(bias: bool) -> None:
    """The gradient of a weight, cut along the weight's own axis: in its region it is no sum, but in the schedule."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32, bias=bias), nn.Tanh(), nn.Linear(32, 3, bias=bias)).double()
    x = torch.randn(BATCH, 64, dtype=torch.float64)
    expected = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))

    graph = koila.graph(model(koila.lazy(x)).square().mean())
    wrt = tuple(index for index, leaf in enumerate(graph.leaves) if leaf.requires_grad)
    program = program_of(graph, Demand((0,), wrt))
    plan = make_plan(make_layout(program.facts(Wanted((0,), gradients=True))), CHUNK)
    phase = plan.phases[-1]
    loop = phase.loops[CHUNK]
    product = max((step for step in loop.steps if step.kind is Kind.ADD_PRODUCT), key=lambda step: step.places)
    cut = _split_around(Drawing(loop), product.value, limit=64)
    assert cut is not None and any(step.kind is Kind.SUB_PLAN for step in cut.steps)

    effects = Counter(sink for step in cut.steps for sink in step.sinks)
    assert effects == Counter(sink for step in loop.steps for sink in step.sinks)
    changed = replace(plan, phases=(*plan.phases[:-1], replace(phase, loops={**phase.loops, CHUNK: cut})))
    inputs = [
        graph.leaves[each.index].detach() if each.kind == "leaf" else torch.ones((), dtype=torch.float64)
        for each in program.joint.inputs
    ]
    results = run_chunked(CompiledPlan(changed), graph, inputs)
    gradients = dict(zip(program.joint.wrt, results[program.joint.num_outputs :], strict=False))
    for leaf, theirs in zip(model.parameters(), expected, strict=True):
        index = next(number for number, each in enumerate(graph.leaves) if each is leaf)
        torch.testing.assert_close(gradients[index], theirs)


def half_precision_head() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A narrow model in bfloat16 with a wide head: whatever the chunks, products need copies of the head's weight."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2048, bias=False)).bfloat16()
    return model, torch.randn(BATCH, 64, 16).bfloat16(), torch.randint(0, 2048, (BATCH, 64))


def head_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


def head_region(limit: int) -> tuple[Schedule, Step]:
    """The loop of the backward pass with a region around the logits, and that step."""
    model, x, y = half_precision_head()
    graph = koila.graph(head_loss(model, *koila.lazy(x, y)))
    wrt = tuple(index for index, leaf in enumerate(graph.leaves) if leaf.requires_grad)
    program = program_of(graph, Demand((0,), wrt))
    plan = make_plan(make_layout(program.facts(Wanted((0,), gradients=True))), 1)
    cut = next(split_regions(plan.phases[-1].loops[1], limit))
    return cut, next(step for step in cut.steps if step.kind is Kind.SUB_PLAN)


def test_chunks_of_a_region_are_no_smaller_than_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing fits into a byte: but the smallest chunks would save next to nothing, and make many times the calls."""
    found = head_region(limit=1)[1].work.target
    monkeypatch.setattr(region, "_ALIKE", 1.0)
    smallest = head_region(limit=1)[1].work.target
    assert smallest.plan.chunk_size == 1 and found.plan.chunk_size >= 4
    assert found.seconds < smallest.seconds / 2
    assert found.transient_bytes <= 1.25 * smallest.transient_bytes


def test_a_region_adds_to_the_float32_sum_of_a_half_precision_gradient() -> None:
    """It has neither a sum of its own nor a gradient in half precision beside."""
    schedule, step = head_region(limit=1)
    sums = [schedule.sinks[index] for index in step.sinks]
    assert max(each.state_bytes for each in sums) == 4 * 2048 * 16


def test_gradients_of_a_region_in_half_precision_are_no_worse_than_those_of_eager() -> None:
    model, x, y = half_precision_head()
    weight = model[2].weight  # type: ignore[index]
    head_loss(model, x, y).backward()
    own = weight.grad.double()
    model.zero_grad()
    with koila.budget(1), pytest.raises(koila.BudgetError) as refused:
        head_loss(model, *koila.lazy(x, y)).backward()
    with koila.budget(refused.value.needed_bytes):
        head_loss(model, *koila.lazy(x, y)).backward()
    assert "region" in str(koila.last_report())
    found = weight.grad.double()
    model.double()
    model.zero_grad()
    head_loss(model, x.double(), y).backward()
    exact = weight.grad
    assert float((found - exact).norm()) <= 1.5 * float((own - exact).norm())
