"""Named shape and batch inference, and the rules that ask for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from koila.analysis.chunk_rule import Call, Operand
from koila.analysis.prepasses import mean, reduce_dims
from koila.analysis.rules import rule_for
from koila.analysis.types import WHOLE, Sliced
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


@pytest.mark.parametrize("dim", [0, 1, -1, (0, 1)])
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_the_batch_moves_with_the_dimensions_before_it(dim: object, keepdim: bool, index: int) -> None:
    sizes = [3, 4, 5]
    shape, batch = reduce_dims(sizes, dim, keepdim, BatchInfo(index, sizes[index]))  # type: ignore[arg-type]
    gone = {place % 3 for place in (dim if isinstance(dim, tuple) else (dim,))}
    assert (batch is None) == (index in gone)
    assert batch is None or shape[batch.index] == sizes[index]


def test_the_rules_of_reductions_ask_them() -> None:
    """What is not a plain reduction, by its shape, is not cut."""
    call = Call(
        torch.ops.aten.mean.dim,
        {"self": Operand((8, 3), torch.float32, Sliced(0)), "dim": [1], "keepdim": False, "dtype": None},
        (Operand((8, 3), torch.float32, WHOLE),),
        8,
    )
    rule = rule_for(torch.ops.aten.mean.dim)
    assert rule is not None and rule(call) is None
    ruling = rule(replace(call, results=(Operand((8,), torch.float32, WHOLE),)))
    assert ruling is not None and ruling.result == Sliced(0)


def test_without_a_batch_there_is_none() -> None:
    assert reduce_dims((4, 5), 1) == ((4,), None)
