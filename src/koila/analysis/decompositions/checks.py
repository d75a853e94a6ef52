"""Checks of data: what eager refuses because of a value must be refused by the traced program, too.

*Takes* functions that look at data before they compute, and that on fake tensors do not. *Gives* the same function by
operators whose kernels check. A call that checks and has no result would be dropped from a traced graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from koila._torch import OpOverload, schema_of
from koila.errors import AnalysisError


def one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """By a scatter, as eager's, which refuses a class that is not there; on fake tensors PyTorch only compares."""
    return tensor.new_zeros((*tensor.shape, num_classes)).scatter(-1, tensor.unsqueeze(-1), 1)


_CHECKED = {torch.nn.functional.one_hot: one_hot}


class CheckedFunctions(TorchFunctionMode):
    """While a program is traced: functions that would not check fake tensors are replaced."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _CHECKED.get(func, func)(*args, **(kwargs or {}))


def check_in_kernel(node: fx.Node) -> None:
    """`linalg.cholesky` and its like check afterwards, in a call without results; the kernel can do it itself."""
    info = node.args[0]
    kernel = info.args[0] if isinstance(info, fx.Node) else None
    target = kernel.target if isinstance(kernel, fx.Node) else None
    if not isinstance(target, OpOverload) or all(a.name != "check_errors" for a in schema_of(target).arguments):
        raise AnalysisError(f"the traced graph checks a value for errors that {target} does not check itself")
    assert isinstance(kernel, fx.Node)
    kernel.kwargs = {**kernel.kwargs, "check_errors": True}
