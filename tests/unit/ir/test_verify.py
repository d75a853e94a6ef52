"""The verifier of recorded graphs says what is wrong with an illegal one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import koila
from koila.errors import AnalysisError
from koila.ir.graph import Graph
from koila.ir.node import Node, Storage, Value
from koila.ir.prepass import Inference, Output, prepass_of
from koila.ir.replay import current_context
from koila.ir.source import user_site
from koila.ir.verify import verify

META = prepass_of(torch.zeros(2))


def node(*operands: Value | torch.Tensor, writes: tuple[int, ...] = ()) -> Node:
    inference = Inference(Output(META), (Output(META),), writes=writes)
    made = Node(F.relu, operands, {}, operands, inference, current_context(), user_site())
    made.versions = (None,) * len(operands)
    return made


def result(producer: Node | None, index: int = 0) -> Value:
    value = Value(META, Storage(), producer, index)
    if producer is not None and index < producer.num_outputs:
        producer.set_output(index, value)
    return value


def test_a_recorded_graph_is_legal() -> None:
    verify(koila.graph(koila.lazy(torch.ones(2)) + 1))


def test_an_operand_without_producer_or_data() -> None:
    with pytest.raises(AnalysisError, match="node %0 relu reads a value that has neither a producer nor data") as found:
        verify(Graph((node(result(None)),), ()))
    assert "test_verify.py" in str(found.value)


def test_an_operand_that_comes_later() -> None:
    first = node(torch.zeros(2))
    second = node(result(first))
    with pytest.raises(AnalysisError, match="node %0 relu reads a result of relu, which is not computed before it"):
        verify(Graph((second, first), ()))


def test_a_result_that_the_producer_does_not_have() -> None:
    first = node(torch.zeros(2))
    with pytest.raises(AnalysisError, match="node %1 relu reads result 3 of relu, which has 1"):
        verify(Graph((first, node(result(first, 3))), ()))


def test_a_write_to_an_operand_that_is_not_there() -> None:
    with pytest.raises(AnalysisError, match="writes to an operand that it does not have"):
        verify(Graph((node(torch.zeros(2), writes=(1,)),), ()))


def test_missing_versions() -> None:
    broken = node(torch.zeros(2))
    broken.versions = ()
    with pytest.raises(AnalysisError, match="has 1 operands but 0 versions"):
        verify(Graph((broken,), ()))


def test_missing_random_numbers() -> None:
    out = F.dropout(koila.lazy(torch.ones(4)))
    graph = koila.graph(out)
    graph.nodes[0].draws.clear()
    with pytest.raises(AnalysisError, match="draws 1 random tensors but holds 0"):
        verify(graph)


def test_a_wanted_value_that_nothing_computes() -> None:
    with pytest.raises(AnalysisError, match="a wanted value is not computed by any of its nodes"):
        verify(Graph((), (result(node(torch.zeros(2))),)))
