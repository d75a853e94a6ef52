"""Modules with running statistics: how PyTorch's own code reads them, and where a module's buffers go.

Takes: torch.nn. Gives: names for what reading the statistics from outside must come after.
"""

from __future__ import annotations

from types import CodeType
from typing import Any

import torch
from torch.nn.modules import batchnorm, instancenorm
from torch.nn.utils import stateless

NORM_BASE: type[torch.nn.Module] = batchnorm._NormBase
"""Every module of PyTorch that keeps running statistics. Look at: torch/nn/modules/batchnorm.py."""
NORM_FORWARDS: frozenset[CodeType] = frozenset(
    function.__code__
    for function in (
        batchnorm._BatchNorm.forward,
        batchnorm.SyncBatchNorm.forward,
        instancenorm._InstanceNorm._apply_instance_norm,
    )
)
"""Code that reads the statistics to hand them to the operator that updates them: that is recorded in its order."""
BUFFER_READERS = ("state_dict", "load_state_dict", "named_buffers", "_apply", "__reduce_ex__")
"""Methods of every module that read or replace its buffers: `.to()`, `.half()` and the like end in `_apply`, a copy and
a pickle begin with `__reduce_ex__`. Look at: torch/nn/modules/module.py."""

SWAPS_TENSORS: CodeType = stateless._untie_named_tensors_map.__code__
"""`functional_call` looks for names among the buffers, and reads none. Look at: torch/nn/utils/stateless.py."""


def buffer_of(module: torch.nn.Module, name: str) -> Any:
    """A buffer, asked of the module's own table."""
    return module._buffers.get(name)
