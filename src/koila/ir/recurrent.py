"""Recurrent layers as one operator: PyTorch makes most of them of a few operators for every position.

*Takes* a layer in one direction, positions first. *Gives* `koila::recurrent_layer` and its backward, for traced
programs. A program of cells is as long as its data: at every new length it would be traced and planned anew, and a
length of fifty makes thousands of operators. Both operators call PyTorch's own layer, so their numbers are eager's.

Not optimal: nothing is kept between the two, so that the backward runs the layer again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from koila._torch import ordinary_dispatch

aten = torch.ops.aten

KINDS: dict[str, Callable[..., Any]] = {
    "gru": aten.gru.input,
    "lstm": aten.lstm.input,
    "rnn_relu": aten.rnn_relu.input,
    "rnn_tanh": aten.rnn_tanh.input,
}
"""PyTorch's layers, under the names of their functions."""


def run_layer(
    input: Tensor, state: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, kind: str, reverse: bool
) -> tuple[Tensor, Tensor]:
    """One layer in one direction by PyTorch's own functions.

    Args:
        input: The values of all positions, which come first.
        state: The first hidden state; for an LSTM the state of the cells beside it, in the last dimension.
        w_ih: The weight of the input, and so on as `torch.nn.GRU` has them.
        kind: Which layer: one of `KINDS`.
        reverse: Whether it begins with the last position.

    Returns:
        The outputs of all positions, and the last state.
    """
    first: Any = state.unsqueeze(0)
    hidden = first.chunk(2, -1) if kind == "lstm" else first
    steps = input.flip(0) if reverse else input
    output, *last = KINDS[kind](steps, hidden, [w_ih, w_hh, b_ih, b_hh], True, 1, 0.0, False, False, False)
    return output.flip(0) if reverse else output, torch.cat(last, -1).squeeze(0)


@torch.library.custom_op("koila::recurrent_layer", mutates_args=())
def recurrent_layer(
    input: Tensor, state: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, kind: str, reverse: bool
) -> tuple[Tensor, Tensor]:
    """The layer without gradients."""
    with torch.no_grad():
        return run_layer(input, state, w_ih, w_hh, b_ih, b_hh, kind, reverse)


@torch.library.custom_op("koila::recurrent_layer_backward", mutates_args=())
def recurrent_layer_backward(
    grad_output: Tensor,
    grad_state: Tensor,
    input: Tensor,
    state: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor,
    b_hh: Tensor,
    kind: str,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of all operands of a layer, which is run again for them."""
    with ordinary_dispatch(), torch.enable_grad():
        operands = [each.detach().requires_grad_() for each in (input, state, w_ih, w_hh, b_ih, b_hh)]
        results = run_layer(*operands, kind, reverse)  # type: ignore[call-arg, arg-type]
        found = torch.autograd.grad(results, operands, (grad_output, grad_state))
    a, b, c, d, e, f = [each.contiguous() for each in found]
    return a, b, c, d, e, f


@recurrent_layer.register_fake
def _(
    input: Tensor, state: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, kind: str, reverse: bool
) -> tuple[Tensor, Tensor]:
    return input.new_empty((*input.shape[:2], w_hh.shape[1])), state.new_empty(state.shape)


@recurrent_layer_backward.register_fake
def _(grad_output: Tensor, grad_state: Tensor, *given: Any) -> tuple[Tensor, ...]:
    return tuple([each.new_empty(each.shape) for each in given[:6]])


LAYER = torch.ops.koila.recurrent_layer.default
LAYER_BACKWARD = torch.ops.koila.recurrent_layer_backward.default
"""What stands in traced graphs."""
