"""Rule 4: an error before the commit leaves gradients and buffers as they were.

*Takes* tensors that a run may change. *Gives* scopes that restore them on error, and the commit of effects.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as preserve_version

from koila.ir.graph import Graph

Unless = Callable[[BaseException], bool]


def _never(error: BaseException) -> bool:
    return False


def is_from_user(error: BaseException) -> bool:
    """Whether an error was raised by the user's own code: a hook in the commit, which then behaves as in eager."""
    if not isinstance(error, Exception) or error.__traceback__ is None:
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    # An operator that fails under somebody's dispatch mode fails in the run, not in a hook.
    if any(frame.f_code.co_name == "__torch_dispatch__" for frame in frames):
        return False
    return str(frames[-1].f_globals.get("__name__", "")).split(".")[0] not in ("koila", "torch")


@contextmanager
def restored_on_error(tensors: Sequence[torch.Tensor], unless: Unless = _never) -> Iterator[None]:
    """If the body raises, the tensors are as they were."""
    saved = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    except BaseException as error:
        if unless(error):
            raise
        for tensor, copy in saved:
            with torch.no_grad(), preserve_version(tensor):
                tensor.detach().copy_(copy)
        raise


@contextmanager
def gradients_restored_on_error(tensors: Sequence[torch.Tensor], unless: Unless = _never) -> Iterator[None]:
    """If the body raises, the gradients of these leaves are as they were."""
    targets = {id(tensor): tensor for tensor in tensors}.values()
    saved = [(t, t.grad, None if t.grad is None else t.grad.detach().clone()) for t in targets]
    try:
        yield
    except BaseException as error:
        if unless(error):
            raise
        for tensor, gradient, copy in saved:
            if gradient is not None and copy is not None:
                with torch.no_grad():
                    gradient.copy_(copy)
            tensor.grad = gradient
        raise


def leaves_behind(roots: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors whose .grad a backward from the roots may change."""
    found: dict[int, torch.Tensor] = {}
    pending: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            found[id(variable)] = variable
        pending += [following for following, _ in node.next_functions if following is not None]
    return list(found.values())


def write_effects(graph: Graph, written: dict[int, torch.Tensor]) -> None:
    """Write the new values of running statistics; eager hides these writes from the version, so koila does too."""
    with restored_on_error([graph.leaves[index] for index in written]):
        for index, value in written.items():
            leaf = graph.leaves[index]
            with torch.no_grad(), preserve_version(leaf):
                leaf.detach().copy_(value)
