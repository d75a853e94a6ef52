"""The work of a search is bounded, counted in steps, and does not depend on what was asked before."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import koila
from koila.analysis.program import Program, program_of
from koila.ir.job import Demand, Wanted
from koila.planning import effort, search
from koila.planning.effort import Exhausted, attempt, spend
from koila.planning.search import ALL, Search


def test_what_takes_too_long_is_given_up_and_paid_for() -> None:
    def outer() -> str:
        assert attempt(10, lambda: spend(11)) is None
        spend(80)
        with pytest.raises(Exhausted):
            spend(11)
        return "done"

    assert attempt(100, outer) == "done"


def test_an_attempt_inside_cannot_do_more_than_what_is_left() -> None:
    assert attempt(10, lambda: attempt(100, lambda: spend(20) or "done")) is None


def unrolled(steps: int = 12) -> Program:
    torch.manual_seed(0)
    cell, head = nn.GRUCell(4, 8), nn.Linear(8, 3)
    x, y = koila.lazy(torch.randn(6, steps, 4), torch.randint(0, 3, (6,)))
    state = torch.zeros(6, 8)
    for place in range(steps):
        state = cell(x[:, place], state)
    graph = koila.graph(F.cross_entropy(head(state), y))
    return program_of(graph, Demand((0,), tuple(n for n, leaf in enumerate(graph.leaves) if leaf.requires_grad)))


WANTED = Wanted((0,), gradients=True)


def test_a_search_does_so_much_for_each_node_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    program, spent = unrolled(), [0.0]
    found = Search(program.facts(WANTED), ALL)
    before = effort._meter.left

    def counted(num_steps: float) -> None:
        spent[0] += num_steps
        spend(num_steps)

    for module in (search, search.shrink.__globals__["recompute"].__globals__, search.shrink.__globals__):
        if isinstance(module, dict):
            if "spend" in module:
                monkeypatch.setitem(module, "spend", counted)
        else:
            monkeypatch.setattr(module, "spend", counted)
    found.smallest()
    one_plan = 2 * found.num_nodes
    assert 0 < spent[0] <= (search._SMALLEST + 1) * found.num_nodes + one_plan
    assert effort._meter.left == before


def test_what_was_asked_before_changes_nothing() -> None:
    program = unrolled()
    fresh = Search(program.facts(WANTED), ALL)
    needed = fresh.smallest()[1].peak_bytes
    asked = Search(program.facts(WANTED), ALL)
    for share in (4.0, 2.0, 1.2):
        asked.find(int(share * needed), thorough=False)
    assert asked.smallest()[1].peak_bytes == needed
    again = Search(program.facts(WANTED), ALL)
    first, second = asked.find(2 * needed), again.find(2 * needed)
    assert first is not None and second is not None
    assert [s.decisions() for s in first[0].schedules] == [s.decisions() for s in second[0].schedules]


def test_the_budget_that_a_refusal_names_is_accepted() -> None:
    program = unrolled()
    needed = Search(program.facts(WANTED), ALL).smallest()[1].peak_bytes
    found = Search(program.facts(WANTED), ALL).find(needed)
    assert found is not None and found[1].peak_bytes <= needed
