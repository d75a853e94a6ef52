"""Replaying recorded calls, in order, on whatever tensors stand for their values: eager execution itself.

*Takes* nodes and an environment (value → tensor; real, fake or traced) that begins with `Graph.bound`. *Gives* the
environment completed. The whole run and the joint trace both go through here, so they cannot differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from koila._scopes import Mark
from koila._torch import ordinary_dispatch
from koila.ir.ambient import Context as Context
from koila.ir.ambient import current_context as current_context
from koila.ir.draws import Supply
from koila.ir.node import Node, Value
from koila.ir.tree import leaves, map_leaves


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


Lookup = Callable[[Any], Any]


def replay_node(node: Node, lookup: Lookup, numbers: Sequence[torch.Tensor] = ()) -> Any:
    """Make one recorded call; `lookup` gives what stands for an argument's leaf."""
    args, kwargs = map_leaves(node.args, lookup), map_leaves(node.kwargs, lookup)
    before = _makers((args, kwargs)) if node.context.anomaly else ()
    if node.inference.writes:  # A view of what was written is a leaf for PyTorch until somebody asks it for its maker.
        _makers((args, kwargs))
    if numbers:
        mark = Mark()
        with Supply(numbers, mark):
            result = node.func(*args, **kwargs)
    else:
        result = node.func(*args, **kwargs)
    if node.context.anomaly:
        _note_site(node, _makers(result), before)
    return result


def _makers(tree: Any) -> list[Any]:
    """Autograd's nodes that made the tensors of a structure."""
    return [leaf.grad_fn for leaf in leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]


def _note_site(node: Node, made: list[Any], before: Sequence[Any]) -> None:
    """Anomaly mode tells where each of autograd's nodes was made: for those of a recorded call, the user's line."""
    seen = set(before)
    while made:
        each = made.pop()
        if each not in seen and not hasattr(each, "variable"):
            seen.add(each)
            each.metadata["traceback_"] = [f"  {node.name} was recorded at {node.site}\n"]
            made += [following for following, _ in each.next_functions if following is not None]


def assign_outputs(node: Node, result: Any, environment: dict[Value, Any]) -> None:
    """Put a call's results under the values that anything still refers to; what is there already is an input."""
    index = 0
    for leaf in leaves(result):
        if isinstance(leaf, torch.Tensor):
            value = node.output(index)
            if value is not None and node.inference.outputs[index].same_as is None:
                environment.setdefault(value, leaf)
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
