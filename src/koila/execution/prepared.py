"""Prepared runs: a program that ran whole before, and is asked for the same again, runs without being looked at.

*Takes* the log of a thread whose entries are a known program, and what is asked of it. *Gives* the calls to make and
the results to bind, as the ordinary run of the same program found them: which calls lead to something, what is needed
afterwards, when each value dies, how it was decided. Nothing here decides; a run is prepared by watching one.

A prepared run is used while all that the ordinary one looked at is the same: the path through the trie (so calls,
layouts, aliases), what is asked for, which results the user holds, the budget, what a run must copy to be taken back,
and that inputs are as they were when their calls were recorded (Rule 5). Else the program gets nodes and runs as usual.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from koila._budget import current_budget, is_any_named, last_closed
from koila._torch import has_modes, is_dispatch_ordinary, saved_tensors_hooks
from koila._torch.dynamo import in_compiled_code
from koila._torch.transforms import active_transform
from koila.capture.log import Entry, Log, held_numbers
from koila.capture.template import BOUND, REAL
from koila.execution.commit import leaves_behind
from koila.execution.jobs import LARGE_BYTES, Task, resolved, rough_bytes
from koila.ir.ambient import Context
from koila.ir.node import Node, Value, function_name
from koila.ir.trie import TrieNode
from koila.planning.decide import Decision, any_forced, num_changes
from koila.planning.eager_history import OWN_NODE
from koila.planning.whole_peak import leaf_bytes

MAX_RUNS = 8
"""So many demands are remembered for a program."""
Place = tuple[int, int]
"""An entry, and a place among what it captured."""


@dataclass(frozen=True, eq=False, slots=True)
class PreparedCall:
    """One call of a prepared run."""

    entry: int
    dying: tuple[int, ...]
    """Values, by number, that nobody needs after it."""


@dataclass(frozen=True, eq=False, slots=True)
class PreparedRun:
    """How a known program runs."""

    calls: tuple[PreparedCall, ...]
    needed: tuple[int, ...]
    """The numbers of values that are bound afterwards."""
    places: tuple[tuple[int, int], ...]
    """(entry, which result of the entry) of each value of the program."""
    required: frozenset[int]
    """Entries that must succeed; whoever asks for the results of another one sees its error."""
    written: tuple[Place, ...]
    """Running statistics that it writes to."""
    bound: tuple[Place, ...]
    """Inputs that are values."""
    budgets: tuple[int | None, ...]
    """The byte budgets that these were given."""
    reals: tuple[Place, ...]
    """All inputs, as tensors."""
    context: Context
    """The ambient state of all of its calls."""
    decision: Decision
    """How it was decided to run; always whole."""
    copied_bytes: int
    """Bytes of gradients and statistics that the run copied, so that it could be taken back."""
    rough_bytes: int
    """More than it may need; see `koila.execution.jobs`."""
    devices: tuple[torch.device, ...]
    """Where it runs."""
    num_changes: int
    """How often decisions had been changed when it was prepared."""
    counts: Counter[str]
    """What is counted when it has run."""

    backward_peak_bytes: int | None
    """What it and the backward pass of its scalars allocate at their peak, where that was projected."""

    @property
    def given_bytes(self) -> int | None:
        """The smallest byte budget that an input was given."""
        return min((budget for budget in self.budgets if budget is not None), default=None)

    def applies(self, entries: Sequence[Entry], is_backward: bool) -> bool:
        """Whether the program in these entries may run like this."""
        budgets = [entries[entry].captured[place].budget for entry, place in self.bound]
        if tuple(budgets) != self.budgets:
            return False
        for call in self.calls:
            entry = entries[call.entry]
            if not entry.template.is_fresh(entry.captured):
                return False
        if not self._is_within(self.given_bytes):
            return False
        if self.decision.budget.is_default:
            scope = last_closed()  # What was recorded in a scope that is closed by now is warned of.
            return scope is None or entries[0].sequence > scope.closed
        return self._is_copied_alike(entries, self.changing(entries) if is_backward else ())

    def _is_within(self, given: int | None) -> bool:
        """Whether the budget in force is the one that it was prepared for."""
        budget = self.decision.budget
        if given is None and self.rough_bytes <= LARGE_BYTES and not is_any_named():
            return budget.is_default and budget.allowed_bytes is None and not budget.process
        now = resolved(current_budget([] if given is None else [given]), lambda: self.rough_bytes, self.devices)
        return now == budget and self.num_changes == num_changes()

    def _is_copied_alike(self, entries: Sequence[Entry], changing: Sequence[torch.Tensor]) -> bool:
        """Whether a run must copy as much, to be taken back, as when the budget was found to be enough."""
        if self.decision.budget.allowed_bytes is None:
            return True  # Nobody counts.
        if any(tensor.grad_fn.name() == OWN_NODE for tensor in self._made(entries)):
            return False  # Whether that program runs again, and what it takes then, is asked every time.
        copied = 2 * leaf_bytes(self.written_tensors(entries))
        return self.copied_bytes == copied + leaf_bytes(t for t in changing if t.grad is not None)

    def written_tensors(self, entries: Sequence[Entry]) -> list[torch.Tensor]:
        """Running statistics that it writes to."""
        found = (entries[entry].captured[place] for entry, place in self.written)
        return list({id(tensor): tensor for tensor in found}.values())

    def changing(self, entries: Sequence[Entry]) -> list[torch.Tensor]:
        """Tensors whose `.grad` a backward pass may change."""
        made = self._made(entries)
        leaves = [real for real in self._inputs_with_grad(entries) if real.is_leaf]
        return leaves + (leaves_behind(made) if made else [])

    def _made(self, entries: Sequence[Entry]) -> list[Any]:
        """Inputs that have a history."""
        return [real for real in self._inputs_with_grad(entries) if not real.is_leaf]

    def _inputs_with_grad(self, entries: Sequence[Entry]) -> Iterable[Any]:
        reals = (entries[entry].captured[place] for entry, place in self.reals)
        return {id(real): real for real in reals if real.requires_grad}.values()


class Question:
    """What is asked of the program in a log: a value, with or without a backward pass."""

    def __init__(self, log: Log, lazy: Any, backward: bool) -> None:
        assert log.trie.current is not None
        self.node: TrieNode = log.trie.current
        self.is_backward = backward
        self.key: Hashable = (backward, lazy._name - log.base, held_numbers(log, lazy))
        self.run: PreparedRun | None = self.node.runs.get(self.key)
        """How it ran before; None if it is not prepared."""
        self._epoch = log.epoch
        self._entries: dict[int, int] = {}
        self._templates: list[Any] = []
        self._budgets: dict[Place, int | None] = {}

    def watch(self, entries: Sequence[Entry]) -> None:
        """The program gets nodes and runs as usual: it will be told by these entries what ran."""
        self._entries = {entry.sequence: number for number, entry in enumerate(entries)}
        self._templates = [entry.template for entry in entries]
        places = self._inputs(range(len(entries)), {BOUND: 0})
        self._budgets = {(entry, place): entries[entry].captured[place].budget for entry, place in places}

    def learn(self, task: Task, decision: Decision, required: set[Node]) -> None:
        """The ordinary run of the same program has succeeded, whole; from now on it is prepared.

        Args:
            task: What ran.
            decision: How it was decided.
            required: The calls that had to succeed.
        """
        if len(self.node.runs) >= MAX_RUNS:
            self.node.runs.clear()
        found = self._prepared(task, decision, required)
        if found is not None:
            self.node.runs[self.key] = found

    def _prepared(self, task: Task, decision: Decision, required: set[Node]) -> PreparedRun | None:
        graph, job = task.whole.graph, task.job
        order = [self._entries.get(node.sequence) for node in graph.nodes]
        contexts = {node.context for node in graph.nodes}
        needed = [self._number(value) for value in task.whole.needed]
        if None in order or None in needed or len(contexts) != 1 or decision.fallback is not None:
            return None
        if job.history != (0, 0) or any(context.anomaly for context in contexts):
            return None
        entries = [entry for entry in order if entry is not None]
        numbers = sorted(number for number in needed if number is not None)
        bound = tuple(self._inputs(entries, {BOUND: 0}))
        return PreparedRun(
            self._calls(entries, set(numbers)), tuple(numbers), self._places(),
            frozenset(n for n, node in zip(entries, graph.nodes, strict=True) if node in required),
            tuple(self._written(entries)), bound, tuple(self._budgets[place] for place in bound),
            tuple(self._inputs(entries, {BOUND: 1, REAL: 0})), contexts.pop(), decision, job.copied_bytes,
            rough_bytes(graph), job.devices, num_changes(), self._counts(entries), task.backward_peak_bytes(decision),
        )  # fmt: skip

    def _calls(self, entries: Sequence[int], needed: set[int]) -> tuple[PreparedCall, ...]:
        seen, calls = set(needed), list[PreparedCall]()
        for entry in reversed(entries):
            template = self._templates[entry]
            results = range(template.first, template.first + len(template.makers))
            fresh = {number for number in (*template.positions, *results) if number >= 0 and number not in seen}
            seen |= fresh
            calls.append(PreparedCall(entry, tuple(sorted(fresh))))
        return tuple(reversed(calls))

    def _number(self, value: Value) -> int | None:
        """The number of a value that must be bound; None if it is not of this program, or kept on purpose."""
        epoch, number = value.position
        return number if epoch == self._epoch and not value.keep else None

    def _places(self) -> tuple[tuple[int, int], ...]:
        found: list[tuple[int, int]] = []
        for entry, template in enumerate(self._templates):
            found += [(entry, index) for index in range(len(template.makers))]
        return tuple(found)

    def _written(self, entries: Sequence[int]) -> Iterable[Place]:
        for entry in entries:
            template = self._templates[entry]
            yield from ((entry, template.operands[index][1]) for index in template.inference.hidden_writes)

    def _inputs(self, entries: Sequence[int], offsets: dict[int, int]) -> Iterable[Place]:
        for entry in entries:
            for kind, place in self._templates[entry].operands:
                if kind in offsets:
                    yield entry, place + offsets[kind]

    def _counts(self, entries: Sequence[int]) -> Counter[str]:
        made = Counter("executed::" + function_name(self._templates[entry].func) for entry in entries)
        recorded = Counter("lazy::" + function_name(template.func) for template in self._templates)
        others = {
            "nodes_executed": len(entries),
            "runs": 1,
            "runs::whole": 1,
            "prepared runs": 1,
            "trie::hit": len(self._templates),
        }
        return made + recorded + Counter(others)


def question_of(log: Log, lazy: Any, backward: bool) -> Question | None:
    """What is asked of the program in a log; None if it must be looked at in any case."""
    if lazy._log is not log or not log.is_whole or any_forced():
        return None
    if active_transform() is not None or saved_tensors_hooks(True) is not None or in_compiled_code():
        return None
    if torch.is_inference_mode_enabled() or has_modes() or not is_dispatch_ordinary():
        return None
    return Question(log, lazy, backward)
