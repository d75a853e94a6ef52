"""Recurrent layers: the gates of all steps, and what the backward needs.

oneDNN's have weights in its own layout; measured with AVX2, `_reserve` is what other processors may need beside. Those
of `koila.ir.recurrent` are made of PyTorch's plain operators, which are counted.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from koila.ir.recurrent import LAYER, LAYER_BACKWARD
from koila.planning.workspace.copies import copy_bytes
from koila.planning.workspace.kernel_call import Formula, KernelCall, num_bytes
from koila.planning.workspace.processor import Isa

aten = torch.ops.aten


def _weights(call: KernelCall) -> int:
    return sum(num_bytes(value) for name, value in call.arguments.items() if name.startswith("weight"))


def _gates(call: KernelCall) -> int:
    """Bytes of the gates of all steps, and of the states beside them."""
    steps = prod(call["input"].shape[:2])
    return int(1.035 * steps * 4 * call["hidden_size"] * call["input"].element_size())


def _reserve(call: KernelCall) -> int:
    """Beside what is measured with AVX2: below it, weights once more; above it, by reading, in blocks of 32 as well."""
    isa = call.processor.isa
    if isa is Isa.AVX2:
        return 0
    return _weights(call) + (call.num_threads * (64 << 10) + _gates(call) // 4 if isa is Isa.AVX512 else 0)


def _layer(call: KernelCall) -> int:
    return _gates(call) + _weights(call) + (150 << 10) + _saved(call) + _reserve(call)


def _saved(call: KernelCall) -> int:
    """What the layer keeps for its backward, trained or not; fake layers return nothing for it."""
    if num_bytes(call.result[3]):
        return 0
    source, hidden = call["input"], call["hidden_size"]
    length, batch = source.shape[:2]  # `batch_first` is history: the layer is given steps first.
    width = -(-max(source.shape[2], hidden) // 16) * 16 + 16
    return int(4 * batch * (length + 1) * (8 * hidden + 7 * width) + (64 << 10))


def _backward(call: KernelCall) -> int:
    source = call["input"]
    gates = int(1.02 * prod(source.shape[:2]) * 4 * call["hidden_size"] * 4)
    return gates + 2 * _weights(call) + copy_bytes(call["grad_output"]) + (300 << 10) + _reserve(call)


SAVED = {"gru": 8, "lstm": 8, "rnn_relu": 2, "rnn_tanh": 2}
"""Values like the output that autograd keeps for a layer of cells, its output included."""
OBJECT_BYTES = {"gru": 17 << 10, "lstm": 17 << 10, "rnn_relu": 6 << 10, "rnn_tanh": 6 << 10}
"""Bytes of autograd's own objects for each step."""


def _steps(call: KernelCall) -> tuple[int, int, int]:
    """Bytes of the outputs of all steps, of their gates, and of an input that is turned round."""
    source, hidden = call["input"], call["w_hh"].shape[1]
    outputs = prod(source.shape[:2]) * hidden * source.element_size()
    return outputs, outputs * call["w_hh"].shape[0] // hidden, num_bytes(source) if call["reverse"] else 0


def _cells(call: KernelCall) -> int:
    outputs, gates, turned = _steps(call)
    return outputs + gates + turned + 512 * call["input"].shape[0]


def _cells_backward(call: KernelCall) -> int:
    """At the peak the gradients of all gates are put together, or those of the recurrent weight added up, beside a
    gradient that was turned round; the results come at the end."""
    outputs, gates, turned = _steps(call)
    results, weight = sum(map(num_bytes, call.result)), num_bytes(call["w_hh"])
    objects = OBJECT_BYTES[call["kind"]] * call["input"].shape[0] + (64 << 10)
    adding = 3 * weight + (outputs if call["reverse"] else 0)
    peak = max(gates + weight, adding, results) - results
    return max(0, SAVED[call["kind"]] * outputs + turned + peak) + objects


ROWS: dict[Any, Formula] = {
    LAYER: _cells,
    LAYER_BACKWARD: _cells_backward,
    aten.mkldnn_rnn_layer.default: _layer,
    aten.mkldnn_rnn_layer_backward.default: _backward,
}

RETAINED: dict[Any, Formula] = {aten.mkldnn_rnn_layer.default: _saved}
"""What of it stays alive with the result."""
