"""A traced program is checked before it is kept: it was traced on fake tensors, and depends on its inputs."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import fx

import koila
from koila.analysis import trace as module
from koila.errors import AnalysisError
from koila.ir.graph import collect
from koila.ir.job import Demand


def test_tensors_that_are_not_fake_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As inside `torch.tensor([lazy])`, if nothing put the key back under which modes see operators."""
    graph = collect([koila.lazy(torch.ones(4, 3)).mean().data_value()], [])
    monkeypatch.setattr(module, "ordinary_dispatch", nullcontext)
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.Python)
    with torch._C._ExcludeDispatchKeyGuard(key), pytest.raises(AnalysisError, match="tensors that are not fake"):
        module.trace(graph, Demand())


def test_a_graph_of_constants_is_refused() -> None:
    graph = fx.Graph()
    graph.placeholder("x")
    graph.output((graph.get_attr("constant"),))
    traced = fx.GraphModule({"constant": torch.ones(2)}, graph)
    with pytest.raises(AnalysisError, match="no result of the traced graph depends on the program's inputs"):
        module._check_inputs(traced, [])


def test_a_constant_beside_a_result_is_fine() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.get_attr("constant"), graph.call_function(torch.neg, (x,))))
    traced = fx.GraphModule({"constant": torch.ones(2)}, graph)
    module._check_inputs(traced, [])
    assert len(traced.graph.output_node().all_input_nodes) == 2


def test_a_graph_is_not_taken_apart_when_python_ends() -> None:
    """What would take it apart may be gone by then."""
    graph = fx.Graph()
    graph.placeholder("x")
    traced = module.Traced(graph, {})
    traced.__del__(lambda: True)
    assert len(graph.nodes) == 1
    del traced
    assert len(graph.nodes) == 0
