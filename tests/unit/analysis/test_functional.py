"""Writes in a traced graph become values without a second trace, where nobody sees them through another view."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from koila._torch import FakeTensorMode, make_fx
from koila.analysis.functional import is_mutable, without_writes


def traced(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> tuple[fx.GraphModule, FakeTensorMode]:
    mode = FakeTensorMode()
    with mode:
        fakes = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in inputs]
        return make_fx(function, {})(*fakes), mode


def added(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    total = x * 2
    total.add_(y)
    return total.mul_(3) + total


def pieces(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """As a GRU cell does it: each piece is written to, and none of them overlap."""
    one, two = torch.unsafe_chunk(x * 2, 2, 1)
    one.sigmoid_()
    two.add_(one)
    return two * one + y[:, :2]


def seen_through_a_view(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    base = x * 2
    view = base[:, 1:3]
    base.add_(y)
    return view.sum() + base.sum()


@pytest.mark.parametrize("function", [added, pieces])
def test_a_write_becomes_a_value(function: Callable[..., torch.Tensor]) -> None:
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    module, mode = traced(function, x, y)
    assert any(map(is_mutable, module.graph.nodes))
    assert without_writes(module, mode, {})
    assert not any(map(is_mutable, module.graph.nodes))
    expected = function(x.clone(), y.clone())
    module.recompile()
    assert torch.equal(module(x, y), expected)
    output = module.graph.output_node().args[0]
    assert isinstance(output, fx.Node) and output.meta["val"].stride() == expected.stride()


def test_what_is_seen_through_a_view_is_left_to_a_new_trace() -> None:
    module, mode = traced(seen_through_a_view, torch.randn(3, 4), torch.randn(3, 4))
    before = str(module.graph)
    assert not without_writes(module, mode, {})
    assert str(module.graph) == before


def test_an_operator_with_a_decomposition_is_left_to_a_new_trace() -> None:
    module, mode = traced(added, torch.randn(3, 4), torch.randn(3, 4))
    assert not without_writes(module, mode, {torch.ops.aten.mul.Tensor: None})
