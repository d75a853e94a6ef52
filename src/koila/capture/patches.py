"""Entry points of torch that do not ask `__torch_function__`, handled on purpose.

*Takes* torch. *Gives* the same torch, except that `autograd.Function.apply`, `torch.utils.checkpoint.checkpoint` and
the modules with fused fast paths and `Variable` look for lazy arguments first, and that a module's state and an
optimizer's step or an average of weights come after what is pending for them. Writes to real tensors are patched in
`koila.capture.writes`.
Without anything lazy all of them do exactly what they did.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from pkgutil import iter_modules
from sys import _getframe
from typing import Any

import torch
import torch.utils.checkpoint
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel

from koila._torch import INNER_MODES, RunMode, TorchDispatchMode
from koila._torch.dynamo import keep_dynamo_out
from koila._torch.modules import BUFFER_READERS, SWAPS_TENSORS
from koila._torch.switches import watch_switches
from koila.capture.bridge import Bridge
from koila.capture.checkpoints import is_recorded, patch_checkpoint, reentrant_checkpoint
from koila.capture.distributed import install_distributed
from koila.capture.fused import patch_fused_modules
from koila.capture.pending import recorder
from koila.capture.purity import Verdict, verdict_on
from koila.capture.record import lazy_forward, run_eagerly
from koila.capture.scan import scan_call
from koila.capture.statistics import patch_statistics
from koila.capture.transforms import patch_gradcheck, patch_transforms
from koila.capture.writes import install_writes
from koila.errors import CaptureError
from koila.ir.owned import Identity, OwnedCall
from koila.ir.source import user_site
from koila.ir.tree import leaves, map_leaves


def _has_lazy(tree: Any) -> bool:
    return any(type(leaf) is Bridge.lazy_type for leaf in leaves(tree))


def call_outside(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function that does not ask `__torch_function__`: what it does inside is no part of the user's program.

    Its eager arguments are plain tensors to it, and its results are eager like theirs.
    """
    if not any(type(leaf) is Bridge.eager_type for leaf in leaves((args, kwargs))):
        return function(*args, **kwargs)
    return Bridge.eager_type.call(function, args, kwargs)


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
            if cls is torch.utils.checkpoint.CheckpointFunction and is_recorded(args[2:]):
                return args[0](*args[2:])
            call = lambda *args, **kwargs: _checked(cls, original(cls, *args, **kwargs))  # noqa: E731
            return call_outside(call, args, kwargs)
        if cls is torch.utils.checkpoint.CheckpointFunction:
            return reentrant_checkpoint(original, *args)
        verdict = verdict_on(cls)
        objection = verdict.objection((*args, *kwargs.values()))
        if objection is not None:
            return _FunctionNow(cls, args, kwargs).run(f"a Function that is not known to be pure: {objection}")
        return lazy_forward(_FunctionCall(cls, verdict), *args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]


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
                return call_outside(partial(_original, self), args, kwargs)
            script = _ScriptCall(self, _original)
            scan, _ = scan_call(script, args, kwargs)
            return run_eagerly(script, scan, "code compiled by TorchScript")

        kind.__call__ = wraps(original)(call)


def _patch_state() -> None:
    """Reading, replacing or copying a module's state comes after the pending updates of its statistics; replacing it
    also after what is pending on the old one."""
    for name in BUFFER_READERS:
        original = getattr(torch.nn.Module, name)

        def settled(self: Any, *args: Any, _original: Any = original, _name: str = name, **kwargs: Any) -> Any:
            if recorder.effects and not recorder.place.traces and _getframe(1).f_code is not SWAPS_TENSORS:
                Bridge.realizer.materialize([], "module state")
            if _name == "load_state_dict":
                Bridge.realizer.before_step([*self.parameters(), *self.buffers()])
            return _original(self, *args, **kwargs)

        setattr(torch.nn.Module, name, wraps(original)(settled))


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    if recorder.is_idle:
        return
    Bridge.realizer.before_step([p for group in optimizer.param_groups for p in group["params"]])


def _patch_averages() -> None:
    """An average of weights is written to like parameters by an optimizer: what is pending on it comes before."""
    original = AveragedModel.update_parameters

    @wraps(original)
    def update_parameters(self: Any, model: Any) -> None:
        Bridge.realizer.before_step([*self.parameters(), *self.buffers()])
        original(self, model)

    AveragedModel.update_parameters = update_parameters  # type: ignore[method-assign]


def _patch_variables() -> None:
    """`Variable(x)`, which older programs write, is `x.detach()`; in C++ it would compute what is lazy, and give a
    plain tensor of what is eager, whose calls nobody sees."""
    kind: Any = torch.autograd.Variable
    original = kind.__new__

    @wraps(original)
    def make(cls: Any, *args: Any, **kwargs: Any) -> Any:
        data: Any = args[0] if args else kwargs.get("data")
        if type(data) not in (Bridge.lazy_type, Bridge.eager_type):
            return original(cls, *args, **kwargs)
        requires_grad = args[1] if len(args) > 1 else kwargs.get("requires_grad")
        return data.detach().requires_grad_() if requires_grad else data.detach()

    kind.__new__ = staticmethod(make)


def _patch_parameters() -> None:
    """A parameter made of an eager tensor is an ordinary one; PyTorch would keep the class of the tensor."""
    kind: Any = torch.nn.Parameter
    original = kind.__new__

    @wraps(original)
    def make(cls: Any, data: Any = None, *args: Any, **kwargs: Any) -> Any:
        return original(cls, data.run() if type(data) is Bridge.eager_type else data, *args, **kwargs)

    kind.__new__ = staticmethod(make)


def _run_pending() -> None:
    place = recorder.place
    if not (recorder.is_idle or place.runs or place.traces):
        held = [value for value in recorder.held() if value.node is not None and not value.node.done]
        Bridge.realizer.run_what_fits(held, "a TorchDispatchMode")


def _patch_modes() -> None:
    """A `TorchDispatchMode` of the user's sees the calls that are made inside of it: what is pending runs before it is
    entered, and what was recorded inside before it is left. Other modes are left as they were."""

    def prepare(kind: Any) -> None:
        if not (issubclass(kind, RunMode) or kind.__module__.startswith(INNER_MODES)):
            kind.__enter__, kind.__exit__ = _entered(kind.__enter__), _left(kind.__exit__)
        for inherits in kind.__subclasses__():
            prepare(inherits)

    for kind in TorchDispatchMode.__subclasses__():
        prepare(kind)
    original: Any = TorchDispatchMode.__dict__["__init_subclass__"].__func__

    def init_subclass(cls: Any, **options: Any) -> None:
        original(cls, **options)
        prepare(cls)

    TorchDispatchMode.__init_subclass__ = classmethod(init_subclass)  # type: ignore[arg-type,assignment]


def _entered(original: Any) -> Any:
    @wraps(original)
    def enter(self: Any) -> Any:
        _run_pending()
        return original(self)

    return enter


def _left(original: Any) -> Any:
    @wraps(original)
    def leave(self: Any, error: Any, *rest: Any) -> Any:
        try:
            if error is None:
                _run_pending()
        finally:
            result = original(self, error, *rest)
        return result

    return leave


_lock = threading.Lock()
_installed: list[bool] = []
_TRACED = ("statistics", "writes")
_PACKAGES = (
    *(
        f"koila.{name}"
        for name in ("_torch", "_scopes", "_budget", "events", "ir", "analysis", "planning", "execution")
    ),
    *(f"koila.capture.{name}" for _, name, _ in iter_modules([str(Path(__file__).parent)]) if name not in _TRACED),
)
"""What Dynamo must not trace. `koila.delegates` is not among them: a lowered module may be part of a compiled one.
Neither is what stands around PyTorch's own methods: compiled code calls these, too, and Dynamo sees through it."""


def install() -> None:
    """Patch once, whichever thread comes first."""
    if not recorder.is_hidden_from_dynamo:
        recorder.is_hidden_from_dynamo = keep_dynamo_out(_PACKAGES)
    if _installed:
        return
    with _lock:
        if not _installed:
            _patch_function()
            patch_checkpoint()
            _patch_state()
            patch_statistics()
            patch_fused_modules()
            watch_switches()
            install_distributed()
            _patch_scripts()
            patch_transforms()
            patch_gradcheck()
            _patch_averages()
            _patch_variables()
            _patch_parameters()
            _patch_modes()
            install_writes()
            register_optimizer_step_pre_hook(_before_step)
            _installed.append(True)
