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
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from koila import events
from koila._budget import current_budget, is_any_named, last_closed
from koila._torch import is_state_ordinary
from koila._torch.transforms import is_watched
from koila.capture.log import Entry, Log, held_numbers
from koila.capture.template import BOUND
from koila.execution.commit import leaves_behind
from koila.execution.jobs import LARGE_BYTES, Task, resolved, rough_bytes
from koila.execution.prepared_code import Place, RunCode, Writer
from koila.ir.ambient import Context
from koila.ir.node import Node, Value, function_name
from koila.ir.trie import TrieNode
from koila.planning.decide import Decision
from koila.planning.eager_history import OWN_NODE
from koila.planning.in_force import any_forced, num_changes
from koila.planning.whole_peak import leaf_bytes

MAX_RUNS = 8
"""So many demands are remembered for a program."""


@dataclass(frozen=True, eq=False, slots=True)
class PreparedCall:
    """One call of a prepared run."""

    entry: int
    dying: tuple[int, ...]
    """Values, by number, that nobody needs after it."""


@dataclass(frozen=True, eq=False)
class PreparedRun:
    """How a known program runs."""

    calls: tuple[PreparedCall, ...]
    needed: tuple[int, ...]
    """The numbers of values that are bound afterwards."""
    required: frozenset[int]
    """Entries that must succeed; whoever asks for the results of another one sees its error."""
    written: tuple[Place, ...]
    """Running statistics that it writes to."""
    budgets: dict[Place, int | None]
    """Inputs that are values, and the byte budgets that these were given."""
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
    num_threads: int
    """How many threads PyTorch had; with others, kernels need other workspaces."""
    counts: events.Tally
    """What is counted when it has run."""
    backward_peak_bytes: int | None
    """What it and the backward pass of its scalars allocate at their peak, where that was projected."""
    codes: list[RunCode] = field(default_factory=list)
    """Its code, once it was written."""

    def code(self, entries: Sequence[Entry]) -> RunCode:
        """The code for the program in these entries; written when it repeats for the first time."""
        if not self.codes:
            calls = [(call.entry, call.dying) for call in self.calls]
            self.codes.append(Writer(entries, calls, self.needed, self.required, self.budgets).written())
        return self.codes[0]

    @cached_property
    def given_bytes(self) -> int | None:
        """The smallest byte budget that an input was given."""
        return min((budget for budget in self.budgets.values() if budget is not None), default=None)

    @cached_property
    def is_default(self) -> bool:
        """Whether nobody had named a budget."""
        return self.decision.budget.is_default

    @cached_property
    def is_unlimited(self) -> bool:
        """Whether it was prepared for no budget at all."""
        budget = self.decision.budget
        return budget.is_default and budget.allowed_bytes is None and not budget.process

    @cached_property
    def _is_small(self) -> bool:
        """Whether it is so small that no budget is looked for, unless somebody names one."""
        return self.given_bytes is None and self.rough_bytes <= LARGE_BYTES

    def applies(self, entries: Sequence[Entry], is_backward: bool) -> bool:
        """Whether the program in these entries may run like this."""
        code = self.codes[0] if self.codes else self.code(entries)
        if not code.is_fresh(entries) or not self._is_within():
            return False
        if self.is_default:
            scope = last_closed()  # What was recorded in a scope that is closed by now is warned of.
            return scope is None or entries[0].sequence > scope.closed
        return self._is_copied_alike(entries, self.changing(entries) if is_backward else ())

    def _is_within(self) -> bool:
        """Whether the budget in force is the one that it was prepared for."""
        if self._is_small and not is_any_named():
            return self.is_unlimited
        budget, given = self.decision.budget, self.given_bytes
        now = resolved(current_budget([] if given is None else [given]), lambda: self.rough_bytes, self.devices)
        is_in_force = self.num_changes == num_changes() and self.num_threads == torch.get_num_threads()
        return is_in_force and now == budget

    def _is_copied_alike(self, entries: Sequence[Entry], changing: Collection[torch.Tensor]) -> bool:
        """Whether a run must copy as much, to be taken back, as when the budget was found to be enough."""
        if self.decision.budget.allowed_bytes is None:
            return True  # Nobody counts.
        made: Iterable[Any] = self.code(entries).made(entries).values()
        if any(tensor.grad_fn.name() == OWN_NODE for tensor in made):
            return False  # Whether that program runs again, and what it takes then, is asked every time.
        copied = 2 * leaf_bytes(self.written_tensors(entries))
        return self.copied_bytes == copied + leaf_bytes(t for t in changing if t.grad is not None)

    def written_tensors(self, entries: Sequence[Entry]) -> list[torch.Tensor]:
        """Running statistics that it writes to."""
        found = (entries[entry].captured[place] for entry, place in self.written)
        return list({id(tensor): tensor for tensor in found}.values())

    def changing(self, entries: Sequence[Entry]) -> Collection[torch.Tensor]:
        """Tensors whose `.grad` a backward pass may change."""
        code = self.codes[0]
        leaves = code.leaves(entries)
        if code.has_made and (made := code.made(entries)):
            leaves.update({id(leaf): leaf for leaf in leaves_behind(list(made.values()))})
        return leaves.values()


Asked = tuple[bool, int, tuple[int, ...]]
"""What is asked of a program: whether for a backward pass, from which result by number, and which others are held."""


class Question:
    """What is asked of the program in a log, which gets nodes and runs as usual: the question learns how it ran."""

    def __init__(self, log: Log, asked: Asked) -> None:
        assert log.trie.current is not None
        self.node: TrieNode = log.trie.current
        self.key = asked
        self._epoch, entries = log.epoch, log.entries
        self._entries = {entry.sequence: number for number, entry in enumerate(entries)}
        self._templates: list[Any] = [entry.template for entry in entries]
        places = self._bound(range(len(entries)))
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
        return PreparedRun(
            self._calls(entries, set(numbers)), tuple(numbers),
            frozenset(n for n, node in zip(entries, graph.nodes, strict=True) if node in required),
            tuple(self._written(entries)), {place: self._budgets[place] for place in self._bound(entries)},
            contexts.pop(), decision, job.copied_bytes, rough_bytes(graph), job.devices, num_changes(),
            torch.get_num_threads(), self._counts(entries), task.backward_peak_bytes(decision),
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

    def _written(self, entries: Sequence[int]) -> Iterable[Place]:
        for entry in entries:
            template = self._templates[entry]
            yield from ((entry, template.operands[index][1]) for index in template.inference.hidden_writes)

    def _bound(self, entries: Sequence[int]) -> Iterable[Place]:
        """Inputs that are values."""
        for entry in entries:
            yield from ((entry, place) for kind, place in self._templates[entry].operands if kind == BOUND)

    def _counts(self, entries: Sequence[int]) -> events.Tally:
        made = Counter("executed::" + function_name(self._templates[entry].func) for entry in entries)
        recorded = Counter("lazy::" + function_name(template.func) for template in self._templates)
        others = {
            "nodes_executed": len(entries),
            "runs": 1,
            "runs::whole": 1,
            "prepared runs": 1,
            "trie::hit": len(self._templates),
        }
        return events.Tally(made + recorded + Counter(others))


def asked_of(log: Log, lazy: Any, backward: bool) -> Asked | None:
    """What is asked of the program in a log; None if it must be looked at in any case."""
    if lazy._log is not log or not log.is_whole or any_forced() or is_watched() or not is_state_ordinary():
        return None
    return backward, lazy._name - log.base, held_numbers(log, lazy)
