"""What the lines of a random program may use beside its tensors.

*Takes* where hooks put what they see. *Gives* the names: torch, and a user's own function.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

Notes = dict[str, list[torch.Tensor]]
Later = list[Callable[[], Any]]


class Scaled(torch.autograd.Function):
    """A user's function whose gradient is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        ctx.save_for_backward(value)
        return value.tanh() * factor

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (value,) = ctx.saved_tensors
        return gradients[0] * ctx.factor * value.cos(), None


def environment(seen: Notes | None = None, later: Later | None = None) -> dict[str, Any]:
    """What a program's lines may use beside its tensors."""
    return {
        "torch": torch,
        "F": F,
        "copy": copy,
        "checkpoint": checkpoint,
        "Scaled": Scaled,
        "seen": {} if seen is None else seen,
        "later": [] if later is None else later,
    }
