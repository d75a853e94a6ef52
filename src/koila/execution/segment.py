"""Segments: what came out of a split run, joined to PyTorch's autograd by one node.

*Takes* the results of a split run. *Gives* ordinary tensors with an ordinary `grad_fn` (Rule 7). The node's backward
hands over gradients that the run has computed already, or runs the program again in chunks. Hooks, GradScaler and
DistributedDataParallel see one backward in one engine call; the gradients' only references are handed over, so that
PyTorch steals them instead of copying.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import torch

Gradients = list[torch.Tensor | None]


class Rerun(Protocol):
    """The program of a segment, ready to be run again for its gradients."""

    def check_fresh(self) -> None:
        """Raise if an input was changed since the forward pass (Rule 5)."""

    def run(self, incoming: Sequence[torch.Tensor | None]) -> Gradients:
        """The gradients of the leaves for those of the outputs."""

    def differentiably(self, incoming: Sequence[torch.Tensor | None]) -> Gradients:
        """The same, as results of PyTorch's own autograd on the leaves."""


class Demanded:
    """What became of the gradients of a program the last time it ran; holds no tensors."""

    def __init__(self, guessed: bool) -> None:
        self.guessed = guessed
        """Whether gradients were computed before anybody asked."""
        self.asked = False
        """Whether a backward followed."""


class SegmentState:
    """How the gradients of one segment are obtained."""

    def __init__(self, rerun: Rerun, demanded: Demanded) -> None:
        self._rerun: Rerun | None = rerun
        self.demanded = demanded
        self.held: Gradients | None = None
        """Gradients for `seeds`, computed with the values."""
        self.seeds: tuple[torch.Tensor | None, ...] = ()
        """For each output the seed of `held`: None if it was not differentiated; a scalar one is given as tensor."""

    def gradients(self, incoming: Sequence[torch.Tensor | None]) -> Gradients:
        """The gradients for what the engine brings."""
        self.demanded.asked = True
        assert self._rerun is not None
        self._rerun.check_fresh()
        if torch.is_grad_enabled():  # create_graph=True: the gradients are to be differentiated again.
            return self._rerun.differentiably(incoming)
        scale = None if self.held is None else _common_scale(self.seeds, incoming)
        if self.held is None or scale is None:
            return self._rerun.run(incoming)
        gradients, self.held = self.held, None
        return gradients if scale == 1.0 else scaled(gradients, scale)

    def release(self) -> None:
        """Forget the program, as autograd frees what it saved."""
        self._rerun = self.held = None


def scaled(gradients: Gradients, factor: float) -> Gradients:
    """Gradients times a factor; in place where a gradient's memory is its own."""
    places = Counter(g.untyped_storage()._cdata for g in gradients if g is not None)
    return [None if g is None else _scaled(g, factor, places) for g in gradients]


def _scaled(gradient: torch.Tensor, factor: float, places: Counter[int]) -> torch.Tensor:
    storage = gradient.untyped_storage()
    alone = places[storage._cdata] == 1 and storage.nbytes() == gradient.numel() * gradient.element_size()
    return gradient.mul_(factor) if alone and not gradient._is_view() else gradient * factor


def _common_scale(seeds: Sequence[torch.Tensor | None], incoming: Sequence[torch.Tensor | None]) -> float | None:
    """The factor between the seeds of the held gradients and what arrived; None if there is no such factor."""
    factors = set()
    for seed, gradient in zip(seeds, incoming, strict=True):
        if (seed is None) != (gradient is None):
            return None
        if seed is None or gradient is None:
            continue
        if seed.numel() == 1:
            factors.add(float(gradient) / float(seed))
        elif torch.equal(seed, gradient):
            factors.add(1.0)
        else:
            return None
    return factors.pop() if len(factors) == 1 else None


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
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            state.release()
        handed = (None, None, *found)
        found.clear()
        return handed


def attach(state: SegmentState, values: list[torch.Tensor], leaves: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The values as results of one autograd node on the leaves."""
    with torch.enable_grad():
        return Segment.apply(state, values, *leaves)
