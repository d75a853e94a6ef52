"""Functional transforms and forward-mode AD: whether one is active, and how to compute outside of it.

Takes: PyTorch's state. Gives: the questions that recording asks, and the entry points of transforms that tensors go
through. Inside of a transform tensors are not what they seem, and forward-mode AD knows only what runs while its level
is open: nothing is recorded there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch
import torch._functorch.eager_transforms
import torch._functorch.pyfunctorch
import torch._functorch.vmap
import torch.jit._trace
from torch.autograd import forward_ad

transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active

TRANSFORM_ENTRIES: tuple[tuple[ModuleType, str], ...] = (
    (torch._functorch.eager_transforms, "_wrap_for_grad"),
    (torch._functorch.vmap, "_add_batch_dim"),
    (torch._C, "_create_function_from_trace"),
    (torch.jit._trace, "make_tuple"),
)
"""The functions through which `torch.func` takes a tensor into a transform, and `torch.jit.trace` its examples. They do
not ask `__torch_function__`. Look at: torch/_functorch/eager_transforms.py and vmap.py, torch/jit/_trace.py, which call
them by these names."""
ADD_BATCH_DIM: Callable[..., Any] = torch._add_batch_dim
"""The same for `is_grads_batched=True`, which asks `__torch_function__`. Look at: torch/_vmap_internals.py."""

GRADCHECK = ("torch.autograd.gradcheck", "_gradcheck_helper")
"""What `gradcheck` and `gradgradcheck` call, given by keywords. Look at: torch/autograd/gradcheck.py."""


def active_transform() -> str | None:
    """The transform that the calling thread is in; None mostly. Every recorded call asks.

    Look at: torch/csrc/autograd/python_variable.cpp; torch/autograd/forward_ad.py, whose level is a global variable.
    """
    if transforms_active():
        return "a transform of torch.func"
    return "forward-mode AD" if forward_ad._current_level >= 0 else None


_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks


_frame_callback = torch._C._dynamo.eval_frame.get_eval_frame_callback


def is_watched() -> bool:
    """Whether a transform, a level of forward-mode AD, hooks on saved tensors, or Dynamo have a say in calls that are
    made now.

    Every call that is matched asks, so it is one function. Look at: `active_transform`, torch/autograd/graph.py,
    `koila._torch.dynamo.in_compiled_code`.
    """
    if transforms_active() or forward_ad._current_level >= 0 or _saved_tensors_hooks(True) is not None:
        return True
    return _frame_callback() not in (None, False)


def outside_transforms() -> AbstractContextManager[Any]:
    """Compute as if no transform were active. Look at: torch/_functorch/pyfunctorch.py."""
    if not transforms_active():
        return nullcontext()
    return torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack()


def has_tangent(tensor: torch.Tensor) -> bool:
    """Whether a tensor carries a tangent of forward-mode AD. Look at: torch/autograd/forward_ad.py."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


def is_batched(tensor: torch.Tensor | None) -> bool:
    """Whether a tensor stands for many (`vmap`, `is_grads_batched`). Look at: torch/csrc/functorch/init.cpp."""
    if tensor is None:
        return False
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor)


def outermost_data(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor outside of all transforms whose memory a tensor inside of them shows; mostly itself.

    Look at: torch/csrc/functorch/init.cpp. What a transform makes has no storage that could be asked for.
    """
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor
