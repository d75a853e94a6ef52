"""`torch.distributed` beside a pending program: other processes never see what is not there yet.

*Takes* collectives on real tensors and DistributedDataParallel. *Gives* the same, except that what is pending on the
tensors of a collective runs before it, and that DDP finds the history of outputs that are not computed yet.

Collectives on lazy tensors arrive in `__torch_function__` and are made at once (`koila.ir.infer`). Those on real
tensors would go unseen, and most of them write without counting up the version: a parameter that is broadcast while a
pending call reads it, or DDP's broadcast of statistics that a pending BatchNorm has not updated yet.

DDP walks over `grad_fn` from its outputs to find unused parameters, and puts a node behind them (`_DDPSink`) by which a
static graph learns that its first backward has begun. A lazy output is shown to it as an empty tensor whose history
reaches the same parameters, and then carries what DDP made of that tensor along as a second operand. So nothing runs
before the backward pass, and DDP's node is called in it, in PyTorch's own engine.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel, distributed

from koila._torch import BROADCAST_COALESCED, FIND_TENSORS, GROUP_METHODS, POST_FORWARD
from koila._torch import tree_flatten as flatten
from koila._torch import tree_unflatten as unflatten
from koila.capture.bridge import Bridge
from koila.capture.pending import recorder
from koila.capture.readers import run_readers
from koila.capture.record import realize
from koila.ir.graph import collect, connected_leaves
from koila.ir.node import Value
from koila.ir.tree import leaves, map_leaves

WHY = "other processes take part in it"


def install_distributed() -> None:
    """Patch what does not ask `__torch_function__`; nothing if this PyTorch has no `torch.distributed`."""
    if not dist.is_available():
        return
    for name in GROUP_METHODS:
        setattr(dist.ProcessGroup, name, _after_pending(getattr(dist.ProcessGroup, name)))
    setattr(dist, BROADCAST_COALESCED, _after_pending(getattr(dist, BROADCAST_COALESCED)))
    setattr(distributed, FIND_TENSORS, _finding(getattr(distributed, FIND_TENSORS)))
    setattr(DistributedDataParallel, POST_FORWARD, _post_forward(getattr(DistributedDataParallel, POST_FORWARD)))


def _after_pending(original: Callable[..., Any]) -> Callable[..., Any]:
    """The collective, after what is pending on its tensors: pending calls see the data before it."""

    @wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        if recorder.is_idle:
            return original(*args, **kwargs)
        found = (leaf._value if _is_lazy(leaf) else leaf for leaf in leaves((args, kwargs)))
        run_readers([operand for operand in found if isinstance(operand, Value | torch.Tensor)])
        real = lambda leaf: realize(leaf._value, WHY) if _is_lazy(leaf) else leaf  # noqa: E731
        return original(*map_leaves(args, real), **map_leaves(kwargs, real))

    return collective


def _is_lazy(leaf: Any) -> bool:
    return type(leaf) is Bridge.lazy_type


class _History(torch.autograd.Function):
    """An empty tensor whose history reaches some leaves; no gradient passes through it."""

    @staticmethod
    def forward(ctx: Any, *reached: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.num_reached = len(reached)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return (None,) * ctx.num_reached


class _WithHistory(torch.autograd.Function):
    """A value, as `_DDPSink` hands it on, with an operand that hears of its backward pass and gets no gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return gradients[0], None


def _stand_in(value: Value) -> torch.Tensor:
    """An empty tensor with the history that a value will have, as far as it decides who gets a gradient."""
    if not value.requires_grad:
        return torch.empty(0)
    graph = collect([value], [])
    with torch.enable_grad():
        return _History.apply(*(graph.leaves[index] for index in connected_leaves(graph, [value])))


def _finding(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def find_tensors(found: Any) -> Any:
        return [_stand_in(found._value)] if _is_lazy(found) else original(found)

    return find_tensors


def _post_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def post_forward(self: DistributedDataParallel, output: Any) -> Any:
        outputs, structure = flatten(output)
        if not any(map(_is_lazy, outputs)):
            return original(self, output)
        shown = [_stand_in(leaf._value) if _is_lazy(leaf) else leaf for leaf in outputs]
        results, _ = flatten(original(self, unflatten(shown, structure)))
        found = zip(outputs, shown, results, strict=True)
        return unflatten([_given_back(*leaf) for leaf in found], structure)

    return post_forward


def _given_back(output: Any, shown: Any, result: Any) -> Any:
    """The output for what DDP made of what it was shown."""
    if not _is_lazy(output):
        return result
    return output if result is shown else _WithHistory.apply(output, result)
