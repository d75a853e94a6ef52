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
from koila._torch.dynamo import keep_dynamo_out
from koila.capture.bridge import Bridge
from koila.capture.pending import recorder
from koila.capture.purity import Verdict, verdict_on
from koila.capture.record import lazy_forward, realize, run_eagerly
from koila.capture.scan import scan_call
from koila.capture.transforms import patch_gradcheck, patch_transforms
from koila.errors import CaptureError
from koila.ir.owned import Identity, OwnedCall
from koila.ir.source import user_site
from koila.ir.tree import leaves, map_leaves


def _has_lazy(tree: Any) -> bool:
    return any(type(leaf) is Bridge.lazy_type for leaf in leaves(tree))


class _FunctionCall(OwnedCall):
    """An `autograd.Function` that is pure: its forward and backward are recorded as one call."""

    __slots__ = ("_verdict",)
    original: Callable[..., Any] = torch.autograd.Function.__dict__["apply"].__func__
    """PyTorch's own `Function.apply`."""

    def __init__(self, owner: Any, verdict: Verdict) -> None:
        super().__init__(owner, f"{owner.__name__}.apply")
        self._verdict = verdict
        self.key = (*self.key, Identity(verdict))  # Code that was replaced is another program.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _FunctionCall.original(self.owner, *args, **kwargs)

    def rebound(self) -> str | None:
        return self._verdict.rebound()


class _FunctionNow(OwnedCall):
    """An `autograd.Function` that is not known to be pure: called on real tensors, with the user's own containers."""

    __slots__ = ("_args", "_kwargs", "_tensors")

    def __init__(self, owner: Any, args: Any, kwargs: Any) -> None:
        super().__init__(owner, f"{owner.__name__}.apply")
        self._args, self._kwargs = args, kwargs
        self._tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]

    def run(self, why: str) -> Any:
        """Call it now, on the tensors that its lazy arguments are."""
        scan, _ = scan_call(self, self._tensors, {})
        return run_eagerly(self, scan, why)

    def __call__(self, *reals: torch.Tensor) -> Any:
        by_identity = {id(given): real for given, real in zip(self._tensors, reals, strict=True)}
        swap = lambda leaf: by_identity.get(id(leaf), leaf)  # noqa: E731
        # A container without lazy tensors stays the user's own: the Function may write to it.
        own = lambda tree: map_leaves(tree, swap) if _has_lazy(tree) else tree  # noqa: E731
        args, kwargs = [own(item) for item in self._args], {name: own(item) for name, item in self._kwargs.items()}
        return _checked(self.owner, _FunctionCall.original(self.owner, *args, **kwargs))


def _checked(function: Any, result: Any) -> Any:
    """A Function that computes with a lazy tensor which it was not given would lose that tensor's gradient."""
    if _has_lazy(result):
        raise CaptureError(
            f"{function.__name__} returned a lazy tensor that comes from outside of its arguments",
            where=str(user_site()),
            hint=f"give the lazy tensor to {function.__name__}.apply as an argument, or use tensor.run() inside",
        )
    return result


def _patch_function() -> None:
    original = _FunctionCall.original

    @wraps(original)
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not _has_lazy((args, kwargs)):
            return _checked(cls, original(cls, *args, **kwargs))
        if cls is torch.utils.checkpoint.CheckpointFunction:
            return args[0](*args[2:])  # (function, preserve_rng_state, *its arguments): inlined.
        verdict = verdict_on(cls)
        objection = verdict.objection((*args, *kwargs.values()))
        if objection is not None:
            return _FunctionNow(cls, args, kwargs).run(f"a Function that is not known to be pure: {objection}")
        return lazy_forward(_FunctionCall(cls, verdict), *args, **kwargs)

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


class _ScriptCall(OwnedCall):
    """Code that TorchScript compiled."""

    __slots__ = ("_original",)

    def __init__(self, owner: Any, original: Callable[..., Any]) -> None:
        super().__init__(owner, f"script {owner.name}")
        self._original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._original(self.owner, *args, **kwargs)


def _patch_scripts() -> None:
    """Scripted and traced code runs at its call: parameters are hidden inside, and its optimiser drops gradients of
    tensors that do not require grad in C++, as lazy ones do not."""
    kinds: tuple[Any, ...] = (torch.jit.ScriptFunction, torch.ScriptMethod)
    for kind in kinds:
        original = kind.__call__

        def call(self: Any, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
            if not _has_lazy((args, kwargs)):
                return _original(self, *args, **kwargs)
            script = _ScriptCall(self, _original)
            scan, _ = scan_call(script, args, kwargs)
            return run_eagerly(script, scan, "code compiled by TorchScript")

        kind.__call__ = wraps(original)(call)


def _patch_state() -> None:
    """Reading or replacing a module's state comes after the pending updates of its statistics."""
    for name in ("state_dict", "load_state_dict"):
        original = getattr(torch.nn.Module, name)

        def settled(self: Any, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
            if recorder.effects:
                Bridge.realizer.materialize([], "module state")
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


_lock = threading.Lock()
_installed: list[bool] = []
_PACKAGES = tuple(
    f"koila.{name}"
    for name in ("_torch", "_scopes", "_budget", "events", "ir", "capture", "analysis", "planning", "execution")
)
"""What Dynamo must not trace. `koila.delegates` is not among them: a lowered module may be part of a compiled one."""


def install() -> None:
    """Patch once, whichever thread comes first."""
    if not recorder.is_hidden_from_dynamo:
        recorder.is_hidden_from_dynamo = keep_dynamo_out(_PACKAGES)
    if _installed:
        return
    with _lock:
        if not _installed:
            _patch_function()
            _patch_checkpoint()
            _patch_scripts()
            _patch_state()
            _patch_fast_paths()
            _patch_ddp()
            patch_transforms()
            patch_gradcheck()
            register_optimizer_step_pre_hook(_before_step)
            _installed.append(True)
