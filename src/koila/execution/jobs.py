"""From what is asked for to a job: the only place where a demand is made up, for a run and for `koila.plan` alike.

*Takes* pending values, a backward request, what else is pending. *Gives* a `Task`: a `Job`, and the recorded values
that its results belong to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch

from koila._budget import Budget, current_budget, default_bytes
from koila._free import is_here
from koila.capture.gradients import BackwardRequest
from koila.capture.pending import address_of
from koila.errors import BudgetError
from koila.execution.behind import history_behind
from koila.execution.commit import leaves_behind
from koila.execution.evaluation import Evaluation
from koila.execution.history import expects_backward
from koila.execution.process_memory import left_for_live_bytes
from koila.execution.whole_run import written_leaves
from koila.ir.ambient import Context, current_context
from koila.ir.graph import Graph, collect, connected_leaves, written_storages
from koila.ir.job import CPU, Demand, Job, Wanted
from koila.ir.node import HOOKS, Node, Value
from koila.planning.decide import Decision
from koila.planning.devices import rules_for
from koila.planning.in_force import decision_for
from koila.planning.whole_peak import leaf_bytes

LARGE_BYTES = 128 << 20
"""Without a budget, programs that make less than this are run as they are, without looking at what is free."""


@dataclass(frozen=True, eq=False)
class Task:
    """A job with the values that it is about."""

    job: Job
    whole: Evaluation
    """For an unsplit run: everything that is pending, in eager's order; autograd's order of summation depends on it."""
    own: Evaluation
    """For a run in chunks: what is asked for, and what hangs together with it."""
    others: tuple[Task, ...] = ()
    """Programs with pending writes that share nothing with it: a run in chunks performs each for itself, before."""
    request: BackwardRequest | None = None
    given_bytes: int | None = None
    """The byte budget that the inputs were given: results hand it on to the programs that start from them."""
    is_plain: bool = False
    """Whether it runs as it is, without a decision: its job says nothing about gradients."""
    leaves_rest: bool = False
    """Whether an unsplit run leaves pending what it does not need: a mask that is looked at under a budget."""

    @property
    def streamed(self) -> Job:
        """The job of handing out the one wanted value chunk by chunk; nothing else is computed."""
        wanted = Wanted(self.job.wanted.outputs[:1], streamed=True)
        return replace(self.job, wanted=wanted, demand=Demand(), held=(), guessed=None, everything=None)

    def backward_peak_bytes(self, decision: Decision) -> int | None:
        """What an unsplit run and the backward pass of its roots allocate, where a decision projected both."""
        return decision.projection.peak_bytes if decision.projection is not None and self.job.demand.roots else None

    def required(self) -> set[Node]:
        """The calls that must succeed; whatever else is pending may fail: whoever asks for it sees the error."""
        return self._required

    @cached_property
    def _required(self) -> set[Node]:
        return set(collect([*self.own.wanted], [*(() if self.is_plain else self.own.effects)]).nodes)


@dataclass(frozen=True, eq=False)
class Pending:
    """What is recorded and has not run."""

    effects: Sequence[Node]
    """Writes to real tensors that are due."""
    nodes: Sequence[Node]
    """All calls, in order."""


def task_for(
    values: Sequence[Value], pending: Pending, request: BackwardRequest | None = None, budget: Budget | None = None,
    device: torch.device | None = None, detailed: bool = True,
) -> Task | None:  # fmt: skip
    """The task of computing values, and of differentiating them if a backward is requested; None: nothing is to run.

    Args:
        values: What is wanted.
        pending: What else is recorded.
        request: The backward pass that is asked for.
        budget: The budget to keep to; the one in force if it is not given.
        device: Where it runs; where its inputs are if it is not given.
        detailed: Whether the job is to be known in full although no budget asks for a decision.
    """
    due = [value for value in values if value.real is None or value.storage.writers]
    if not due and not pending.effects:
        return None
    needed = collect(due, pending.effects)
    if not needed.nodes:
        return None
    making = _Making(due, pending, request, needed, budget, device)
    return making.task() if making.is_limited or detailed else making.plain_task()


def decision_of(task: Task) -> Decision:
    """How a task runs; for `koila.plan` and for the run alike.

    Raises:
        BudgetError: Its budget, or that of a program that must run before it, is too small; the error names one that
            is enough for all of them.
    """
    refusals: list[BudgetError] = []
    decision = _decided(task, refusals)
    if decision is None or decision.how == "split":
        for other in task.others:
            _decided(other, refusals)
    if refusals:
        raise max(refusals, key=lambda refusal: refusal.needed_bytes or 0)
    assert decision is not None
    return decision


def _decided(task: Task, refusals: list[BudgetError]) -> Decision | None:
    try:
        return decision_for(task.job)
    except BudgetError as refusal:
        refusals.append(refusal)
        return None


class _Making:
    """A task on its way."""

    def __init__(
        self, due: list[Value], pending: Pending, request: BackwardRequest | None, needed: Graph,
        budget: Budget | None, device: torch.device | None,
    ) -> None:  # fmt: skip
        self.due, self.pending, self.request, self.needed = due, pending, request, needed
        self._named = budget, device
        # Eager would have run everything by now, in this order; autograd's order of summation depends on it.
        is_all = all(node in needed.positions for node in pending.nodes)
        self.everything = needed if is_all else collect(due, [*pending.effects, *pending.nodes])
        self.devices = devices_of(needed) if device is None else (device,)
        given = (collect(due, []) if due and pending.effects else needed).budgets
        self.given_bytes = min(given, default=None)
        if due and len(self.everything.budgets) > len(given):
            self._leave_out_other_budgets()
        if budget is None:
            budget = current_budget(given)
        self.budget = resolved(budget, partial(rough_bytes, self.everything), self.devices)
        self.leaves_rest = self.is_limited and not is_all and not _is_seen_by_others(needed)
        if self.leaves_rest:
            self.everything = self.needed

    @property
    def is_limited(self) -> bool:
        """Whether a chunk size or bytes are to be kept to."""
        return self.budget.chunk_size is not None or self.budget.allowed_bytes is not None

    def _leave_out_other_budgets(self) -> None:
        """Programs that share nothing with what is asked for and have another budget wait for their own run."""
        _, others = self.everything.apart()
        apart = (other for other in others if other.budgets and min(other.budgets) != self.given_bytes)
        left_out = {node for other in apart for node in other.nodes}
        self.needed = _without(self.needed, left_out)
        self.everything = _without(self.everything, left_out)

    def plain_task(self) -> Task:
        """A task that nobody has to decide about."""
        whole = self._evaluation(self.everything)
        job = Job(whole.graph, Demand(), Wanted(whole.asked), self.budget, self.devices)
        return Task(job, whole, whole, (), self.request, self.given_bytes, is_plain=True)

    def task(self) -> Task:
        """The task in full."""
        whole = self._evaluation(self.everything)
        graph, others = self._apart()
        own = self._evaluation(graph)
        tasks = (task_for([], Pending([n for n in g.nodes if n.due], ()), None, *self._named) for g in others)
        apart = tuple(task for task in tasks if task is not None)
        return Task(
            self._job(own, whole), whole, own, apart, self.request, self.given_bytes, leaves_rest=self.leaves_rest
        )

    def _evaluation(self, graph: Graph) -> Evaluation:
        return Evaluation(graph, self.due, {node for node in graph.nodes if node.due})

    def _apart(self) -> tuple[Graph, list[Graph]]:
        """What is asked for, with what the user holds of the same program; programs that have nothing to do with it."""
        own, others = self.needed.apart()
        if not own.nodes:  # Nothing but effects.
            return others[0], others[1:]
        effects = [node for node in self.pending.effects if node in own.positions]
        return collect([*self.due, *self._beside(own)], [*effects, *self._hooks(own)]), others

    def _hooks(self, own: Graph) -> list[Node]:
        """Hooks on values of the program, also those that were registered after the values were used."""
        hooks = (node for node in self.pending.nodes if node.func in HOOKS)
        return [node for node in hooks if any(value in own.produced for value in node.values())]

    def _beside(self, own: Graph) -> list[Value]:
        """Values that the user holds and that are made from the same calls: an accuracy beside a loss."""
        connected: set[Node] = set(own.nodes)
        found: list[Value] = []
        for node in self.pending.nodes:
            if node in connected or not any(value.node in connected for value in node.values()):
                continue
            connected.add(node)
            outputs = (node.output(index) for index in range(node.num_outputs))
            found += [v for v in outputs if v is not None and v.node is node and v.is_held and not v.requires_grad]
        return found

    def _job(self, own: Evaluation, whole: Evaluation) -> Job:
        demand = self._demand(own)
        gradients = bool(demand.roots) and self.request is not None
        wanted = Wanted(own.asked, gradients, effects=bool(own.effects))
        job = Job(
            own.graph, demand, wanted, self.budget, self.devices,
            everything=None if len(whole.graph.nodes) == len(own.graph.nodes) else whole.graph,
            held=own.held,
            must_run_whole=_why_whole(own, self.request),
            copied_bytes=self._copied_bytes(whole.graph),
            history=history_behind(own.graph, self.budget),
        )  # fmt: skip
        if demand.roots and not gradients and expects_backward(job):
            job = replace(job, guessed=replace(wanted, gradients=True))
        return job

    def _demand(self, own: Evaluation) -> Demand:
        """What to differentiate: the request's roots, or a scalar that may be differentiated later."""
        if not own.wrt:
            return Demand()
        roots = own.scalar_roots() if self.request is None else requested_roots(self.request, own.graph)
        return Demand(roots, own.wrt) if roots else Demand()

    def _copied_bytes(self, graph: Graph) -> int:
        """An unsplit run can be taken back: it copies statistics, and gradients that are there already."""
        if self.budget.allowed_bytes is None:
            return 0  # Nobody counts.
        copied = 2 * leaf_bytes(written_leaves(graph))
        if self.request is not None:
            copied += leaf_bytes(t for t in accumulating(self.request, graph) if t.grad is not None)
        return copied


def _is_seen_by_others(needed: Graph) -> bool:
    """Whether it matters to other pending calls when these run: for autograd's order, or because of their writes.

    If it does not, nothing else runs with them inside a budget. What runs early would leave a graph of eager's behind,
    which cannot be cut any more.
    """
    writes = any(node.due or node.inference.writes for node in needed.nodes)
    return writes or any(leaf.requires_grad for leaf in needed.leaves)


def _without(graph: Graph, left_out: set[Node]) -> Graph:
    return Graph(tuple(node for node in graph.nodes if node not in left_out), graph.outputs)


def requested_roots(request: BackwardRequest, graph: Graph) -> tuple[int, ...]:
    """Outputs that a request differentiates; none if a seed is missing or does not fit: eager's engine then says so."""
    place = {value: index for index, value in enumerate(graph.outputs)}
    found: list[int] = []
    for root, seed in zip(request.roots, request.gradients, strict=True):
        if isinstance(root, Value) and root in place:
            shape = root.prepass.shape
            if any(size != 1 for size in shape) if seed is None else tuple(seed.shape) != shape:
                return ()
            found.append(place[root])
    return tuple(dict.fromkeys(found))


def accumulating(request: BackwardRequest, graph: Graph) -> list[torch.Tensor]:
    """Tensors whose .grad a backward pass may change."""
    reals = [root.real if isinstance(root, Value) else root for root in request.roots]
    inputs = [real for real in (*graph.leaves, *reals) if real is not None and real.requires_grad]
    return [real for real in inputs if real.is_leaf] + leaves_behind(inputs)


def _why_whole(own: Evaluation, request: BackwardRequest | None) -> str | None:
    """Why a program cannot be cut, where no trace is needed to know."""
    graph = own.graph
    if own.has_reshaped_views:
        return "a view shares memory with a value whose shape was changed in place"
    if own.has_written_aliases:
        return "a write gave a gradient to what detach() took from a value of the same memory"
    if _writes_to_overlaps(graph):
        return "a value whose elements share memory (expand, unfold) is written to through a view"
    if any(node.func in HOOKS for node in graph.nodes):
        return "hooks on lazy values see whole gradients"
    marked = [node.operands[0] for node in graph.nodes if node.func is torch.Tensor.requires_grad_]
    if any(isinstance(value, Value) and value.is_held for value in marked):
        return "requires_grad_() on a lazy value makes a leaf that collects its own gradient"
    if marked and any(value.requires_grad and not connected_leaves(graph, (value,)) for value in graph.outputs):
        return "requires_grad_() on a lazy value makes the only leaf of a result that requires grad"
    if request is not None and request.create_graph:
        return "create_graph=True needs the graph of the whole run"
    if _reads_statistics(graph):
        return "running statistics are updated and read, or were updated already: a run again would update them twice"
    return _why_whole_now({node.context for node in graph.nodes})


def _writes_to_overlaps(graph: Graph) -> bool:
    """Whether a write to one element changes others: a trace, which has no memory, would not see that."""
    written = written_storages(graph)
    values = (value for node in (graph.nodes if written else ()) for value in node.values())
    return any(value.storage in written and value.prepass.overlaps for value in values)


def _reads_statistics(graph: Graph) -> bool:
    """Whether a call reads what another one writes, or updates what one that has run already has updated."""
    done = {address_of(operand) for node, operand in _statistics(graph) if not node.due}
    due = {address_of(operand) for node, operand in _statistics(graph) if node.due}
    others = (
        address_of(operand)
        for node in (graph.nodes if done or due else ())
        for index, operand in enumerate(node.operands)
        if index not in node.inference.hidden_writes
    )
    return bool(done & due) or any(address is not None and address in done | due for address in others)


def _statistics(graph: Graph) -> Iterator[tuple[Node, Value | torch.Tensor]]:
    """Calls that update running statistics, with these."""
    return ((node, node.operands[index]) for node in graph.nodes for index in node.inference.hidden_writes)


def _why_whole_now(recorded: set[Context]) -> str | None:
    """What is in force now, or was when calls were recorded, that a run in chunks would not respect."""
    now = current_context()
    if now.anomaly or any(context.anomaly for context in recorded):
        return "anomaly mode looks at the gradient of every call"
    if len({context.default_dtype for context in recorded}) > 1:
        return "calls were recorded under several default dtypes"
    if len({context.stream for context in recorded}) > 1:
        return "calls were recorded on several streams of the accelerator"
    if any(context.kernels != now.kernels for context in recorded):
        return "settings of PyTorch's kernels were changed after calls were recorded"
    return None


def devices_of(graph: Graph) -> tuple[torch.device, ...]:
    """Where a program runs: on the accelerators that its inputs are on, in the order of these; else on the CPU."""
    found = dict.fromkeys(leaf.device for leaf in graph.leaves)
    return tuple(device for device in found if device.type != "cpu") or (CPU,)


# Budgets as bytes.


def resolved(budget: Budget, rough: Callable[[], int], devices: Sequence[torch.device]) -> Budget:
    """The budget as a chunk size, as bytes that a run may allocate now, or as no limit; `rough` as `rough_bytes`."""
    if budget.chunk_size is not None:
        return budget
    limits = [_limit(budget, rough, device) for device in devices]
    limit = min((each for each in limits if each is not None), default=None)
    is_share = budget.has_shares and devices[0].type != "cpu"
    depends_on_now = budget.is_default or budget.total_bytes is not None or is_share
    if limit is not None and depends_on_now and is_here(devices[0]):
        # What is free changes all the time: plans are made for steps of an eighth.
        step = 1 << max(0, limit.bit_length() - 4)
        limit = limit // step * step
    named = None if limit is None else max(1, limit)
    is_grown = named is not None and bool(budget.held_at_entry) and devices[0].type == "cpu"
    allowed = budget.less_growth(named) if is_grown and named is not None else named
    return replace(
        budget, allowed_bytes=allowed, most_bytes=None if allowed == named else named, total_bytes=None,
        reserved_bytes=0, allowed_share=None, total_share=None,
    )  # fmt: skip


def _limit(budget: Budget, rough: Callable[[], int], device: torch.device) -> int | None:
    """The bytes that a run may allocate now on a device."""
    on = None if device.type == "cpu" else device
    limit = _default_limit(budget, rough(), on) if budget.is_default else budget.limit(on)
    if limit is not None and budget.total_bytes is not None and not is_here(device):
        limit -= rules_for(device.type).context_bytes
    return limit


def rough_bytes(graph: Graph) -> int:
    """More than a program needs: all that it makes, twice, and its gradients."""
    made = sum(output.prepass.num_bytes for node in graph.nodes for output in node.inference.outputs)
    return 2 * made + leaf_bytes(leaf for leaf in graph.leaves if leaf.requires_grad)


def _default_limit(budget: Budget, rough: int, device: torch.device | None) -> int | None:
    """What is free, if a program could need more than that."""
    if rough <= LARGE_BYTES:
        return None
    free = default_bytes(budget.reserved_bytes, device)
    if rough <= free:
        return None
    return free if device is not None else left_for_live_bytes(budget.reserved_bytes)


def held_bytes(budget: Budget, devices: Sequence[torch.device]) -> int:
    """How much may be kept of values that nobody asked for but the user still holds, outside of a decision."""
    return min(_held_on(budget, device) for device in devices)


def _held_on(budget: Budget, device: torch.device) -> int:
    limit = default_bytes(budget.reserved_bytes, device) if budget.is_default else budget.limit(device)
    return (default_bytes(budget.reserved_bytes, device) if limit is None else limit) // 4
