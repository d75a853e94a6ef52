"""Replaying recorded calls, in order, on whatever tensors stand for their values: eager execution itself.

*Takes* nodes and an environment (value → tensor; real, fake or traced). *Gives* the environment completed. The whole
run and the joint trace both go through here, so they cannot differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from koila._torch import (
    enable_flash,
    enable_math,
    enable_mem_efficient,
    enable_mkldnn,
    is_any_autocast_enabled,
    is_flash_enabled,
    is_math_enabled,
    is_mem_efficient_enabled,
    is_mkldnn_enabled,
    ordinary_dispatch,
)
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
    nested: bool
    """Whether it is inside any autocast region, enabled or not: the cache of cast weights lives as long."""
    default_dtype: torch.dtype
    kernels: tuple[bool, ...]
    """Which fused kernels were allowed: oneDNN; flash, memory-efficient and plain attention."""

    def enter_region(self) -> ExitStack:
        """The outermost autocast region; its cache of cast weights lives until the stack is closed."""
        stack = ExitStack()
        if self.nested:
            torch.autocast_increment_nesting()
            stack.callback(_leave_region)
        return stack

    def enter(self) -> ExitStack:
        """The rest of the context, entered; leave it by closing the stack."""
        stack = ExitStack()
        for device_type, dtype, cache in self.autocast:
            stack.enter_context(torch.autocast(device_type, dtype=dtype, cache_enabled=cache))
        if not self.autocast and torch.is_autocast_enabled("cpu"):
            stack.enter_context(torch.autocast("cpu", enabled=False))
        stack.enter_context(torch.inference_mode(self.inference))
        stack.enter_context(torch.set_grad_enabled(self.grad))
        now, wanted = _kernels(), self.kernels
        if now != wanted:
            stack.callback(_allow_kernels, now)
            _allow_kernels(wanted)
        if torch.get_default_dtype() != self.default_dtype:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self.default_dtype)
        return stack


@contextmanager
def ordinary_state() -> Iterator[None]:
    """Whoever asks for a value may be in inference mode, or inside PyTorch below autograd: a run is in neither.

    Each recorded call brings the inference mode that it was recorded in.
    """
    with ordinary_dispatch(), ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        yield


def _leave_region() -> None:
    if torch.autocast_decrement_nesting() == 0:
        torch.clear_autocast_cache()


def _in_region() -> bool:
    torch.autocast_increment_nesting()
    return bool(torch.autocast_decrement_nesting() > 0)


def _kernels() -> tuple[bool, ...]:
    return (
        is_mkldnn_enabled(),
        is_flash_enabled(),
        is_mem_efficient_enabled(),
        is_math_enabled(),
    )


def _allow_kernels(kernels: tuple[bool, ...]) -> None:
    enable_mkldnn(kernels[0])
    enable_flash(kernels[1])
    enable_mem_efficient(kernels[2])
    enable_math(kernels[3])


_contexts: dict[tuple[Any, ...], Context] = {}


def current_context() -> Context:
    """The ambient state now; equal states are the same object."""
    autocast: tuple[tuple[str, torch.dtype, bool], ...] = ()
    if is_any_autocast_enabled():
        autocast = tuple(
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
            for kind in ("cpu", "cuda")
            if torch.is_autocast_enabled(kind)
        )
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    key = (grad, inference, autocast, _in_region(), torch.get_default_dtype(), _kernels())
    found = _contexts.get(key)
    return found if found is not None else _contexts.setdefault(key, Context(*key))


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
    may_fail: Callable[[Node, Exception], bool] | None = None,
) -> None:
    """Replay nodes in program order; consecutive nodes share one entry into their context.

    An error says where its call was recorded; `may_fail` tells whether to go on without the call.
    """
    context, outer, stack = None, ExitStack(), ExitStack()
    try:
        for node in nodes:
            if node.context is not context:
                stack.close()
                if context is None or context.nested != node.context.nested:
                    outer.close()
                    outer = node.context.enter_region()
                context = node.context
                stack = context.enter()
            try:
                result = replay_node(node, lookup_for(node), numbers_of(node) if node.draws else ())
            except Exception as error:
                if may_fail is not None and may_fail(node, error):
                    continue
                error.add_note(f"{node.name} was recorded at {node.site}")
                raise
            assign_outputs(node, result, environment)
            if after is not None:
                after(node)
    finally:
        stack.close()
        outer.close()
