"""Schedules of new sizes: filled from patterns they are the schedules that would be built, step by step, or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import koila
from koila.analysis.family import Family, Sample
from koila.analysis.program import Program
from koila.analysis.trace import trace
from koila.ir.cache import clear_all
from koila.ir.formulas import NoFormula
from koila.ir.job import Demand, Wanted
from koila.planning.patterns import MAX_STEPS, MIN_SCHEDULES, _Family, _Sample
from koila.planning.phases import make_layout
from koila.planning.plan import Plan, make_plan
from koila.planning.schedule import Schedule
from koila.planning.step import Step

torch.manual_seed(0)
LINEAR, WORDS = nn.Linear(16, 16), nn.Embedding(300, 16)
CONV, NORM = nn.Conv1d(16, 16, 3, padding=1), nn.BatchNorm1d(16, track_running_stats=False)
ATTENTION = nn.MultiheadAttention(16, 2, batch_first=True)

PROGRAMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "attention": lambda h: ATTENTION(h, h, h, need_weights=False)[0],
    "statistics of the batch": lambda h: F.relu(NORM(CONV(h.mT))).mT,
    "positions": lambda h: h + WORDS(torch.arange(h.shape[1])),
    "a causal mask": lambda h: (h @ h.mT).masked_fill(torch.ones(h.shape[1], h.shape[1]).triu(1).bool(), -1e9) @ h,
    "dropout": lambda h: F.dropout(h, 0.25) @ h.mT,
    "flattened": lambda h: LINEAR(h.flatten(0, 1)).view_as(h).log_softmax(-1),
    "shifted": lambda h: h[:, 1:] * h[:, :-1],
    "all pairs": lambda h: h.mean(1) @ h.mean(1).T,
    "layers that do the same": lambda h: LINEAR(F.gelu(LINEAR(F.gelu(LINEAR(h).transpose(0, 1)))).transpose(0, 1)),
    "zeros of both signs": lambda h: h * h.new_full((1, h.shape[1], 1), 0.0) + h * h.new_full((1, h.shape[1], 1), -0.0),
    "scaled by the length": lambda h: h * h.shape[1] ** -0.5,
}
SAMPLES, NEW = ((8, 20), (8, 27)), ((8, 23), (8, 8), (8, 41))


def program_at(forward: Callable[[torch.Tensor], torch.Tensor], batch: int, length: int, family: Any) -> Program:
    """A program with its backward pass: traced, or built from a family of traces."""
    words = koila.lazy(torch.arange(batch * length).view(batch, length) % 300)
    graph = koila.graph(forward(LINEAR(WORDS(words))).square().mean())
    demand = Demand((0,), tuple(number for number, leaf in enumerate(graph.leaves) if leaf.requires_grad))
    joint = trace(graph, demand) if family is None else family.build(graph, demand)
    return Program(graph, demand, (), joint)


def plan_of(program: Program, chunk_size: int) -> Plan:
    return make_plan(make_layout(program.facts(Wanted((0,), gradients=True))), chunk_size)


def plain(step: Step) -> Any:
    """All of a step that two equal ones have in common."""
    work = step.work
    call = None if work is None else (work.operation.target, repr(work.operation.args), repr(work.operation.kwargs))
    rest = None if work is None else (work.form, work.recorded, work.kernel, work.is_transposed, work.prefix)
    fields = [getattr(step, name) for name in Step.__slots__ if name not in ("work", "seconds")]
    return fields, pytest.approx(step.seconds, rel=1e-9), call, rest


def contents(schedule: Schedule) -> Any:
    wholes: Any = schedule.wholes
    sinks: Any = [(sink.key.node.name, sink.destination, sink.value_bytes) for sink in schedule.sinks]  # type: ignore[attr-defined]
    return schedule.inputs, [item.node.name for item in wholes], sinks, schedule.chunk, schedule.forms


def assert_same(filled: Sequence[Schedule], built: Sequence[Schedule]) -> None:
    for one, other in zip(filled, built, strict=True):
        assert contents(one) == contents(other)
        for mine, theirs in zip(one.steps, other.steps, strict=True):
            assert plain(mine) == plain(theirs)


@pytest.mark.parametrize("name", PROGRAMS)
def test_schedules_that_are_filled_are_those_that_are_built(name: str) -> None:
    clear_all()
    forward, num_filled, chunk_size = PROGRAMS[name], 0, 3
    samples = [program_at(forward, batch, length, None) for batch, length in SAMPLES]
    family = Family([Sample(sample.graph, sample.joint) for sample in samples])
    for batch, length in NEW:
        for sample in samples:
            plan_of(sample, chunk_size)
        try:
            program = program_at(forward, batch, length, family)
        except NoFormula:
            continue
        koila.metrics.reset()
        plan = plan_of(program, chunk_size)
        num_filled += koila.metrics.counter_value("sizes::schedules filled")
        clear_all()  # Nothing is known: every schedule is built.
        assert_same(plan.schedules, plan_of(program, chunk_size).schedules)
    assert num_filled > 0


def test_what_a_table_says_about_a_size_is_asked_again() -> None:
    """Bytes inside of calls follow no formula: filled schedules have those of their own size."""
    clear_all()
    forward = PROGRAMS["statistics of the batch"]
    programs = [program_at(forward, batch, length, None) for batch, length in SAMPLES]
    family = Family([Sample(program.graph, program.joint) for program in programs])
    for program in programs:
        plan_of(program, 4)
    program = program_at(forward, 8, 64, family)
    inside = [step.inside_bytes for schedule in plan_of(program, 4).schedules for step in schedule.steps]
    clear_all()
    assert inside == [step.inside_bytes for schedule in plan_of(program, 4).schedules for step in schedule.steps]


def test_a_pattern_needs_two_samples() -> None:
    clear_all()
    forward = PROGRAMS["flattened"]
    programs = [program_at(forward, batch, length, None) for batch, length in SAMPLES]
    family = Family([Sample(program.graph, program.joint) for program in programs])
    plan_of(programs[0], 4)
    koila.metrics.reset()
    plan_of(program_at(forward, 8, 31, family), 4)  # One sample tells nothing.
    assert koila.metrics.counter_value("sizes::schedules filled") == 0


def sample_of(num_steps: int, number: int) -> _Sample:
    """A schedule of so many steps; only their number matters."""
    return _Sample((number,), 1, Schedule((), (None,) * num_steps), (), {})  # type: ignore[arg-type]


def test_a_program_with_many_schedules_keeps_the_latest() -> None:
    """Plans that hold other values between phases have other schedules: a long loop must not keep all of them."""
    family, each = _Family(), MAX_STEPS // MIN_SCHEDULES
    for number in range(3 * MIN_SCHEDULES):
        family.add(number, sample_of(each, number))
        family.pattern(0)
        assert family.num_steps == each * len(family.samples) <= MAX_STEPS
    assert len(family.samples) == MIN_SCHEDULES and {0, 3 * MIN_SCHEDULES - 1} <= set(family.samples)


def test_the_schedules_of_a_large_program_are_all_kept() -> None:
    family = _Family()
    for number in range(MIN_SCHEDULES):
        family.add(number, sample_of(MAX_STEPS, number))
    assert len(family.samples) == MIN_SCHEDULES
