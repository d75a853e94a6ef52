"""Plans whose result is handed out chunk by chunk: its whole buffer is never there, and never counted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import koila
from koila.analysis.program import program_of
from koila.errors import BudgetError
from koila.execution.split_run import CompiledPlan, stream_chunked
from koila.ir.job import Demand, Wanted
from koila.planning.peak import project
from koila.planning.phases import make_layout
from koila.planning.plan import make_plan
from koila.planning.search import ALL, Search
from koila.planning.tracker import StorageTracker

BATCH, WIDTH = 64, 256


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, WIDTH)).double().requires_grad_(False)


def batch() -> torch.Tensor:
    return torch.randn(BATCH, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Streamed:
    """A program that is ready for the search, with one result."""

    def __init__(self, value: torch.Tensor) -> None:
        self.graph = koila.graph(value)
        self.program = program_of(self.graph, Demand())
        self.facts = self.program.facts(Wanted((0,)))

    def run(self, compiled: CompiledPlan) -> tuple[torch.Tensor, int]:
        """The chunks side by side, and the peak of a caller who holds one of them at a time."""
        inputs = [self.graph.leaves[each.index].detach() for each in self.program.joint.inputs]
        found = torch.zeros(BATCH, WIDTH, dtype=torch.float64)
        start = 0
        with StorageTracker() as tracker:
            for piece in stream_chunked(compiled, self.graph, inputs):
                found[start : start + len(piece)].copy_(piece)
                start += len(piece)
        assert start == BATCH
        return found, tracker.peak_bytes


@pytest.mark.parametrize("chunk_size", [1, 3, 16, BATCH])
def test_the_whole_result_is_not_counted(chunk_size: int) -> None:
    network, x = model(), batch()
    given = Streamed(network(koila.lazy(x)))
    layout = make_layout(given.facts)
    whole, streamed = make_plan(layout, chunk_size), make_plan(layout, chunk_size, streamed=True)
    assert streamed.streamed and not whole.streamed
    found, measured = given.run(CompiledPlan(streamed))
    torch.testing.assert_close(found, network(x), rtol=1e-12, atol=1e-12)
    assert measured <= project(streamed).peak_bytes
    if chunk_size < BATCH // 2:
        assert project(whole).peak_bytes > BATCH * WIDTH * 8 > project(streamed).peak_bytes


def test_a_budget_below_the_result_is_accepted() -> None:
    network, x = model(), batch()
    given = Streamed(network(koila.lazy(x)))
    allowed = BATCH * WIDTH * 8 // 4
    with pytest.raises(BudgetError, match="at the smallest"):
        Search(given.facts, ALL).run(allowed)
    plan, projection = Search(given.facts, ALL, streamed=True).run(allowed)
    assert plan.streamed and projection.peak_bytes <= allowed
    found, measured = given.run(CompiledPlan(plan))
    torch.testing.assert_close(found, network(x), rtol=1e-12, atol=1e-12)
    assert measured <= projection.peak_bytes
    assert sum(size for _, size in projection.kinds) == projection.peak_bytes


def test_a_value_that_is_not_cut_is_counted_as_before() -> None:
    """A mean over the batch comes in one piece."""
    value = model()(koila.lazy(batch())).mean(0)
    given = Streamed(value)
    layout = make_layout(given.facts)
    plain, streamed = make_plan(layout, 4), make_plan(layout, 4, streamed=True)
    assert not streamed.streamed and plain == streamed
    assert project(plain) == project(streamed)
