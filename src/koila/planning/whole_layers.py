"""Recurrent layers in an unsplit run: what PyTorch keeps for their cells, without running the cells.

*Takes* calls of `torch.gru` and its like on fake tensors. *Gives* the same results by one operator for each layer, and
beside them tensors as large as what autograd keeps for all cells until the backward: an unsplit run has thousands of
cells, and at each length others. It is a bound, by the table of workspaces.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from koila.analysis.decompositions.recurrent import is_one_operator, layer_by_layer
from koila.ir.recurrent import recurrent_layer, recurrent_layer_backward
from koila.planning.workspace.recurrent import OBJECT_BYTES, SAVED


class _Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        *operands, kind, reverse = given
        ctx.save_for_backward(*operands)
        output, state = recurrent_layer(*operands, kind, reverse)
        ctx.how = kind, reverse
        if any(ctx.needs_input_grad):
            objects = output.new_empty((output.shape[0], OBJECT_BYTES[kind]), dtype=torch.uint8)
            ctx.kept = output.new_empty((SAVED[kind] - 1, *output.shape)), objects
        return output, state

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        del ctx.kept  # The operator counts it from here on.
        return (*recurrent_layer_backward(*gradients, *ctx.saved_tensors, *ctx.how), None, None)


class WholeLayers(TorchFunctionMode):
    """While the bytes of an unsplit run are projected: recurrent layers of cells are one operator each."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs or len(args) < 9 or not is_one_operator(func, args):
            return func(*args, **(kwargs or {}))
        return layer_by_layer(func, *args, run=_Kept.apply if torch.is_grad_enabled() else recurrent_layer)
