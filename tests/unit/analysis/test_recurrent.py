"""Recurrent layers and their backward in chunks: of oneDNN, whose workspace belongs to a chunk, and of cells."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import koila
from koila import events
from koila.analysis.chunk_rule import Call, Operand
from koila.analysis.decompositions import checks
from koila.analysis.decompositions.checks import cell_by_cell
from koila.analysis.decompositions.recurrent import is_one_operator, layer_by_layer
from koila.analysis.rules import rule_for
from koila.analysis.types import OPAQUE, WHOLE, Sliced

aten = torch.ops.aten
LAYER = "executed::aten.mkldnn_rnn_layer.default"


class Tagger(nn.Module):
    """A recurrent network; its normalisation over the batch needs the forward before the backward can begin."""

    def __init__(self, norm: bool = False, **options: bool | int | float) -> None:
        super().__init__()
        self.layer = nn.LSTM(6, 8, **options)
        width = 16 if options.get("bidirectional") else 8
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.layer(x)[0].flatten(0, 1)
        return self.head(self.norm(found)).square().mean()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def gradients(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def check(model: nn.Module, x: torch.Tensor, batch: int, size: int) -> int:
    torch.manual_seed(0)
    expected = gradients(model, model(x))
    torch.manual_seed(0)
    before = layers_run()
    with koila.budget(chunk_size=size):
        found = gradients(model, model(koila.lazy(x, batch=batch)))
    for own, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(own, theirs, rtol=2e-5, atol=2e-6)
    return layers_run() - before


def layers_run() -> int:
    return events.counters().get(LAYER, 0)


@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize(
    "options",
    [{}, {"batch_first": True}, {"num_layers": 2}, {"bidirectional": True}, {"bias": False}],
    ids=lambda options: ",".join(options) or "plain",
)
def test_a_layer_in_chunks(options: dict[str, bool | int], size: int) -> None:
    torch.manual_seed(3)
    model = Tagger(**options)
    batch = 0 if options.get("batch_first") else 1
    x = torch.randn((7, 5, 6) if batch == 0 else (5, 7, 6))
    per_chunk = int(options.get("num_layers", 1)) * (2 if options.get("bidirectional") else 1)
    assert check(model, x, batch, size) == per_chunk * -(-7 // size)


@pytest.mark.parametrize("size", [1, 3])
def test_the_workspace_is_made_again_rather_than_kept(size: int) -> None:
    torch.manual_seed(3)
    assert check(Tagger(norm=True), torch.randn(5, 7, 6), 1, size) > -(-7 // size)


def test_states_that_are_given_and_read() -> None:
    torch.manual_seed(3)
    layer = nn.LSTM(6, 8)
    x, h, c = torch.randn(5, 7, 6), torch.randn(1, 7, 8), torch.randn(1, 7, 8)

    def loss(x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        output, (last, cell) = layer(x, (h, c))
        return (output.sum(0) * last[0] + cell[0]).square().mean()

    expected = gradients(layer, loss(x, h, c))
    with koila.budget(chunk_size=2):
        found = gradients(layer, loss(*koila.lazy(x, h, c, batch=1)))
    for own, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(own, theirs, rtol=2e-5, atol=2e-6)


def test_inference() -> None:
    torch.manual_seed(3)
    layer, x = nn.LSTM(6, 8, batch_first=True), torch.randn(7, 5, 6)
    with torch.no_grad(), koila.budget(chunk_size=2):
        torch.testing.assert_close(koila.run(layer(koila.lazy(x))[0]), layer(x)[0])


def backward_call(workspace: Operand) -> Call:
    target = aten.mkldnn_rnn_layer_backward.default
    value = lambda *shape: Operand(shape, torch.float32, WHOLE)  # noqa: E731
    found = {argument.name: None for argument in target._schema.arguments}
    states = {name: value(7, 8) for name in ("hx_", "cx_tmp", "hy_", "cy_")}
    sliced = Operand((5, 7, 8), torch.float32, Sliced(1))
    arguments = {**found, **states, "input": sliced, "output": sliced, "grad_output": sliced, "workspace": workspace}
    results = (value(5, 7, 8), value(32, 8), value(32, 8), value(32), value(32), value(7, 8), value(7, 8))
    return Call(target, {**arguments, "batch_sizes": ()}, results, 7)


def test_a_workspace_of_the_whole_batch_is_of_no_use_to_a_chunk() -> None:
    rule = rule_for(aten.mkldnn_rnn_layer_backward.default)
    assert rule is not None
    assert rule(backward_call(Operand((0,), torch.uint8, WHOLE))) is None
    ruling = rule(backward_call(Operand((0,), torch.uint8, OPAQUE)))
    assert ruling is not None and ruling.operands["workspace"] == OPAQUE


# cuDNN's recurrent layers: there is none on a CPU, so what is looked at is the switch, not its kernels.

LSTM = (None, [], [], True, 2)
PACKED = (None, None, [], [], True, 2)


@pytest.mark.parametrize("form", [(*LSTM, 0.5, True, False, False), (*PACKED, 0.5, True, False)])
def test_a_layer_that_drops_out_stays_what_it_is(form: tuple[Any, ...]) -> None:
    assert cell_by_cell(lambda *_: torch.backends.cudnn.enabled, *form)


@pytest.mark.parametrize("form", [
    (*LSTM, 0.0, True, False, False), (*LSTM, 0.5, False, False, False),
    (*PACKED, 0.0, True, False), (*PACKED, 0.5, False, False),
])  # fmt: skip
def test_a_layer_is_traced_cell_by_cell(form: tuple[Any, ...]) -> None:
    assert torch.backends.cudnn.enabled
    assert not cell_by_cell(lambda *_: torch.backends.cudnn.enabled, *form)
    assert torch.backends.cudnn.enabled


def test_a_layer_under_autocast_stays_what_it_is() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert cell_by_cell(lambda *_: torch.backends.cudnn.enabled, *LSTM, 0.0, True, False, False)


@pytest.mark.parametrize("module", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_the_layers_of_modules_are_those_that_are_replaced(
    module: type[torch.nn.RNNBase], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    for layer in (torch.lstm, torch.gru, torch.rnn_tanh):
        monkeypatch.setitem(checks._TRACED_AS, layer, lambda *args, layer=layer: (seen.append(layer), layer(*args))[1])
    with checks.TracedFunctions():
        module(3, 4)(torch.randn(5, 2, 3))
    assert len(seen) == 1


# Layers that PyTorch computes step by step: one operator for all steps.

CELLS = {"GRU": nn.GRU, "LSTM": nn.LSTM, "RNN": nn.RNN}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "two layers": {"num_layers": 2},
    "both ways": {"num_layers": 2, "bidirectional": True},
    "relu": {"nonlinearity": "relu"},
}


def states(module: nn.RNNBase, batch: int) -> Any:
    """A first state: for an LSTM two of them."""
    shape = (module.num_layers * (1 + module.bidirectional), batch, module.hidden_size)
    first, second = (torch.randn(shape, dtype=torch.float64) for _ in range(2))
    return (first, second) if module.mode == "LSTM" else first


def call_of(module: nn.RNNBase, x: torch.Tensor, state: Any) -> tuple[Any, tuple[Any, ...]]:
    """The function that a module calls, and its arguments."""
    layer = {"LSTM": torch.lstm, "GRU": torch.gru, "RNN_TANH": torch.rnn_tanh, "RNN_RELU": torch.rnn_relu}[module.mode]
    how = (module.bias, module.num_layers, module.dropout, module.training, module.bidirectional, module.batch_first)
    return layer, (x, state, module._flat_weights, *how)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", CELLS)
def test_layer_by_layer_is_the_layer(kind: str, options: str) -> None:
    if options == "relu" and kind != "RNN":
        return
    torch.manual_seed(4)
    module = CELLS[kind](3, 4, **OPTIONS[options], dtype=torch.float64)
    x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    layer, args = call_of(module, x, states(module, 5 if module.batch_first else 2))
    assert is_one_operator(layer, args)
    for own, theirs in zip(layer_by_layer(layer, *args), layer(*args), strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-14, atol=1e-15)
        inputs, seed = [x, *module.parameters()], torch.randn_like(theirs)
        how = {"allow_unused": True, "retain_graph": True}
        found = torch.autograd.grad(own, inputs, seed, **how)
        for gradient, expected in zip(found, torch.autograd.grad(theirs, inputs, seed, **how), strict=True):
            # Where nothing comes to a weight, the operator gives zeros.
            expected = torch.zeros_like(gradient) if expected is None and gradient is not None else expected
            torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", CELLS)
def test_gradients_of_its_gradients(kind: str) -> None:
    torch.manual_seed(4)
    module = CELLS[kind](2, 2, dtype=torch.float64)
    state = states(module, 2)

    def output(x: torch.Tensor) -> torch.Tensor:
        layer, args = call_of(module, x, state)
        return layer_by_layer(layer, *args)[0]  # type: ignore[no-any-return]

    x = torch.randn(3, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(output, (x,))
    assert torch.autograd.gradgradcheck(output, (x,))


def test_layers_of_other_kinds_stay_what_they_are() -> None:
    x = torch.randn(5, 2, 3)
    for module, given in (
        (nn.GRU(3, 4, bias=False), x),
        (nn.LSTM(3, 4), x),  # oneDNN's.
        (nn.LSTM(3, 4, proj_size=2, dtype=torch.float64), x.double()),
        (nn.GRU(3, 4, dtype=torch.bfloat16), x.bfloat16()),
    ):
        assert not is_one_operator(*call_of(module, given, None))
    layer, args = call_of(nn.GRU(3, 4), x, None)
    assert is_one_operator(layer, args)
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_one_operator(layer, args)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("options", ["batch first", "both ways"])
@pytest.mark.parametrize("kind", CELLS)
def test_a_layer_of_cells_in_chunks(kind: str, options: str, size: int) -> None:
    torch.manual_seed(3)
    module = CELLS[kind](3, 4, **OPTIONS[options], dtype=torch.float64)
    batch = 0 if module.batch_first else 1
    x = torch.randn((7, 5, 3) if batch == 0 else (5, 7, 3), dtype=torch.float64)
    expected = gradients(module, module(x)[0].square().mean())
    before = events.counters().get("executed::koila.recurrent_layer_backward.default", 0)
    with koila.budget(chunk_size=size):
        found = gradients(module, module(koila.lazy(x, batch=batch))[0].square().mean())
    for own, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-10, atol=1e-14)
    num_layers = module.num_layers * (1 + module.bidirectional)
    ran = events.counters()["executed::koila.recurrent_layer_backward.default"] - before
    assert ran == num_layers * -(-7 // size)
