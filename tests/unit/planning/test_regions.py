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
from koila.planning.levers.growth import Drawing
from koila.planning.levers.region import _split_around
from koila.planning.phases import make_layout
from koila.planning.plan import make_plan
from koila.planning.step import Kind

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
