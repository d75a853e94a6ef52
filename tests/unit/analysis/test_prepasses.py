"""Named shape and batch inference over the rule tables."""

from __future__ import annotations

import pytest
import torch

import koila
from koila.analysis.prepasses import apply_symbolic_shapes, mean, reduce_dims
from koila.analysis.split import analyse
from koila.analysis.trace import trace
from koila.ir.job import Demand
from koila.interfaces import BatchInfo


@pytest.mark.parametrize("dim", [None, 0, 1, -1, (0, 2), (1, 2)])
@pytest.mark.parametrize("keepdim", [False, True])
def test_reductions_have_the_shape_that_torch_gives(dim: object, keepdim: bool) -> None:
    expected = torch.zeros(4, 4, 5).sum(dim=dim, keepdim=keepdim).shape  # type: ignore[call-overload]
    for function in (reduce_dims, mean):
        shape, batch = function((4, 4, 5), dim, keepdim, BatchInfo(0, 4))  # type: ignore[arg-type]
        assert shape == tuple(expected)
        reduced = dim is None or 0 in (dim if isinstance(dim, tuple) else (dim,))
        assert batch == (None if reduced else BatchInfo(0, 4))


def test_without_a_batch_there_is_none() -> None:
    assert reduce_dims((4, 5), 1) == ((4,), None)


def test_symbolic_shapes_follow_the_batch_and_not_its_size() -> None:
    x = koila.lazy(torch.zeros(4, 4))
    graph = koila.graph((x.t().reshape(16) + 1) * torch.ones(16))
    joint = trace(graph, Demand())
    shapes = apply_symbolic_shapes(analyse(joint, graph.batches, 4))
    assert ("B", 4) in shapes.values()
    assert (4, "B") in shapes.values()
    assert ("4*B",) in shapes.values()
    assert (16,) in shapes.values()
