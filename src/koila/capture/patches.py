"""Entry points of torch that do not ask `__torch_function__`, handled on purpose.

*Takes* torch. *Gives* the same torch, except that `autograd.Function.apply`, `torch.utils.checkpoint.checkpoint` and
the modules with fused fast paths look for lazy arguments first, and that a module's state and an optimizer's step come
after what is pending for them. Without anything lazy all of them do exactly what they did.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.utils.checkpoint
from torch.nn.parallel import distributed
from torch.optim.optimizer import register_optimizer_step_pre_hook

from koila._torch import FIND_TENSORS
from koila._torch.switches import watch_precision
from koila.capture.bridge import Bridge
from koila.capture.checkpoints import patch_checkpoint, reentrant_checkpoint
from koila.capture.fused import patch_fused_modules
from koila.capture.pending import recorder
from koila.capture.record import lazy_forward, realize
from koila.ir.owned import OwnedCall
from koila.ir.tree import leaves


def _has_lazy(tree: Any) -> bool:
    return any(type(leaf) is Bridge.lazy_type for leaf in leaves(tree))


class _FunctionCall(OwnedCall):
    """A user's `autograd.Function`: its forward and backward are recorded as one call."""

    __slots__ = ()
    original: Callable[..., Any] = torch.autograd.Function.__dict__["apply"].__func__
    """PyTorch's own `Function.apply`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _FunctionCall.original(self.owner, *args, **kwargs)


def _patch_function() -> None:
    original = _FunctionCall.original

    @wraps(original)
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not _has_lazy((args, kwargs)):
            return original(cls, *args, **kwargs)
        if cls is torch.utils.checkpoint.CheckpointFunction:
            return reentrant_checkpoint(original, *args)
        return lazy_forward(_FunctionCall(cls, f"{cls.__name__}.apply"), *args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]


def _patch_state() -> None:
    """Reading or replacing a module's state comes after the pending updates of its statistics."""
    for name in ("state_dict", "load_state_dict"):
        original = getattr(torch.nn.Module, name)

        def settled(self: Any, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
            if recorder.effects:
                Bridge.realizer.materialize([], "module state")
            return _original(self, *args, **kwargs)

        setattr(torch.nn.Module, name, wraps(original)(settled))


def _patch_ddp() -> None:
    """With `find_unused_parameters`, DDP follows `grad_fn` from its outputs: they must be real by then."""
    if not torch.distributed.is_available():
        return
    original = getattr(distributed, FIND_TENSORS)

    @wraps(original)
    def find_tensors(found: Any) -> Any:
        if isinstance(found, Bridge.lazy_type):
            return [realize(found._value, "DistributedDataParallel")]
        return original(found)

    setattr(distributed, FIND_TENSORS, find_tensors)


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    Bridge.realizer.before_step([p for group in optimizer.param_groups for p in group["params"]])


_lock = threading.Lock()
_installed: list[bool] = []


def install() -> None:
    """Patch once, whichever thread comes first."""
    if _installed:
        return
    with _lock:
        if not _installed:
            _patch_function()
            patch_checkpoint()
            _patch_state()
            patch_fused_modules()
            watch_precision()
            _patch_ddp()
            register_optimizer_step_pre_hook(_before_step)
            _installed.append(True)
