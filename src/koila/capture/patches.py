"""Entry points of torch that do not ask `__torch_function__`, handled on purpose.

*Takes* torch. *Gives* the same torch, except that `autograd.Function.apply`, `torch.utils.checkpoint.checkpoint` and
the modules with fused fast paths look for lazy arguments first, and that a module's state and an optimizer's step or
an average of weights come after what is pending for them. Without anything lazy all of them do exactly what they did.
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
from torch.optim.swa_utils import AveragedModel

from koila._torch import FIND_TENSORS
from koila.capture.bridge import Bridge
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
            return args[0](*args[2:])  # (function, preserve_rng_state, *its arguments): inlined.
        return lazy_forward(_FunctionCall(cls, f"{cls.__name__}.apply"), *args, **kwargs)

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


def _patch_state() -> None:
    """Reading or replacing a module's state comes after the pending updates of its statistics; replacing it also after
    what is pending on the old one."""
    for name in ("state_dict", "load_state_dict"):
        original = getattr(torch.nn.Module, name)

        def settled(self: Any, *args: Any, _original: Any = original, _name: str = name, **kwargs: Any) -> Any:
            if recorder.effects:
                Bridge.realizer.materialize([], "module state")
            if _name == "load_state_dict":
                Bridge.realizer.before_step([*self.parameters(), *self.buffers()])
            return _original(self, *args, **kwargs)

        setattr(torch.nn.Module, name, wraps(original)(settled))


class _WholeModule(OwnedCall):
    """A module that fuses its work on plain tensors: recorded as one call, its parameters among the operands."""

    __slots__ = ()

    def __call__(self, state: dict[str, torch.Tensor], args: Any, kwargs: Any) -> Any:
        return torch.func.functional_call(self.owner, state, tuple(args), kwargs)


def _patch_fast_paths() -> None:
    """Without gradients, these modules decide by `has_torch_function` whether to fuse: let them decide in the run."""
    for kind in (torch.nn.TransformerEncoder, torch.nn.TransformerEncoderLayer, torch.nn.MultiheadAttention):
        original = kind.forward

        def forward(self: Any, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
            if self.training or not _has_lazy((args, kwargs)) or _differentiates(self, args, kwargs):
                return _original(self, *args, **kwargs)
            state = {**dict(self.named_parameters()), **dict(self.named_buffers())}
            return lazy_forward(_WholeModule(self, type(self).__name__), state, args, kwargs)

        kind.forward = wraps(original)(forward)  # type: ignore[method-assign]


def _differentiates(module: torch.nn.Module, args: Any, kwargs: Any) -> bool:
    tensors = (leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
    return torch.is_grad_enabled() and any(t.requires_grad for t in (*module.parameters(), *tensors))


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


def _patch_averages() -> None:
    """An average of weights is written to like parameters by an optimizer: what is pending on it comes before."""
    original = AveragedModel.update_parameters

    @wraps(original)
    def update_parameters(self: Any, model: Any) -> None:
        Bridge.realizer.before_step([*self.parameters(), *self.buffers()])
        original(self, model)

    AveragedModel.update_parameters = update_parameters  # type: ignore[method-assign]


_lock = threading.Lock()
_installed: list[bool] = []


def install() -> None:
    """Patch once, whichever thread comes first."""
    if _installed:
        return
    with _lock:
        if not _installed:
            _patch_function()
            _patch_checkpoint()
            _patch_state()
            _patch_fast_paths()
            _patch_ddp()
            _patch_averages()
            register_optimizer_step_pre_hook(_before_step)
            _installed.append(True)
