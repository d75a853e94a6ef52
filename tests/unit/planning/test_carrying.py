"""Carrying over: a plan that is made again at the size that it was made for is as fast as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import koila
from koila.analysis.program import program_of
from koila.ir.job import Demand, Wanted
from koila.planning.carrying import Carrying
from koila.planning.search import ALL, Search
from koila.planning.sizing import expected_seconds


@pytest.fixture(scope="module")
def search() -> Search:
    """A net of batch norms of which the heap's pages take much of the time: plans of fewer bytes are faster."""
    torch.manual_seed(0)
    layers = [
        layer for _ in range(4) for layer in (nn.Conv2d(32, 32, 3, padding=1, groups=32), nn.BatchNorm2d(32), nn.ReLU())
    ]
    model = nn.Sequential(nn.Conv2d(3, 32, 1), *layers)
    graph = koila.graph(model(koila.lazy(torch.randn(32, 3, 64, 64))).square().mean())
    demand = Demand((0,), tuple(number for number, leaf in enumerate(graph.leaves) if leaf.requires_grad))
    return Search(program_of(graph, demand).facts(Wanted((0,), gradients=True)), ALL)


@pytest.mark.parametrize("share", [2.0, 1.0, 0.6, 0.4])
def test_a_plan_that_is_carried_over_to_its_own_size_is_as_fast(search: Search, share: float) -> None:
    allowed = int(share * search.plain(0, search.sizes[0])[1].peak_bytes)
    found = search.find(allowed)
    assert found is not None
    carrying = Carrying(search)
    again = carrying.like(carrying.recipe(found), allowed)
    assert again is not None
    assert again[1].peak_bytes <= allowed
    assert expected_seconds(again) <= 1.02 * expected_seconds(found)
