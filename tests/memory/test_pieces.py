"""Values that are held between phases, in pieces: chunk sizes that differ by phase, and values that are held again."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import nn

import koila
from koila.analysis.types import Sliced
from koila.execution.pieces import Held
from koila.planning.holding import QUICK, THOROUGH
from koila.planning.keeping import Keeping
from koila.planning.peak import project
from koila.planning.phases import make_layout
from koila.planning.plan import make_plan
from koila.planning.sizing import nested_sizes
from koila.planning.step import Destination
from tests.memory.test_levers import noise, normalised_model, traced


def convolutional() -> torch.Tensor:
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3, stride=2), nn.BatchNorm2d(4),
        nn.ReLU(), nn.Flatten(), nn.Linear(36, 5),
    ).double()  # fmt: skip
    return model(koila.lazy(noise(11, 3, 8, 8))).pow(4).sum()


def dense() -> torch.Tensor:
    return normalised_model(depth=4)(koila.lazy(noise(24, 32))).pow(4).sum()


def time_first() -> torch.Tensor:
    """The batch is not the outermost dimension in memory."""
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh()).double()
    x = koila.lazy(noise(5, 8, 6), batch=1)
    hidden = model(x)
    return (hidden - hidden.mean((0, 1))).pow(4).sum()


def test_a_chunk_is_a_piece_a_part_of_one_or_several_joined() -> None:
    whole, held = noise(10, 3), Held()
    for start, stop in ((0, 4), (4, 8), (8, 10)):
        held.add(start, stop, whole[start:stop].clone())
    for start, stop in ((0, 4), (4, 6), (8, 9), (0, 8), (4, 10), (0, 10)):
        assert torch.equal(held.chunk(Sliced(0), start, stop), whole[start:stop])
    held.let_go(8)
    assert torch.equal(held.chunk(Sliced(0), 8, 10), whole[8:])
    with pytest.raises(IndexError):
        held.chunk(Sliced(0), 0, 4)


@pytest.mark.parametrize("make", [convolutional, dense, time_first])
def test_every_phase_may_have_its_own_chunk_size(make: Callable[[], torch.Tensor]) -> None:
    torch.manual_seed(0)
    found = traced(make())
    layout = make_layout(found.facts)
    expected = found.run(make_plan(layout, found.facts.num_samples))[0]
    sizes, rng = nested_sizes(found.facts.num_samples, 1), random.Random(0)
    assert len(layout.stages) > 1
    joined = kept = 0
    for _ in range(25):
        plan = make_plan(layout, [rng.choice(sizes) for _ in layout.stages])
        schedules = [loop for phase in plan.phases for loop in phase.loops.values()]
        joined += sum("join_pieces" in text for loop in schedules for text in loop.decisions())
        kept += sum(sink.destination is Destination.KEEP for loop in schedules for sink in loop.sinks)
        results, measured = found.run(plan)
        assert measured <= project(plan).peak_bytes, plan
        for ours, theirs in zip(results, expected, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None and theirs is not None:
                assert (ours - theirs).norm() <= 1e-10 * max(theirs.norm(), 1e-3), plan
    assert make is time_first or (joined and kept), "nothing was held in pieces"


@pytest.mark.parametrize("make", [convolutional, dense])
def test_whatever_is_held_the_numbers_are_the_same(make: Callable[[], torch.Tensor]) -> None:
    """From everything to as little as possible: let go, computed again, held again."""
    torch.manual_seed(0)
    found = traced(make())
    layout = make_layout(found.facts)
    expected = found.run(make_plan(layout, found.facts.num_samples))[0]
    keeping, num_bytes = Keeping(layout, 1, with_files=False), project(make_plan(layout, 1)).peak_bytes
    computed = set[tuple[frozenset[int], ...]]()
    for percent in range(100, 10, -3):
        holding = keeping.hold(num_bytes * percent // 100, 0.05, effort=THOROUGH if percent % 2 == 0 else QUICK)
        if holding is None:
            break
        computed.add(holding.computed)
        plan = make_plan(keeping.layout_of(holding), [4] * len(layout.stages))
        results, measured = found.run(plan)
        assert measured <= project(plan).peak_bytes
        for ours, theirs in zip(results, expected, strict=True):
            if ours is not None and theirs is not None:
                assert (ours - theirs).norm() <= 1e-10 * max(theirs.norm(), 1e-3), percent
    assert len(computed) > 3, "the limits made no difference"
