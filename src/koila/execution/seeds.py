"""Seeds: the gradients with which a backward pass begins, as inputs of the program.

*Takes* a request or what was learned. *Gives* a tensor for each root, in the layout that the program was traced with.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from koila.analysis.trace import seed_layout
from koila.capture.gradients import BackwardRequest
from koila.execution.history import history_of
from koila.execution.jobs import Task
from koila.ir.node import Value
from koila.ir.prepass import PrePass, prepass_of
from koila.planning.decide import Decision

Seeds = Sequence[torch.Tensor]
Given = Sequence[torch.Tensor | None]
"""The seeds of a request, one for each of its roots; None where there is none."""


def seed_for(prepass: PrePass, given: torch.Tensor | None, number: float | torch.Tensor = 1.0) -> torch.Tensor:
    """The seed of a root in the layout that the program was traced with; `number` everywhere if none is given."""
    layout = seed_layout(prepass)
    if given is not None and given.dtype == layout.dtype and tuple(given.stride()) == layout.stride:
        return given
    made = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=layout.device)
    return made.fill_(number) if given is None else made.copy_(given)


def given_seeds(request: BackwardRequest) -> Given:
    """The seeds of a request, those of scalars made before anything runs."""
    return [_own_seed(*pair) for pair in zip(request.roots, request.gradients, strict=True)]


def _own_seed(root: Value | torch.Tensor, given: torch.Tensor | None) -> torch.Tensor | None:
    """For values that are not scalars eager's engine says what is missing."""
    shape = root.prepass.shape if isinstance(root, Value) else tuple(root.shape)
    if given is not None or any(size != 1 for size in shape):
        return given
    prepass = root.prepass if isinstance(root, Value) else prepass_of(root)
    return torch.ones(shape, dtype=prepass.dtype, device=prepass.device) if prepass.dtype.is_floating_point else None


def seeds_of(task: Task, decision: Decision, given: Given) -> Seeds:
    """A seed for each root: as requested, or as it came with the backward pass that followed the last time."""
    job = task.job
    if not decision.wanted.gradients:
        return ()
    roots = [job.graph.outputs[root] for root in job.demand.roots]
    if task.request is None:
        return [seed_for(root.prepass, None, history_of(job).seed) for root in roots]
    by_root: dict[Value, torch.Tensor] = {}
    for root, seed in zip(task.request.roots, given, strict=True):
        if isinstance(root, Value) and seed is not None:
            by_root[root] = by_root[root] + seed if root in by_root else seed
    return [seed_for(root.prepass, by_root[root]) for root in roots]
