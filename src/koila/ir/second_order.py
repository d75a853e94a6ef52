"""What is known of `autograd.grad` before it runs: where it goes, and whether its results require grad.

*Takes* a pending program, and what it is differentiated by. *Gives* whether the program is all that gradients go
through, which leaves they reach, and for each gradient whether it can be differentiated again. That of a linear
function cannot: it depends on no tensor that requires grad. Autograd itself answers, on fake tensors, once for all
programs of one structure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from koila._torch import FakeTensorMode, in_turn, ordinary_dispatch, without_saved_tensors_hooks
from koila.ir.cache import Cache
from koila.ir.graph import Graph
from koila.ir.node import Value
from koila.ir.replay import replay
from koila.ir.stand_ins import StandIns

_known: Cache[tuple[bool, ...]] = Cache("second_order_cache", 1024)
"""By program and inputs, which gradients require grad."""
_reached: Cache[tuple[bool, ...]] = Cache("reached_leaves_cache", 1024)
"""By program and leaves, to which of these a gradient comes."""

MAX_WALK = 10_000
"""Autograd's nodes that are looked at: PyTorch crashes when a graph of 50,000 is freed that Python has walked."""


def goes_behind(graph: Graph, inputs: Sequence[Value | torch.Tensor]) -> bool:
    """Whether gradients reach one of the inputs through what a real tensor was made from, outside of the program.

    Then they are those of PyTorch's own graph. So they are if that is too long to be looked through.
    """
    histories = [leaf.grad_fn for leaf in graph.leaves if leaf.grad_fn is not None]
    if not histories:
        return False
    reals = [each.real if isinstance(each, Value) else each for each in inputs]
    wanted = {id(real) for real in reals if real is not None and real.grad_fn is None}
    nodes = {real.grad_fn for real in reals if real is not None and real.grad_fn is not None}
    pending: list[Any] = [following for history in histories for following, _ in history.next_functions]
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        if node in nodes or id(getattr(node, "variable", None)) in wanted or len(seen) >= MAX_WALK:
            return True
        seen.add(node)
        pending += [following for following, _ in node.next_functions]
    return False


def gradients_requiring_grad(graph: Graph, inputs: Sequence[Value | torch.Tensor]) -> tuple[bool, ...]:
    """Which of the gradients of a program's outputs require grad; all of them where that is not known.

    Args:
        graph: The pending program of what is differentiated.
        inputs: What it is differentiated by.
    """
    unknown = (True,) * len(inputs)
    places = tuple([_place(graph, each) for each in inputs])
    if None in places:
        return unknown

    def ask() -> tuple[bool, ...]:
        try:
            return _ask(graph, inputs)
        except Exception:  # Whatever fake tensors cannot do, and what eager refuses: the run says so.
            return unknown

    return _known.get_or_add((graph.key, places), ask)


def _place(graph: Graph, tensor: Value | torch.Tensor) -> Any:
    """Where in a program a tensor is; None: it is not there."""
    if isinstance(tensor, Value) and tensor in graph.produced:
        return graph.produced[tensor]
    real = tensor.real if isinstance(tensor, Value) else tensor
    return next((number for number, leaf in enumerate(graph.leaves) if leaf is real), None)


def _ask(graph: Graph, inputs: Sequence[Value | torch.Tensor]) -> tuple[bool, ...]:
    gradients = _fake_gradients(graph, inputs, create_graph=True)
    return tuple([gradient.requires_grad for gradient in gradients])


def reached_leaves(graph: Graph, leaves: tuple[int, ...]) -> tuple[int, ...]:
    """The leaves to which a gradient of the program's outputs comes; all of them where that is not known.

    A call may take a tensor that requires grad and not differentiate by it: `zeros_like`, `type_as`, `expand_as`.
    """

    def ask() -> tuple[bool, ...]:
        try:
            found = _fake_gradients(graph, [graph.leaves[leaf] for leaf in leaves], allow_unused=True)
        except Exception:  # Whatever fake tensors cannot do, and what eager refuses: the run says so.
            return (True,) * len(leaves)
        is_known = any(gradient is not None for gradient in found)
        return tuple([not is_known or gradient is not None for gradient in found])

    is_reached = _reached.get_or_add((graph.key, leaves), ask)
    return tuple([leaf for leaf, reached in zip(leaves, is_reached, strict=True) if reached])


@in_turn
def _fake_gradients(graph: Graph, inputs: Sequence[Value | torch.Tensor], **options: bool) -> Sequence[Any]:
    """What `autograd.grad` gives for the outputs of a program that is replayed on fake tensors."""
    with (
        torch.inference_mode(False), ordinary_dispatch(), without_saved_tensors_hooks(),
        FakeTensorMode(allow_non_fake_inputs=True), torch.autograd.set_detect_anomaly(False),
    ):  # fmt: skip
        fakes = StandIns(graph)
        replay(fakes.calls, fakes.environment, lambda node: fakes.lookup, fakes.numbers)
        roots = [root for value in graph.outputs if (root := fakes.environment[value]).requires_grad]
        seeds = [torch.ones_like(root) for root in roots]
        return torch.autograd.grad(roots, [fakes.lookup(each) for each in inputs], seeds, **options)
