"""oneDNN's recurrent layers: the gates of all steps, weights in its own layout, and what the backward needs."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from koila.planning.workspace.copies import copy_bytes
from koila.planning.workspace.kernel_call import Formula, KernelCall, num_bytes

aten = torch.ops.aten


def _weights(call: KernelCall) -> int:
    return sum(num_bytes(call[name]) for name in ("weight0", "weight1", "weight2", "weight3"))


def _gates(call: KernelCall) -> int:
    """Bytes of the gates of all steps, and of the states beside them."""
    steps = prod(call["input"].shape[:2])
    return int(1.035 * steps * 4 * call["hidden_size"] * call["input"].element_size())


def _layer(call: KernelCall) -> int:
    return _gates(call) + _weights(call) + (150 << 10) + _saved(call)


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
    weights = sum(num_bytes(call[f"weight{number}"]) for number in range(1, 5))
    gates = int(1.02 * prod(source.shape[:2]) * 4 * call["hidden_size"] * 4)
    return gates + 2 * weights + copy_bytes(call["grad_output"]) + (300 << 10)


ROWS: dict[Any, Formula] = {
    aten.mkldnn_rnn_layer.default: _layer,
    aten.mkldnn_rnn_layer_backward.default: _backward,
}

RETAINED: dict[Any, Formula] = {aten.mkldnn_rnn_layer.default: _saved}
"""What of it stays alive with the result."""
