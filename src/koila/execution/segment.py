"""Segments: what came out of a split run, joined to PyTorch's autograd by one node.

*Takes* the results of a split run. *Gives* ordinary tensors with an ordinary `grad_fn` (Rule 7). The node's backward
hands over gradients that the run has computed already, or runs the program again in chunks. Hooks, GradScaler and
DistributedDataParallel see one backward in one engine call; the gradients' only references are handed over, so that
PyTorch steals them instead of copying.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from koila._torch import keeps_graph, will_run
from koila._torch.transforms import is_batched
from koila.execution.history import BackwardHistory
from koila.ir.graph import Graph
from koila.ir.node import Value

Gradients = list[torch.Tensor | None]


class _Alive:
    """Segments through which a backward pass may still come."""

    def __init__(self) -> None:
        self._states: weakref.WeakSet[SegmentState] = weakref.WeakSet()
        self._lock = threading.RLock()  # Ctrl-C right before it is released must not stop its own thread for good.

    def add(self, state: SegmentState) -> None:
        with self._lock:
            self._states.add(state)

    def all(self) -> list[SegmentState]:
        with self._lock:
            return list(self._states)


_alive = _Alive()


def is_passed_by(value: Value) -> bool:
    """Whether a backward pass may come that goes through a value inside of a segment, where no hook is called."""
    return any(state.passes_by(value) for state in _alive.all())


class Rerun(Protocol):
    """The program of a segment, ready to be run again for its gradients."""

    own: Graph
    """Its outputs are those of the segment."""

    @property
    def bytes_behind(self) -> int:
        """What a backward pass allocates behind its leaves, also if nothing runs again."""

    def check_fresh(self) -> None:
        """Raise if an input was changed since the forward pass (Rule 5)."""

    def freed(self) -> None:
        """A backward pass without `retain_graph` has gone through the segment."""

    def bytes_within(self, allowed: int) -> int:
        """What a run allocates within so many bytes, or what it would need; later runs keep to them."""

    def run(self, incoming: Sequence[torch.Tensor | None]) -> Gradients:
        """The gradients of the leaves for those of the outputs."""

    def whole(self, incoming: Sequence[torch.Tensor | None]) -> Gradients:
        """The same by PyTorch's own autograd on the whole program."""

    def differentiably(self, incoming: Sequence[torch.Tensor | None]) -> Gradients:
        """The same, as results of PyTorch's own autograd on the leaves."""


class SegmentState:
    """How the gradients of one segment are obtained."""

    def __init__(self, rerun: Rerun, history: BackwardHistory | None = None) -> None:
        self._rerun: Rerun | None = rerun
        self._history = history
        self.held: Gradients | None = None
        """Gradients for `seeds`, computed with the values."""
        self.seeds: tuple[torch.Tensor | None, ...] = ()
        """For each output the seed that `held` was computed with; None if it was not differentiated."""
        self.watching: list[weakref.ref[Any]] = []
        """Let results go with the last lazy tensors that are theirs."""
        _alive.add(self)

    def passes_by(self, value: Value) -> bool:
        """Whether the value is computed inside of the segment, and is none of its results."""
        own = None if self._rerun is None else self._rerun.own
        return own is not None and value in own.produced and value not in own.outputs

    @property
    def program(self) -> Graph | None:
        """The program that the segment stands for; None once it was released."""
        return None if self._rerun is None else self._rerun.own

    def gradients(self, incoming: Sequence[torch.Tensor | None]) -> Gradients:
        """The gradients for what the engine brings."""
        is_of_many = any(map(is_batched, incoming))
        if self._history is not None:
            self._history.followed(None if is_of_many else incoming[0])
        assert self._rerun is not None
        self._rerun.check_fresh()
        if torch.is_grad_enabled():  # create_graph=True: the gradients are to be differentiated again.
            return self._rerun.differentiably(incoming)
        if is_of_many:  # is_grads_batched=True: only PyTorch's own kernels know such tensors.
            return self._rerun.whole(incoming)
        if self.held is None or not all(map(_is_same, self.seeds, incoming)):
            self.held = None
            return self._rerun.run(incoming)
        gradients, self.held = self.held, None
        return gradients

    def rerun_bytes(self, allowed: int) -> int:
        """What a backward pass through it allocates if that has so many bytes; from now on it keeps to these."""
        if self._rerun is None:
            return 0
        return self._rerun.bytes_within(allowed) if self.held is None else self._rerun.bytes_behind

    def release(self, reaches_all: bool) -> None:
        """Forget the program, as autograd frees what it saved.

        If the backward pass does not reach all leaves (`inputs=`), it goes through some of the calls only.
        """
        if reaches_all and self._rerun is not None:
            self._rerun.freed()
        self._rerun = self.held = None


def _is_same(seed: torch.Tensor | None, incoming: torch.Tensor | None) -> bool:
    """Whether the gradients that are held were computed with what arrived; a seed is an input, never a factor."""
    if seed is None or incoming is None:
        return seed is incoming
    return seed is incoming or torch.equal(seed, incoming)


class Segment(torch.autograd.Function):
    """Inputs: the leaves that require grad. Outputs: values of the run."""

    @staticmethod
    def forward(ctx: Any, state: SegmentState, values: list[torch.Tensor], *leaves: torch.Tensor) -> Any:
        ctx.state = state
        # Something saved, so that autograd itself refuses a second backward.
        ctx.save_for_backward(torch.empty(0))
        ctx.mark_non_differentiable(*(v for v in values if not (v.is_floating_point() or v.is_complex())))
        ctx.set_materialize_grads(False)
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        _ = ctx.saved_tensors
        state: SegmentState = ctx.state
        found = state.gradients(gradients)
        if not keeps_graph():
            state.release(reaches_all=all(will_run(node) for node, _ in ctx.next_functions if node is not None))
        handed = (None, None, *found)
        found.clear()
        return handed


def attach(state: SegmentState, values: list[torch.Tensor], leaves: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The values as results of one autograd node on the leaves."""
    with torch.enable_grad():
        return Segment.apply(state, values, *leaves)
