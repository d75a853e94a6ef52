"""Gradients of inner values: `torch.autograd.grad(loss, hidden)` after a run in chunks has made `loss` real.

*Takes* real tensors, and values of the programs that made them. *Gives* the gradients of the values.

In eager a hidden value lies on autograd's path from the parameters to the loss. After a run in chunks it does not: one
node leads from the loss to the leaves of its program, and the hidden value is inside. The gradients that arrive at such
a node are asked of PyTorch, and the node's program is run again, whole, from there to the value; counted (Rule 6).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from koila.capture.gradients import GradRequest
from koila.errors import CaptureError
from koila.execution.attach import count_fallback
from koila.execution.segment import SegmentState
from koila.execution.whole_run import inner_gradient
from koila.ir.graph import Graph
from koila.ir.node import Value
from koila.ir.source import user_site

Seeds = Sequence[torch.Tensor | None] | None


@dataclass(frozen=True, slots=True)
class Place:
    """A node of autograd's graph that stands for a program, and what of the program is asked for."""

    node: Any
    graph: Graph
    inside: tuple[Value, ...]


def places_of(roots: Sequence[torch.Tensor], values: Sequence[Value]) -> list[Place]:
    """The programs on the way from some tensors to their leaves that compute one of these values."""
    if not values:
        return []
    graphs = [(node, graph) for node, state in _segments(roots) if (graph := state.program) is not None]
    places = [Place(node, graph, tuple(v for v in values if v in graph.produced)) for node, graph in graphs]
    return [place for place in places if place.inside]


def _segments(roots: Sequence[torch.Tensor]) -> Iterator[tuple[Any, SegmentState]]:
    pending: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            state = getattr(node, "state", None)
            if isinstance(state, SegmentState):
                yield node, state
            pending += [following for following, _ in node.next_functions if following is not None]


def real_gradients(request: GradRequest, roots: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    """What `torch.autograd.grad` gives for real roots, also for inputs that are inside of a program."""
    values = [each for each in request.inputs if isinstance(each, Value) and each.requires_grad]
    places = places_of(roots, values)
    if not places:
        _refuse_second_pass(request, roots, values)
        return torch.autograd.grad(roots, _reals(request), request.seeds, **request.options)
    if request.options["create_graph"] or request.options["is_grads_batched"]:
        _refuse(places[0].inside[0])
    inside = _gradients_at(places, roots, request.seeds)
    options = {**request.options, "allow_unused": True, "materialize_grads": False}
    beside = torch.autograd.grad(roots, _reals(request), request.seeds, **options)
    found = [_add(inside.get(each), gradient) for each, gradient in zip(request.inputs, beside, strict=True)]  # type: ignore[arg-type]
    return tuple(map(_given, found, _reals(request), [request] * len(found)))


def _reals(request: GradRequest) -> list[torch.Tensor]:
    reals = [each.real if isinstance(each, Value) else each for each in request.inputs]
    return [real for real in reals if real is not None]


def _add(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second


def _given(gradient: torch.Tensor | None, real: torch.Tensor, request: GradRequest) -> torch.Tensor | None:
    """What the caller gets for a gradient that may be missing."""
    if gradient is None and request.options["materialize_grads"]:
        return torch.zeros_like(real)
    if gradient is None and not request.options["allow_unused"]:
        raise RuntimeError(
            "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True "
            "if this is the desired behavior."
        )
    return gradient


def _gradients_at(places: Sequence[Place], roots: Sequence[torch.Tensor], seeds: Seeds) -> dict[Value, torch.Tensor]:
    """The gradients of inner values: the sum over all programs that compute them. A value without any is left out."""
    count_fallback("the gradient of an inner value needs the graph of the whole run")
    total: dict[Value, torch.Tensor] = {}
    for place in places:
        outputs = place.graph.outputs
        edges = [GradientEdge(place.node, index) for index in range(len(outputs))]
        arriving = torch.autograd.grad(roots, edges, seeds, retain_graph=True, allow_unused=True)
        for value in place.inside:
            # Where the value is a result of this node itself, PyTorch finds the rest of its gradient there.
            is_result = value.real is not None and value.real.grad_fn is place.node
            reached = [(v, g) for v, g in zip(outputs, arriving, strict=True) if not (is_result and v is value)]
            gradient = _inner_gradient(place.graph, [(v, g) for v, g in reached if g is not None], value)
            if gradient is not None:
                total[value] = total[value] + gradient if value in total else gradient
    return total


def _inner_gradient(graph: Graph, seeds: list[tuple[Value, torch.Tensor]], value: Value) -> torch.Tensor | None:
    return inner_gradient(graph, [v for v, _ in seeds], [g for _, g in seeds], value) if seeds else None


def _refuse_second_pass(request: GradRequest, roots: Sequence[torch.Tensor], values: Sequence[Value]) -> None:
    """A program that was given up after a backward pass may have held the value: eager's own error."""
    if not values or all(state.program is not None for _, state in _segments(roots)):
        return
    options = {**request.options, "allow_unused": True, "retain_graph": True, "materialize_grads": False}
    found = torch.autograd.grad(roots, _reals(request), request.seeds, **options)
    if any(g is None for each, g in zip(request.inputs, found, strict=True) if isinstance(each, Value)):
        raise RuntimeError(
            "Trying to backward through the graph a second time (or directly access saved tensors after they have "
            "already been freed). Specify retain_graph=True if you need to backward through the graph a second time."
        )


def _refuse(value: Value) -> None:
    """A graph of the gradient would have to go through a value that is inside of a node."""
    raise CaptureError(
        f"the gradient of an inner value (shape {list(value.prepass.shape)}) cannot be differentiated again, or be "
        "taken for many seeds at once, after what depends on it was computed in chunks",
        where=str(user_site()),
        hint="ask for it before the loss is read: torch.autograd.grad(loss, hidden, create_graph=True)",
    )
