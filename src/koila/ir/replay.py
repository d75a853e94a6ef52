"""Replaying recorded calls, in order, on whatever tensors stand for their values: eager execution itself.

*Takes* nodes and an environment (value → tensor; real, fake or traced). *Gives* the environment completed. The whole
run and the joint trace both go through here, so they cannot differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from koila.ir.draws import Supply
from koila.ir.node import Node, Value
from koila.ir.tree import leaves, map_leaves


@dataclass(frozen=True, slots=True)
class Context:
    """The ambient state under which a call was recorded."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype, bool], ...]
    """(device type, dtype, weight cache) of each enabled autocast."""
    default_dtype: torch.dtype

    def enter(self) -> ExitStack:
        """The context, entered; leave it by closing the stack."""
        stack = ExitStack()
        stack.enter_context(torch.inference_mode(self.inference))
        stack.enter_context(torch.set_grad_enabled(self.grad))
        for device_type, dtype, cache in self.autocast:
            stack.enter_context(torch.autocast(device_type, dtype=dtype, cache_enabled=cache))
        if not self.autocast and torch.is_autocast_enabled("cpu"):
            stack.enter_context(torch.autocast("cpu", enabled=False))
        if torch.get_default_dtype() != self.default_dtype:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self.default_dtype)
        return stack


_contexts: dict[tuple[Any, ...], Context] = {}


def current_context() -> Context:
    """The ambient state now; equal states are the same object."""
    autocast: tuple[tuple[str, torch.dtype, bool], ...] = ()
    if torch._C._is_any_autocast_enabled():
        autocast = tuple(
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
            for kind in ("cpu", "cuda")
            if torch.is_autocast_enabled(kind)
        )
    key = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast, torch.get_default_dtype())
    found = _contexts.get(key)
    if found is None:
        found = _contexts[key] = Context(*key)
    return found


Lookup = Callable[[Any], Any]


def replay_node(node: Node, lookup: Lookup, numbers: Sequence[torch.Tensor] = ()) -> Any:
    """Make one recorded call; `lookup` gives what stands for an argument's leaf."""
    args, kwargs = map_leaves(node.args, lookup), map_leaves(node.kwargs, lookup)
    if not numbers:
        return node.func(*args, **kwargs)
    with Supply(numbers):
        return node.func(*args, **kwargs)


def assign_outputs(node: Node, result: Any, environment: dict[Value, Any]) -> None:
    """Put a call's results under the values that anything still refers to."""
    index = 0
    for leaf in leaves(result):
        if isinstance(leaf, torch.Tensor):
            value = node.output(index)
            if value is not None and node.inference.outputs[index].same_as is None:
                environment[value] = leaf
            index += 1


def replay(
    nodes: Iterable[Node],
    environment: dict[Value, Any],
    lookup_for: Callable[[Node], Lookup],
    numbers_of: Callable[[Node], Sequence[torch.Tensor]],
    after: Callable[[Node], None] | None = None,
) -> None:
    """Replay nodes in program order; consecutive nodes share one entry into their context."""
    context, stack = None, ExitStack()
    try:
        for node in nodes:
            if node.context is not context:
                stack.close()
                context = node.context
                stack = context.enter()
            result = replay_node(node, lookup_for(node), numbers_of(node) if node.draws else ())
            assign_outputs(node, result, environment)
            if after is not None:
                after(node)
    finally:
        stack.close()
