"""Results: what a decision computes when it is carried out in chunks; nothing is committed yet.

*Takes* a `Decision` with a plan, the graph of this step, and seeds. *Gives* `Results`, or the chunks of one value.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from koila import events
from koila.analysis.trace import Joint
from koila.execution.offload import files_in, offload_in
from koila.execution.places import placed
from koila.execution.split_run import CompiledPlan, run_chunked, stream_chunked
from koila.ir.graph import Graph
from koila.planning.decide import Decision

Seeds = Sequence[torch.Tensor]
_NOTHING: Mapping[int, torch.Tensor] = {}


@dataclass(frozen=True)
class Results:
    """What a run computed."""

    outputs: dict[int, torch.Tensor]
    """By index of the graph's output."""
    gradients: list[torch.Tensor | None]
    """One for each leaf that the demand names, if gradients were wanted."""
    written: dict[int, torch.Tensor]
    """By index of the leaf, the new values of running statistics, if effects were wanted."""
    batch_dims: dict[int, int]
    """The batch dimension of each output that plainly carries the batch."""
    phase_seconds: tuple[float, ...] = ()
    """The time of each phase."""
    seconds: float = 0.0
    """The time of the run, all that runs before, between and after its phases included: by which plans are compared."""


_compiled: weakref.WeakKeyDictionary[Decision, CompiledPlan] = weakref.WeakKeyDictionary()


def compiled(decision: Decision) -> CompiledPlan:
    """The code of a decision's plan, made once."""
    found = _compiled.get(decision)
    if found is None:
        assert decision.plan is not None
        found = _compiled[decision] = CompiledPlan(decision.plan, decision.facts)
    return found


def run_split(
    decision: Decision, graph: Graph, seeds: Seeds = (), before: Mapping[int, torch.Tensor] = _NOTHING
) -> Results:
    """Compute what a decision wants, in chunks; leaves that were changed since are given, as they were, in `before`."""
    code, plan, wanted = compiled(decision), decision.plan, decision.wanted
    assert plan is not None
    joint, phase_seconds = plan.facts.joint, list[float]()
    num_calls, name = len(plan.facts.items), graph.name
    events.emit(events.RunStart(name, num_calls, decision.num_samples, plan.chunk_size, len(plan.phases)))
    started, compared = time.perf_counter(), _clock(decision)
    own = compared()
    with _offloading(decision, code), _placing_errors(graph):
        values = run_chunked(code, graph, inputs_of(joint, graph, seeds, before), phase_seconds)
    own = compared() - own
    events.emit(events.RunEnd(time.perf_counter() - started, len(plan.chunks)))
    first = joint.num_outputs
    last = first + len(joint.wrt)
    outputs = {index: values[index] for index in wanted.outputs}
    written = dict(zip(joint.written, values[last:], strict=True)) if wanted.effects else {}
    gradients = values[first:last] if wanted.gradients else []
    dims = {index: dim for index, dim in code.batch_dims.items() if index in outputs}
    return Results(outputs, gradients, written, dims, tuple(phase_seconds), own)


def _offloading(decision: Decision, code: CompiledPlan) -> AbstractContextManager[None]:
    """Where the values of a run wait that it offloads."""
    directory, is_first_run = decision.budget.offload, code.files is None
    if is_first_run:
        code.files = files_in(directory)
    room_bytes = 0 if decision.estimate is None else decision.estimate.copying_bytes
    return offload_in(directory, room_bytes, code.files, is_first_run)


def _clock(decision: Decision) -> Callable[[], float]:
    """What plans are timed by: where one thread does all of it and waits for no file, other work does not count."""
    is_alone = torch.get_num_threads() == 1 and decision.budget.offload is None
    return time.thread_time if is_alone else time.perf_counter


def stream_split(decision: Decision, graph: Graph) -> Iterator[torch.Tensor]:
    """The chunks of the one output that a decision wants."""
    assert decision.plan is not None
    with _placing_errors(graph):
        yield from stream_chunked(compiled(decision), graph, inputs_of(decision.plan.facts.joint, graph, ()))


@contextmanager
def _placing_errors(graph: Graph) -> Iterator[None]:
    """Errors say which call of the user's program they come from."""
    try:
        yield
    except Exception as error:
        found = placed(error, graph)
        if found is error:
            raise
        raise found from None


def inputs_of(joint: Joint, graph: Graph, seeds: Seeds, before: Mapping[int, torch.Tensor] = _NOTHING) -> list[Any]:
    """What a joint graph reads, in the order of its placeholders."""
    found: list[Any] = []
    for each in joint.inputs:
        if each.kind == "leaf":
            found.append(before.get(each.index, graph.leaves[each.index]).detach())
        elif each.kind == "draw":
            found.append(graph.nodes[each.index].draws[each.draw])
        else:
            found.append(seeds[each.index] if seeds else None)
    return found
