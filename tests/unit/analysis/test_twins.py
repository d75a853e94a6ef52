"""Results of one call that are always equal are one node, whichever of them a trace happens to read."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import koila
from koila.analysis import program
from koila.analysis.twins import TWINS, join_twins
from koila.ir.cache import clear_all
from koila.reporting import metrics

aten = torch.ops.aten
LAYER = aten.mkldnn_rnn_layer_backward.default


def joined(*places: int) -> list[tuple[int, int]]:
    """The results of the layer's backward that are read, and by how many, if these are read at first."""
    graph = fx.Graph()
    source = graph.call_function(LAYER, (graph.placeholder("x"),))
    graph.output(tuple([graph.call_function(operator.getitem, (source, place)) for place in places]))
    join_twins(graph)
    return [(node.args[1], len(node.users)) for node in graph.nodes if node.target is operator.getitem]  # type: ignore[misc]


def test_the_first_of_two_that_are_the_same_is_read() -> None:
    assert joined(2, 3, 4, 5) == [(2, 1), (3, 1), (3, 0), (5, 1)]


def test_one_that_is_read_alone_stands_for_the_first() -> None:
    assert joined(2, 4) == [(2, 1), (3, 1)]


def test_the_kernel_returns_the_same_numbers_twice() -> None:
    assert list(TWINS) == [LAYER]
    x, weights = torch.randn(4, 3, 6), [torch.randn(20, 6), torch.randn(20, 5), torch.randn(20), torch.randn(20)]
    state = torch.zeros(3, 5), torch.zeros(3, 5)
    options = (
        False,
        [],
        2,
        5,
        1,
        True,
        False,
        False,
    )  # Backwards, sizes, mode, width, layers, biases, two ways, order.
    output, hidden, cell, workspace = aten.mkldnn_rnn_layer(x, *weights, *state, *options, True)
    found = LAYER(
        x, *weights, *state, output, hidden, cell, torch.ones_like(output), None, None,
        False, 2, 5, 1, True, True, False, [], False, workspace,
    )  # fmt: skip
    assert all(torch.equal(found[one], found[other]) for other, one in TWINS[LAYER].items())


def num_nodes(monkeypatch: pytest.MonkeyPatch, lstm: nn.LSTM, length: int) -> int:
    """How many nodes the trace of a layer that is used twice has."""
    clear_all()
    found: list[int] = []
    made = program._found

    def watched(*given: Any) -> Any:
        joint = made(*given)
        found.append(len(joint.module.graph.nodes))
        return joint

    x = koila.lazy(torch.randn(length, 7, 6), batch=1)
    with monkeypatch.context() as patched, koila.budget(chunk_size=3):
        patched.setattr(program, "_found", watched)
        (lstm(x)[0][-1].square().mean() + lstm(x.flip(0))[0][-1].square().mean()).backward()
    (number,) = found
    return number


@pytest.mark.parametrize("num_layers", [1, 2])
def test_traces_do_not_depend_on_what_fake_tensors_remember(num_layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lstm = nn.LSTM(6, 5, num_layers)
    FakeTensorMode.cache_clear()
    assert len({num_nodes(monkeypatch, lstm, 9) for _ in range(3)}) == 1
    assert lstm.bias_ih_l0.grad.data_ptr() != lstm.bias_hh_l0.grad.data_ptr()  # type: ignore[union-attr]


def test_recurrent_layers_are_derived_at_new_lengths() -> None:
    torch.manual_seed(0)
    lstm, head = nn.LSTM(6, 5), nn.Linear(5, 2)
    parameters = [*lstm.parameters(), *head.parameters()]

    def gradients(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loss = head(torch.cat([lstm(x)[0][-1], lstm(x.flip(0))[0][-1]])).square().mean()
        return torch.autograd.grad(loss, parameters)

    metrics.reset()
    for length in (9, 12, 14, 17, 19, 22):
        x = torch.randn(length, 7, 6)
        with koila.budget(chunk_size=3):
            found = [gradient + 0 for gradient in gradients(koila.lazy(x, batch=1))]
            for own, expected in zip(found, gradients(x), strict=True):
                assert torch.linalg.norm(own - expected) <= 1e-5 * torch.linalg.norm(expected)
    assert metrics.counter_value("sizes::no family: the traces differ in length") == 0
