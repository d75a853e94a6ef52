"""oneDNN's recurrent layers: the gates of all steps, weights in its own layout, and what the backward needs.

Measured with AVX2; `_reserve` is what other processors may need beside.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

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


ROWS: dict[Any, Formula] = {
    aten.mkldnn_rnn_layer.default: _layer,
    aten.mkldnn_rnn_layer_backward.default: _backward,
}

RETAINED: dict[Any, Formula] = {aten.mkldnn_rnn_layer.default: _saved}
"""What of it stays alive with the result."""
