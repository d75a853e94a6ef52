"""Chunk sizes compete by the time of what levers make of them, whichever of them fits first."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import koila
from koila.analysis.program import program_of
from koila.ir.job import Demand, Wanted
from koila.planning.search import ALL, Search, fit
from koila.planning.sizing import expected_seconds

NUM_SAMPLES = 16


@pytest.fixture(scope="module")
def search() -> Search:
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(32, 2, 64, 0.0, F.gelu, batch_first=True) for _ in range(4)]
    model, x = nn.Sequential(*layers), torch.randn(NUM_SAMPLES, 48, 32)
    graph = koila.graph(model(koila.lazy(x)).pow(2).mean())
    demand = Demand((0,), tuple(n for n, leaf in enumerate(graph.leaves) if leaf.requires_grad))
    return Search(program_of(graph, demand).facts(Wanted((0,), gradients=True)), ALL)


@pytest.mark.parametrize("share", [0.95, 0.85, 0.75, 0.65])
@pytest.mark.parametrize("size", [4, 2])
def test_no_size_with_levers_is_faster(search: Search, size: int, share: float) -> None:
    allowed = int(share * search.plain(0, size)[1].peak_bytes)
    found, other = search.find(allowed), fit(search.plain(0, size)[0], allowed)
    assert found is not None and found[1].peak_bytes <= allowed
    assert other is None or expected_seconds(found) <= expected_seconds(other)


def test_chunks_have_at_least_so_many_samples(search: Search) -> None:
    asked = Search(search.facts, ALL, smallest_chunk=4)
    assert asked.sizes == [16, 8, 4] and search.sizes[-1] == 1
    found = asked.find(search.plain(0, 2)[1].peak_bytes)
    assert found is None or found[0].chunk_size >= 4
