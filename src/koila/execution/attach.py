"""Attaching: the results of a split run become ordinary tensors on PyTorch's autograd graph (Rule 7).

*Takes* a task, the decision that ran, and its `Results`. *Gives* the tensors of its values; those that require grad are
results of autograd nodes on their leaves, whose backward hands over held gradients or runs the program again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from koila import events
from koila._torch import accumulation_hooks, hash_tensor, storage_key, tensor_hooks
from koila.capture.pending import address_of, recorder
from koila.errors import BudgetError, StaleInputError
from koila.execution.behind import history_behind
from koila.execution.eager_errors import GradientCheck
from koila.execution.history import history_of
from koila.execution.letting_go import watched
from koila.execution.out_of_memory import run_until_it_fits
from koila.execution.results import Results, run_split
from koila.execution.seeds import Seeds, seed_for
from koila.execution.segment import Gradients, SegmentState, attach
from koila.execution.whole_run import gradients_whole
from koila.ir.graph import Graph, collect, connected_leaves, connected_nodes
from koila.ir.job import Demand, Job, Wanted
from koila.ir.node import Value, version_of
from koila.ir.replay import replay_node
from koila.ir.second_order import reached_leaves
from koila.ir.source import user_site
from koila.ir.tree import leaves as leaves_of
from koila.planning.decide import Decision
from koila.planning.in_force import decision_for


def attached(job: Job, decision: Decision, results: Results, seeds: Seeds) -> dict[Value, torch.Tensor]:
    """The outputs of a run as ordinary tensors."""
    graph = job.graph
    reruns: list[_Rerun] = []
    bound = {graph.outputs[i]: _as_recorded(graph.outputs[i], real) for i, real in results.outputs.items()}
    for group in _groups(job, results):
        is_root = set(group) <= set(job.demand.roots)
        own = _own_graph(graph, group)
        connected = connected_nodes(own, own.outputs)
        leaves = _reached(own, connected_leaves(own, own.outputs, connected))
        if not leaves:
            continue
        values = [_fresh(results.outputs[index], graph.leaves) for index in group]
        reruns.append(_rerun(job, decision, group, own, leaves))
        reruns[-1].check = GradientCheck(own, connected)
        state = SegmentState(reruns[-1], history_of(job) if is_root else None)
        if is_root and results.gradients:
            _hold(state, job, results, own, leaves)
            state.seeds = tuple(seeds[job.demand.roots.index(index)] for index in group)
        tensors = attach(state, values, _in_order([own.leaves[leaf] for leaf in leaves], graph, decision))
        bound.update(zip((graph.outputs[index] for index in group), tensors, strict=True))
        state.watching = [each for index in group for each in watched(graph.outputs[index], own)]
    for rerun in reruns:
        rerun.check.watch(bound)
    return bound


def _as_recorded(value: Value, result: torch.Tensor) -> torch.Tensor:
    """A result of a call in inference mode is an inference tensor, which later code may not differentiate."""
    if not value.prepass.inference or result.is_inference():
        return result
    with torch.inference_mode():
        shell = torch.empty(0, dtype=result.dtype, device=result.device)
        return shell.set_(result.untyped_storage(), result.storage_offset(), result.shape, result.stride())


def _groups(job: Job, results: Results) -> list[tuple[int, ...]]:
    """Outputs that share an autograd node: the roots of the demand, and results of one call, as in eager."""
    roots = tuple(index for index in job.demand.roots if index in results.outputs)
    siblings: dict[Any, list[int]] = {}
    for index in results.outputs:
        if job.graph.outputs[index].requires_grad and index not in roots:
            siblings.setdefault(job.graph.outputs[index].node, []).append(index)
    return [*([roots] if roots else []), *(tuple(group) for group in siblings.values())]


def _reached(own: Graph, leaves: tuple[int, ...]) -> tuple[int, ...]:
    """The leaves of a segment: autograd calls a hook on each of them, also if no gradient comes to it."""
    return reached_leaves(own, leaves) if any(tensor_hooks(own.leaves[leaf]) for leaf in leaves) else leaves


def _in_order(leaves: list[torch.Tensor], graph: Graph, decision: Decision) -> list[torch.Tensor]:
    """Leaves that receive their gradients in eager's order, if a hook of the user's could tell.

    A segment hands over all gradients at once. Autograd goes on with the node that was made last, so each leaf gets a
    node of its own, made in the opposite order.
    """
    if decision.facts is None or sum(bool(tensor_hooks(leaf) or accumulation_hooks(leaf)) for leaf in leaves) < 2:
        return leaves
    place = {id(graph.leaves[leaf]): number for number, leaf in enumerate(decision.facts.joint.completed)}
    last_first = sorted(leaves, key=lambda leaf: place.get(id(leaf), len(place)), reverse=True)
    with torch.enable_grad():
        nodes = {id(leaf): leaf.view_as(leaf) for leaf in last_first}
    return [nodes[id(leaf)] for leaf in leaves]


def _hold(state: SegmentState, job: Job, results: Results, own: Graph, leaves: tuple[int, ...]) -> None:
    """The node holds the only references to the gradients."""
    chosen = {id(job.graph.leaves[n]): g for n, g in zip(job.demand.wrt, results.gradients, strict=True)}
    state.held = [chosen[id(own.leaves[leaf])] for leaf in leaves]
    results.gradients.clear()


def _rerun(
    job: Job, decision: Decision, group: tuple[int, ...], own: Graph, leaves: tuple[int, ...]
) -> _Rerun:  # fmt: skip
    """The program of a group, for a later backward pass. The roots' is the one that would have served a guess."""
    budget = replace(decision.budget, tune=job.budget.tune)
    if group == job.demand.roots:
        wanted = replace(job.wanted, gradients=True)
        again = replace(job, wanted=wanted, guessed=None, held=(), everything=None, budget=budget, copied_bytes=0)
        return _Rerun(again, own, leaves)
    wrt = tuple(index for index, leaf in enumerate(own.leaves) if leaf.requires_grad)
    demand = Demand(tuple(range(len(own.outputs))), wrt)
    again = Job(own, demand, Wanted((), gradients=True), budget, job.devices, history=job.history)
    return _Rerun(again, own, leaves)


def _fresh(value: torch.Tensor, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    """A result that is not an input of the program itself: autograd's node must own its outputs."""
    storage = storage_key(value.untyped_storage())
    return value.clone() if any(storage_key(leaf.untyped_storage()) == storage for leaf in leaves) else value


def _own_graph(graph: Graph, group: tuple[int, ...]) -> Graph:
    """The part of a program that some of its outputs need: a segment depends on nothing else."""
    values = [graph.outputs[index] for index in group]
    needed = collect(values, [])
    if len(needed.nodes) == len(graph.nodes) and len(values) == len(graph.outputs):
        return graph
    return Graph(tuple(node for node in needed.nodes if node in graph.positions), tuple(values))


def _read_of(leaf: torch.Tensor, graph: Graph) -> list[torch.Tensor]:
    """What a program reads of a leaf: views, where each of its calls takes one; else all of it."""
    found: list[torch.Tensor] = []
    for node in graph.nodes:
        reals = [operand.real if isinstance(operand, Value) else operand for operand in node.operands]
        if not any(real is leaf for real in reals):
            continue
        if len(reals) > 1 or node.inference.writes or not all(output.is_view for output in node.inference.outputs):
            return [leaf]
        with torch.no_grad():
            found += leaves_of(replay_node(node, lambda each: each.real if isinstance(each, Value) else each))
    return found


def _digest(tensors: Sequence[torch.Tensor]) -> tuple[float, ...]:
    """Three numbers for each that change with the data, whatever is done to all of it alike."""
    return tuple([number for tensor in tensors for number in _numbers(tensor)])


def _numbers(leaf: torch.Tensor) -> tuple[float, ...]:
    data = leaf.detach()
    data = torch.view_as_real(data.resolve_conj()) if data.is_complex() else data
    total = data.sum(dtype=torch.float64 if data.is_floating_point() else torch.int64)
    norm = torch.linalg.vector_norm(data, dtype=torch.float64) if data.is_floating_point() else total
    return total.item(), norm.item(), hash_tensor(data).item()


class _Rerun:
    """A segment's program, run again in chunks for any gradients of its outputs."""

    def __init__(self, job: Job, own: Graph, leaves: tuple[int, ...]) -> None:
        self.job, self.own, self.leaves = job, own, leaves
        self.check = GradientCheck(own, set())
        self.versions = [version_of(leaf) for leaf in own.leaves]
        self._copies: dict[int, torch.Tensor] = {}
        """Leaves without gradients as they were before somebody wrote to them, by index."""
        self._digests: dict[int, tuple[float, ...]] = {}
        """Of leaves that somebody may have written without a version since, by index."""
        self._places: dict[int | None, list[int]] = {}
        """By address of their memory, the leaves; one that gets other memory has changed, whatever is written."""
        for index, leaf in enumerate(own.leaves):
            self._places.setdefault(address_of(leaf), []).append(index)
        recorder.note_rerun(self)

    def before_write(self, address: int, unseen: bool) -> None:
        """A leaf may be written: a running average between a loss and its backward pass, say.

        Args:
            address: Where the written memory is.
            unseen: Whether its version will not tell, because somebody has taken `.data`.
        """
        for index in self._places.get(address, ()):
            leaf = self.own.leaves[index]
            if unseen:
                self._digests.setdefault(index, self._read_now(index))
            elif index not in self._copies and not leaf.requires_grad and not self._has_changed(index):
                events.count("segment::copied", site=user_site())
                self._copies[index] = leaf.detach().clone()

    def _read_now(self, index: int) -> tuple[float, ...]:
        return _digest(_read_of(self.own.leaves[index], self.own))

    def _has_changed(self, index: int) -> bool:
        return version_of(self.own.leaves[index]) != self.versions[index]

    def _is_known(self, index: int) -> bool:
        """Whether a changed leaf can be had as it was: it was written to, and not replaced."""
        before, now = self.versions[index], version_of(self.own.leaves[index])
        return index in self._copies and before is not None and now is not None and before[1:] == now[1:]

    def check_fresh(self) -> None:
        changed = [index for index in range(len(self.versions)) if self._has_changed(index)]
        digests = ((index, digest) for index, digest in self._digests.items() if index not in changed)
        is_stale = not all(map(self._is_known, changed))
        if is_stale or any(self._read_now(index) != digest for index, digest in digests):
            raise StaleInputError(
                "an input was changed after the forward pass and before the backward pass that needs it",
                where=f"recorded at {self.own.nodes[0].site}, run at {user_site()}",
                hint="change it after backward()",
            )
        for _, error in self.own.rebound():
            raise error
        self.check.raise_eagers_error([self.own.leaves[index] for index in changed])

    def _before(self, graph: Graph) -> dict[int, torch.Tensor]:
        """Changed leaves of a program as they were. Autograd needs nothing of them, or it would have refused."""
        copies = {id(self.own.leaves[i]): copy for i, copy in self._copies.items() if self._has_changed(i)}
        return {i: copies[id(leaf)] for i, leaf in enumerate(graph.leaves) if id(leaf) in copies} if copies else {}

    def freed(self) -> None:
        """Autograd has freed what it saved for these calls."""
        self.check.freed()

    @property
    def bytes_behind(self) -> int:
        return self.job.history[1]

    def bytes_within(self, allowed: int) -> int:
        budget = replace(self.job.budget, allowed_bytes=max(1, allowed))
        self.job = replace(self.job, budget=budget, history=history_behind(self.job.graph, budget))
        try:
            projection = decision_for(self.job).projection
        except BudgetError as refusal:
            return refusal.needed_bytes or allowed
        return 0 if projection is None else projection.peak_bytes

    def run(self, incoming: Sequence[torch.Tensor | None]) -> Gradients:
        events.count("segment::rerun")
        outputs = [self.job.graph.outputs[root] for root in self.job.demand.roots]
        if any(gradient is None for gradient in incoming):
            self._leave_out(incoming)
            outputs = [self.job.graph.outputs[root] for root in self.job.demand.roots]
        given = [gradient for gradient in incoming if gradient is not None]
        seeds = [seed_for(value.prepass, seed) for value, seed in zip(outputs, given, strict=True)]
        found = run_until_it_fits(self.job, lambda decision: self._carry_out(decision, outputs, seeds))
        chosen = {id(self.job.graph.leaves[n]): g for n, g in zip(self.job.demand.wrt, found, strict=True)}
        return [chosen[id(self.own.leaves[leaf])] for leaf in self.leaves]

    def _leave_out(self, incoming: Sequence[torch.Tensor | None]) -> None:
        """Outputs to which no gradient came are not differentiated."""
        roots = zip(self.job.demand.roots, incoming, strict=True)
        chosen = tuple(root for root, gradient in roots if gradient is not None)
        self.job = replace(self.job, demand=replace(self.job.demand, roots=chosen))

    def _carry_out(self, decision: Decision, outputs: Sequence[Value], seeds: Seeds) -> Gradients:
        if decision.how == "split":
            return run_split(decision, self.job.graph, seeds, self._before(self.job.graph)).gradients
        if decision.fallback is not None:
            count_fallback(decision.fallback)
        before = self._before(self.job.graph)
        return gradients_whole(self.job.graph, outputs, seeds, self.job.demand.wrt, before)

    def whole(self, incoming: Sequence[torch.Tensor | None]) -> Gradients:
        return self._whole(incoming, "is_grads_batched=True needs the graph of the whole run", create_graph=False)

    def differentiably(self, incoming: Sequence[torch.Tensor | None]) -> Gradients:
        return self._whole(incoming, "create_graph=True needs the graph of the whole run", create_graph=True)

    def _whole(self, incoming: Sequence[torch.Tensor | None], reason: str, create_graph: bool) -> Gradients:
        events.count("segment::rerun")
        count_fallback(reason)
        roots = [value for value, g in zip(self.own.outputs, incoming, strict=True) if g is not None]
        seeds = [g for g in incoming if g is not None]
        return gradients_whole(self.own, roots, seeds, self.leaves, self._before(self.own), create_graph)


def count_fallback(reason: str) -> None:
    """Something runs whole although the budget asks for a cut (Rule 6)."""
    site = str(user_site())
    events.count(f"fallback::{reason}", site=site)
    events.emit(events.Fallback("split run", reason, site))
