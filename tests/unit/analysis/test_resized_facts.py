"""Facts and layouts that come from other sizes: they are those that the analysis finds at that size itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import koila
from benchmarks.sizes import PROGRAMS, SIZES
from koila.analysis import program as programs
from koila.analysis.split import Facts, Item, analyse
from koila.ir.cache import clear_all
from koila.planning.layouts import layout_of
from koila.planning.phases import Layout, make_layout


def described(item: Item, facts: Facts) -> tuple[Any, ...]:
    operands = tuple(facts.places[operand] for operand in item.operands)
    return item.kind, item.node.name, item.type, operands, item.index, item.phase, item.is_remade


def laid_out(layout: Layout) -> list[Any]:
    places = layout.facts.places
    found = lambda items: [places[item] for item in items]  # noqa: E731
    stages = [[*map(found, (s.before, s.items, s.targets, s.kept)), sorted(found(s.held))] for s in layout.stages]
    return [*stages, found(layout.after), [found(items) for items in layout.frees]]


def same(found: Facts, fresh: Facts) -> None:
    assert [described(item, found) for item in found.items] == [described(item, fresh) for item in fresh.items]
    assert found.types == fresh.types and found.gathers == fresh.gathers and found.granule == fresh.granule
    assert found.num_phases == fresh.num_phases and found.signature == fresh.signature
    places = [[None if item is None else facts.places[item] for item in facts.results] for facts in (found, fresh)]
    assert places[0] == places[1]
    for item, other in zip(found.items, fresh.items, strict=True):
        mine, theirs = found.ruling_of(item), fresh.ruling_of(other)
        assert mine == theirs
    assert laid_out(layout_of(found)) == laid_out(make_layout(fresh))


@pytest.mark.parametrize("name", PROGRAMS)
def test_facts_of_new_sizes_are_those_that_are_found_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, step = PROGRAMS[name]()
    clear_all()
    known, num_resized = programs.known_facts, 0

    def checked(joint: Any, num_samples: int, origin: Any) -> Facts | None:
        nonlocal num_resized
        found = known(joint, num_samples, origin)
        if found is not None:
            _, _, wanted, kind = origin.structure
            batches = asked[-1].graph.batches if kind == "cut" and num_samples > 1 else {}
            same(found, analyse(joint, batches, num_samples, asked[-1].results(wanted), origin))
            num_resized += 1
        return found

    asked: list[programs.Program] = []
    original = programs.Program._facts

    def noted(program: programs.Program, *args: Any) -> Facts:
        asked.append(program)
        return original(program, *args)

    monkeypatch.setattr(programs, "known_facts", checked)
    monkeypatch.setattr(programs.Program, "_facts", noted)
    for batch, length in SIZES[:16]:
        with koila.budget(chunk_size=3):
            step(model, batch, length, True).backward()
        model.zero_grad()
    assert num_resized > 0
