"""What koila uses of `torch.distributed` although it is not public API, and how it knows a collective.

Takes: a function of PyTorch. Gives: whether other processes take part in its call; the names of DDP's own functions
that koila replaces.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree

_PACKAGE = "torch.distributed"
_NAMESPACES = frozenset({
    "c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "symm_mem",
})  # fmt: skip
"""Operators behind `torch.distributed` and its functional collectives. Look at: torch/distributed, `Library(`."""

FIND_TENSORS = "_find_tensors"
"""The function by which DDP finds its outputs' history, replaced. Look at: torch/nn/parallel/distributed.py."""
POST_FORWARD = "_post_forward"
"""The method in which DDP looks at its outputs, replaced. Look at: torch/nn/parallel/distributed.py."""
BROADCAST_COALESCED = "_broadcast_coalesced"
"""What sends a module's buffers and parameters to all ranks: DDP before a forward pass and when it is made, `join` at
its end. Look at: torch/nn/parallel/distributed.py and torch/distributed/utils.py."""
GROUP_METHODS = (
    "allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "_allgather_base", "all_gather_single",
    "all_gather_single_coalesced", "allgather_coalesced", "allgather_into_tensor_coalesced", "gather", "scatter",
    "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced", "all_to_all_single", "alltoall_base", "alltoall", "send", "recv",
    "recv_anysource",
)  # fmt: skip
"""Methods of a process group through which every collective of Python's side goes, whatever name it was imported
under; replaced. Look at: torch/csrc/distributed/c10d/init.cpp, and how torch/distributed/distributed_c10d.py calls."""

tree_flatten = torch.utils._pytree.tree_flatten
"""The structure of a module's outputs as DDP sees it, users' registered classes included. Look at: torch/utils."""
tree_unflatten = torch.utils._pytree.tree_unflatten
"""Its reverse. Look at: torch/utils/_pytree.py."""


def is_collective(func: Any) -> bool:
    """Whether other processes take part in a call: it happens at its place in the program, once, or they wait for ever.

    >>> is_collective(torch.add)
    False
    """
    if isinstance(func, torch._ops.OpOverload):
        return func.namespace in _NAMESPACES
    if isinstance(func, torch._ops.OpOverloadPacket):
        return func._qualified_op_name.partition("::")[0] in _NAMESPACES
    return f"{getattr(func, '__module__', None)}.".startswith(f"{_PACKAGE}.")


def finished(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor of a result that a functional collective is still making, with its history.

    Look at: torch/distributed/_functional_collectives.py, which waits at this place, too, while it is traced.
    """
    if type(tensor).__name__ == "AsyncCollectiveTensor":
        return torch.ops._c10d_functional.wait_tensor(tensor)
    return tensor
