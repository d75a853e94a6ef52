"""Functions that are traced in another form than they are called: checks of data, and recurrent layers.

*Takes* functions that look at data before they compute, and that on fake tensors do not. *Gives* the same function by
operators whose kernels check: what eager refuses because of a value must be refused by the traced program, too. A call
that checks and has no result would be dropped from a traced graph.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from koila._torch import OpOverload, is_any_autocast_enabled, schema_of
from koila._torch.switches import without_cudnn
from koila.analysis.decompositions.recurrent import NAMES, is_one_operator, layer_by_layer
from koila.errors import AnalysisError


def one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """By a scatter, as eager's, which refuses a class that is not there; on fake tensors PyTorch only compares."""
    return tensor.new_zeros((*tensor.shape, num_classes)).scatter(-1, tensor.unsqueeze(-1), 1)


def cell_by_cell(layer: Any, *args: Any) -> Any:
    """A recurrent layer as a program of cells: cuDNN's is one call for all samples, which no rule can cut.

    What cuDNN drops out, and what it casts under autocast, cells would not repeat: such a layer stays whole.
    """
    of_packed = not isinstance(args[3], bool)  # (data, batch_sizes, hx, params, …) and not (input, hx, params, …).
    dropout, train = args[6:8] if of_packed else args[5:7]
    if (dropout and train) or is_any_autocast_enabled():
        return layer(*args)
    return without_cudnn(lambda: layer(*args))


def recurrent(layer: Any, *args: Any) -> Any:
    """A recurrent layer as operators that can be cut: one for all positions, where that is known, or cells."""
    return (layer_by_layer if is_one_operator(layer, args) else cell_by_cell)(layer, *args)


_TRACED_AS: dict[Any, Any] = {
    torch.nn.functional.one_hot: one_hot,
    **{layer: partial(recurrent, layer) for layer in NAMES},
}


class TracedFunctions(TorchFunctionMode):
    """While a program is traced: functions that would not check fake tensors, or not be cut, are replaced."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _TRACED_AS.get(func, func)(*args, **(kwargs or {}))


def check_in_kernel(node: fx.Node) -> None:
    """`linalg.cholesky` and its like check afterwards, in a call without results; the kernel can do it itself."""
    info = node.args[0]
    kernel = info.args[0] if isinstance(info, fx.Node) else None
    target = kernel.target if isinstance(kernel, fx.Node) else None
    if not isinstance(target, OpOverload) or all(a.name != "check_errors" for a in schema_of(target).arguments):
        raise AnalysisError(f"the traced graph checks a value for errors that {target} does not check itself")
    assert isinstance(kernel, fx.Node)
    kernel.kwargs = {**kernel.kwargs, "check_errors": True}
