"""Evaluation: from a demand to bound values and committed gradients.

*Takes* pending values, or a backward request. *Gives* the values bound to real tensors, and gradients committed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from koila import events
from koila.capture.lookup import BackwardRequest
from koila.capture.recorder import Recorder
from koila.execution.whole import run_whole
from koila.interfaces import BatchInfo
from koila.ir.graph import Graph, collect
from koila.ir.node import Value


class Engine:
    """The realizer: decides how a program runs, runs it, and binds what came out."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def materialize(self, values: Sequence[Value], why: str) -> None:
        """Bind pending values to real tensors, and perform the pending effects."""
        graph = collect([v for v in values if v.real is None or v.storage.writers], self._recorder.effects)
        if graph.nodes:
            self._run(graph)

    def backward(self, request: BackwardRequest) -> None:
        """Run forward and backward, and leave the gradients where PyTorch's backward would."""
        involved = (*request.roots, *(request.inputs or ()))
        self.materialize([v for v in involved if isinstance(v, Value)], "backward")
        _backward_on_real(request)
        self._recorder.new_epoch()

    def batch_of(self, value: Value) -> BatchInfo | None:
        raise NotImplementedError

    def _run(self, graph: Graph) -> None:
        graph.check_fresh()
        started = time.perf_counter()
        results = run_whole(graph)
        self._bind(graph, results)
        events.count("runs")
        events.count("runs::whole")
        events.sample("run_seconds", time.perf_counter() - started)

    def _bind(self, graph: Graph, results: dict[Value, torch.Tensor]) -> None:
        """The values are real now, and what was executed is no longer pending."""
        executed = set(graph.nodes)
        for value, real in results.items():
            value.bind(real)
        storages = {v.storage for node in graph.nodes for v in node.values()}
        storages.update(storage for node in graph.nodes for storage in node.storages)
        storages.update(value.storage for value in results)
        for storage in storages:
            storage.writers = [writer for writer in storage.writers if writer not in executed]
            storage.readers = [r for r in storage.readers if (n := r()) is not None and n not in executed]
        left = [node for node in self._recorder.effects if node not in executed]
        left += [writer for value in results for writer in value.storage.writers if writer not in left]
        self._recorder.effects = sorted(left, key=lambda node: node.sequence)
        self._recorder.new_epoch()


def _real(tensor: Value | torch.Tensor) -> torch.Tensor:
    real = tensor.real if isinstance(tensor, Value) else tensor
    assert real is not None
    return real


def _backward_on_real(request: BackwardRequest) -> None:
    roots = [_real(root) for root in request.roots]
    inputs = None if request.inputs is None else [_real(tensor) for tensor in request.inputs]
    with gradients_restored_on_error(roots, inputs):
        torch.autograd.backward(
            roots, request.gradients, retain_graph=request.retain_graph, create_graph=request.create_graph, inputs=inputs
        )


def _leaves_behind(roots: Sequence[torch.Tensor]) -> list[torch.Tensor]:
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


@contextmanager
def gradients_restored_on_error(roots: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor] | None) -> Iterator[None]:
    """Rule 4: if backward raises, gradients are as they were."""
    targets = _leaves_behind(roots) if inputs is None else list(inputs)
    saved = [(t, t.grad, None if t.grad is None else t.grad.detach().clone()) for t in targets if t.is_leaf]
    try:
        yield
    except BaseException:
        for tensor, gradient, copy in saved:
            if gradient is not None and copy is not None:
                with torch.no_grad():
                    gradient.copy_(copy)
            tensor.grad = gradient
        raise
