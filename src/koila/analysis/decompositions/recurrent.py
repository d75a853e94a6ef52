"""Recurrent layers in a trace: one operator for each layer and direction instead of a few for every position.

*Takes* a call of `torch.gru` or its like. *Gives* the same by `koila::recurrent_layer`, where PyTorch would compute
cell by cell and the cells are known: on a CPU, in single or double precision, with biases, without projections. The
gradient of a gradient goes through PyTorch's own cells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from koila._torch import is_any_autocast_enabled
from koila._torch.transforms import active_transform
from koila.ir.recurrent import KINDS, recurrent_layer, recurrent_layer_backward, run_layer

NAMES: dict[Any, str] = {getattr(torch, name): name for name in KINDS}
"""The functions that are replaced."""
NUM_WEIGHTS = 4
"""Of a layer in one direction with biases and without projections."""


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        *operands, kind, reverse = given
        ctx.save_for_backward(*operands)
        ctx.how = kind, reverse
        return recurrent_layer(*operands, kind, reverse)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        operands = ctx.saved_tensors
        if torch.is_grad_enabled():  # Somebody will differentiate what comes out.
            found: Sequence[Any] = _differentiable(operands, ctx.how, gradients)
        else:
            found = recurrent_layer_backward(*gradients, *operands, *ctx.how)
        return (*found, None, None)


def _differentiable(operands: Sequence[Tensor], how: tuple[str, bool], gradients: Sequence[Tensor]) -> Sequence[Any]:
    """Gradients by PyTorch's cells, which can be differentiated again."""
    copies = [each if each.requires_grad else each.detach().requires_grad_() for each in operands]
    copies = [each.view_as(each) for each in copies]
    return torch.autograd.grad(run_layer(*copies, *how), copies, gradients, create_graph=True)  # type: ignore[call-arg, arg-type]


def is_one_operator(layer: Any, args: Sequence[Any]) -> bool:
    """Whether a call is replaced: PyTorch would compute it cell by cell on a CPU, and its cells are the plain ones."""
    if layer not in NAMES:
        return False
    is_packed = not isinstance(args[3], bool)  # (data, batch_sizes, hx, params, …) and not (input, hx, params, …).
    if is_packed or not args[3] or is_any_autocast_enabled() or active_transform() is not None:
        return False
    weights, num_layers, bidirectional = args[2], args[4], args[7]
    dtypes = (torch.float64,) if layer is torch.lstm else (torch.float32, torch.float64)  # oneDNN has the others.
    is_plain = args[0].device.type == "cpu" and args[0].dtype in dtypes
    return is_plain and len(weights) == NUM_WEIGHTS * num_layers * (1 + bidirectional)


def layer_by_layer(layer: Any, *args: Any, run: Callable[..., Any] = _Layer.apply) -> Any:
    """A call of a recurrent network as a program of layers; what is dropped out between them is drawn as eager does.

    Args:
        layer: The function that is called.
        args: Its arguments.
        run: What runs one layer in one direction, as `run_layer` does.
    """
    value, hidden, weights, _, num_layers, dropout, train, bidirectional, batch_first = args
    kind = NAMES[layer]
    states = torch.cat(tuple(hidden), -1) if kind == "lstm" else hidden
    value = value.transpose(0, 1) if batch_first else value
    num_directions, last = 1 + bidirectional, []
    for number in range(num_layers):
        outputs = []
        for place in range(number * num_directions, (number + 1) * num_directions):
            given = weights[NUM_WEIGHTS * place : NUM_WEIGHTS * (place + 1)]
            output, state = run(value, states[place], *given, kind, bool(place % num_directions))
            outputs.append(output)
            last.append(state)
        value = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout and train and number < num_layers - 1:
            value = torch.dropout(value, dropout, train)
    value = value.transpose(0, 1) if batch_first else value
    return (value, *_stacked(last, kind))


def _stacked(states: Sequence[Tensor], kind: str) -> list[Tensor]:
    """The last states of all layers: for an LSTM those of the outputs, and then those of the cells."""
    parts = zip(*(state.chunk(2, -1) for state in states), strict=True) if kind == "lstm" else [states]
    return [torch.stack(list(part)) for part in parts]
