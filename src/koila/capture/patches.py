"""Entry points of torch that do not ask `__torch_function__`, handled on purpose.

*Takes* torch. *Gives* the same torch, except that `autograd.Function.apply` and `torch.utils.checkpoint.checkpoint`
look for lazy arguments first. Without lazy arguments both do exactly what they did.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
import torch.utils.checkpoint

from koila.capture.recorder import Bridge, lazy_forward
from koila.ir.tree import leaves


def _has_lazy(tree: Any) -> bool:
    return any(type(leaf) is Bridge.lazy_type for leaf in leaves(tree))


@cache
def _function_call(function: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """One stable callable per autograd function: its forward and backward are recorded as one call."""

    def apply(*args: Any, **kwargs: Any) -> Any:
        return original(function, *args, **kwargs)

    apply.__name__ = apply.__qualname__ = f"{function.__name__}.apply"
    return apply


def _patch_function() -> None:
    original = torch.autograd.Function.__dict__["apply"].__func__

    @wraps(original)
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if _has_lazy((args, kwargs)):
            return lazy_forward(_function_call(cls, original), *args, **kwargs)
        return original(cls, *args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]


def _patch_checkpoint() -> None:
    """Checkpointing is transparent: koila recomputes by itself, so the function is inlined."""
    original = torch.utils.checkpoint.checkpoint

    @wraps(original)
    def checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
        if not _has_lazy((args, kwargs)):
            return original(function, *args, **kwargs)
        own = ("use_reentrant", "context_fn", "determinism_check", "debug", "preserve_rng_state", "early_stop")
        return function(*args, **{name: value for name, value in kwargs.items() if name not in own})

    torch.utils.checkpoint.checkpoint = checkpoint


@cache
def install() -> None:
    """Patch once."""
    _patch_function()
    _patch_checkpoint()
