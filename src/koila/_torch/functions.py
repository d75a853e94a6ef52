"""What is known of PyTorch's own functions: which are operators, which of its `autograd.Function`s have effects.

Takes: objects that a user's code refers to. Gives: whether calling one depends on its arguments alone. The names are
those of PyTorch's own files; `tests/semantics/test_functions.py` fails for one that is not there any more.
"""

from __future__ import annotations

from functools import lru_cache
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodDescriptorType,
    MethodWrapperType,
    WrapperDescriptorType,
)
from typing import Any

import torch
import torch.nn.functional as F
import torch.overrides
from torch._library.custom_ops import CustomOpDef

from koila._torch import OpOverload, OpOverloadPacket

_COLLECTIVE = "it talks to other processes"
_DEVICES = "it copies between devices"
_FSDP = "it starts and ends the work of a group of sharded parameters"

IMPURE_FUNCTIONS = {
    "torch.nn.parallel.distributed._DDPSink": "its backward queues the all-reduce of the gradients",
    "torch.nn.modules._functions.SyncBatchNorm": _COLLECTIVE,
    "torch.distributed.nn.functional._Broadcast": _COLLECTIVE,
    "torch.distributed.nn.functional._Gather": _COLLECTIVE,
    "torch.distributed.nn.functional._Scatter": _COLLECTIVE,
    "torch.distributed.nn.functional._Reduce": _COLLECTIVE,
    "torch.distributed.nn.functional._Reduce_Scatter": _COLLECTIVE,
    "torch.distributed.nn.functional._AllGather": _COLLECTIVE,
    "torch.distributed.nn.functional._AllGatherBase": _COLLECTIVE,
    "torch.distributed.nn.functional._AlltoAll": _COLLECTIVE,
    "torch.distributed.nn.functional._AlltoAllSingle": _COLLECTIVE,
    "torch.distributed.nn.functional._AllReduce": _COLLECTIVE,
    "torch.distributed.fsdp._fully_shard._fsdp_state.RegisterPreBackwardFunction": _FSDP,
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.RegisterPostBackwardFunction": _FSDP,
    "torch.distributed.tensor._redistribute.Redistribute": _COLLECTIVE,
    "torch.nn.parallel._functions.Broadcast": _DEVICES,
    "torch.nn.parallel._functions.ReduceAddCoalesced": _DEVICES,
    "torch.nn.parallel._functions.Gather": _DEVICES,
    "torch.nn.parallel._functions.Scatter": _DEVICES,
}
"""PyTorch's own Functions with effects, by module and name, with the reason. Their code shows it too; the table says it
in words, and holds if that code comes to look harmless. Look at: the modules that are named."""

_WRAPPERS = {
    ("torch.autograd.function", "once_differentiable.<locals>.wrapper"),
    ("torch.amp.autocast_mode", "custom_fwd.<locals>.decorate_fwd"),
    ("torch.amp.autocast_mode", "custom_bwd.<locals>.decorate_bwd"),
}
"""PyTorch's decorators for methods of Functions. They read grad and autocast mode, which a recorded call carries."""
_COLLECTIVE_NAMESPACES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"})
"""Operators that talk to other processes. Look at: torch/distributed/_functional_collectives.py."""
_STATEFUL = frozenset(
    {
        F.batch_norm, F.instance_norm, F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout,
        F.feature_alpha_dropout, F.rrelu, F.gumbel_softmax, F.fractional_max_pool2d, F.fractional_max_pool3d,
        F.multi_head_attention_forward, torch.batch_norm, torch.instance_norm, torch.native_batch_norm,
    }
)  # fmt: skip
"""Functions of PyTorch that draw random numbers or write statistics."""
_CONSTANTS = frozenset({torch.tensor})
"""Functions that make a tensor of Python numbers, and are no operators of the dispatcher."""


def is_pytorchs_own(function: Any) -> bool:
    """Whether the code of a function is PyTorch's: not a user's Function, operator or Python function."""
    if isinstance(function, (OpOverload, OpOverloadPacket)):
        return str(function).startswith("aten.")
    if isinstance(function, FunctionType):
        return function.__module__.partition(".")[0] == "torch"
    # Methods of tensors are descriptors; what else can be called is an object of somebody's class.
    return isinstance(function, (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType, MethodWrapperType))


def known_impure(function: type[torch.autograd.Function]) -> str | None:
    """Why a Function of PyTorch has effects; None if the table does not know it."""
    return IMPURE_FUNCTIONS.get(f"{function.__module__}.{function.__qualname__}")


def transparent_wrapper(function: Any) -> Any:
    """What one of PyTorch's decorators was given; None for any other function. Look at: the files in `_WRAPPERS`."""
    if not isinstance(function, FunctionType):
        return None
    place = (function.__globals__.get("__name__"), function.__code__.co_qualname)
    return getattr(function, "__wrapped__", None) if place in _WRAPPERS else None


def leads_to_operators(found: Any) -> bool:
    """Whether the attributes of an object are operators, or lead to them: `torch.ops`, `torch.ops.aten`, an operator.

    Look at: torch/_ops.py.
    """
    return isinstance(found, (type(torch.ops), type(torch.ops.aten), OpOverloadPacket))


@lru_cache(maxsize=4096)
def draws_random_numbers(name: str) -> bool:
    """Whether aten's operator of that name is random; False if there is none."""
    return any(torch.Tag.nondeterministic_seeded in each.tags for each in _overloads_of(name))


def is_pure_operator(found: Any) -> bool:
    """Whether something is an operator of PyTorch, or of the user's library, whose result depends on its arguments."""
    if isinstance(found, CustomOpDef):
        found = found._opoverload
    if isinstance(found, (OpOverload, OpOverloadPacket)):
        overloads = _overloads(found)
        named = {each.namespace for each in overloads}
        random = any(torch.Tag.nondeterministic_seeded in each.tags for each in overloads)
        return not random and not named & _COLLECTIVE_NAMESPACES
    if not isinstance(found, (FunctionType, BuiltinFunctionType)) or found in _STATEFUL:
        return False
    if isinstance(found, FunctionType):
        return found in _overridable() and not draws_random_numbers(found.__name__)
    return found in _CONSTANTS or (_is_aten(found) and not draws_random_numbers(found.__name__))


def _is_aten(function: BuiltinFunctionType) -> bool:
    """Whether a function of PyTorch's C++ stands for an operator of the dispatcher.

    TorchScript knows others by name, such as `manual_seed`. Look at: torch/csrc/utils/python_dispatch.cpp.
    """
    name = function.__name__
    if str(getattr(function, "__module__", "")).split(".")[0] != "torch":
        return False
    has_kernel = torch._C._dispatch_has_kernel
    return has_kernel(f"aten::{name}") or any(has_kernel(str(each.name())) for each in _overloads_of(name))


def _overloads_of(name: str) -> list[OpOverload]:
    return _overloads(getattr(torch.ops.aten, name, None))


def _overloads(found: Any) -> list[OpOverload]:
    if isinstance(found, OpOverload):
        return [found]
    return [] if found is None else [getattr(found, name) for name in found.overloads()]


@lru_cache(maxsize=1)
def _overridable() -> frozenset[Any]:
    """Functions that ask `__torch_function__`: PyTorch's own list of what it takes for operators."""
    return frozenset(each for group in torch.overrides.get_overridable_functions().values() for each in group)
