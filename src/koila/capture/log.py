"""What one thread has recorded: nodes, and behind them calls that repeat a known program and have no nodes yet.

*Takes* nodes, and entries for calls that were matched against the trie (see `koila.capture.repeat`). *Gives* the
recorded program as nodes. An entry is a template of the call and what the call was given; its node is made only when
somebody looks: a call that is not known, a question about a value, a run that was not prepared. Whoever looks calls
`flush` first, so that nobody but the matcher and the prepared run ever sees an entry.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterator, Sequence
from sys import _getframe, getrefcount
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from koila import events
from koila._torch import storage_key
from koila.ir.infer import HIDDEN_WRITERS
from koila.ir.node import Node, Storage, Value, function_name
from koila.ir.prepass import Inference, Output, PrePass
from koila.ir.source import Site
from koila.ir.trie import TrieCache

MAX_VALUES = 1 << 24
"""Values of one program are numbered below this: the name of a value is one integer for the program and the number."""
MAX_HISTORIES = 8
"""For so many sets of held results it is remembered what a program is; see `Log.is_history`."""
MIN_STORAGES = 64
"""So many real storages are noted before those that nobody holds are looked for."""
_epochs = itertools.count()

Operand = Value | torch.Tensor


class Entry(NamedTuple):
    """A call that repeats a known one."""

    template: Any
    """The `Template` that it was matched by."""
    captured: tuple[Any, ...]
    """What varies from step to step: lazy operands, real ones with their versions, numbers."""
    results: tuple[Any, ...]
    """The new lazy tensors that it gave, in order."""
    draws: list[Any]
    """One source per random operator inside the call."""
    sequence: int
    """When it was recorded."""
    code: CodeType
    """The user's code that called."""
    offset: int
    """Where in that code."""


class Log:
    """What a thread has recorded; read by other threads only through `flush`."""

    def __init__(self) -> None:
        self.trie = TrieCache()
        self.epoch = next(_epochs)
        self.base = self.epoch * MAX_VALUES
        """The name of the first value of this program."""
        self.count = 0
        """How many values this program has recorded."""
        self.num_before = 0
        """How many values were recorded before this program."""
        self.entries: list[Entry] = []
        """Calls without nodes; they come after all nodes of the tape."""
        self.num_noted = 0
        """How many of the entries `Recorder.is_read` has looked at."""
        self.tape: list[weakref.ref[Node]] = []
        self.effects: list[Node] = []
        self.real_storages: dict[int, weakref.ref[Storage]] = {}
        """Storages of real tensors that values or pending calls of this thread hold, by their address, and some that
        nobody holds any more.

        Two threads that use the same buffer do not see each other's pending reads and writes of it: each run does what
        its own thread recorded."""
        self._max_storages = MIN_STORAGES
        self.writes = False
        """Whether an entry writes to a lazy operand, which may change whether values require grad."""
        self.lock = threading.RLock()
        self._flush: FrameType | None = None
        """The call of `flush` that goes on, or was the last one. Not a flag: Ctrl-C right before it is taken back would
        leave it."""

    def new_epoch(self) -> None:
        """The next recorded call starts a new program."""
        self.trie.reset_current()
        self.epoch = next(_epochs)
        self.base = self.epoch * MAX_VALUES
        self.num_before += self.count
        self.count = 0
        if self.effects:  # What has been done would keep its operands, and through them its whole program.
            self.forget_done_effects()
        if self.tape:
            self.tape[:] = [reference for reference in self.tape if reference() is not None]

    def forget_done_effects(self) -> None:
        """Keep the writes that nobody has done."""
        self.effects[:] = [node for node in self.effects if node.due and not node.failed]

    @property
    def is_whole(self) -> bool:
        """Whether the entries are the whole program on the way through the trie, and nothing else is pending."""
        if self.trie.current is None or len(self.entries) != self.trie.current.depth or not self.entries:
            return False
        return not (self.tape or self.effects) or self._is_nothing_else_pending()

    def _is_nothing_else_pending(self) -> bool:
        nodes = (node for reference in self.tape if (node := reference()) is not None)
        return all(node.done or node.failed for node in nodes) and not any(node.due for node in self.effects)

    def take(self) -> None:
        """The entries have run, or have nodes."""
        self.entries, self.num_noted, self.writes = [], 0, False

    def put_back(self, entries: list[Entry]) -> None:
        """Entries that were taken are pending again."""
        if self.entries is not entries:
            self.entries = entries + self.entries
            self.writes = any(entry.template.writes for entry in self.entries)

    def flush(self) -> None:
        """Make the nodes of the entries, as if they had been recorded one by one; all of them or, on an error, none."""
        with self.lock:
            if self._flush is not None and _is_running(self._flush):
                return
            entries, made = self.entries, list[Node]()
            try:
                self._flush = _getframe()
                needed = _needed(entries)
                for entry in entries:
                    if entry.sequence in needed:
                        self._make_node(entry, made)
                self.take()
            except BaseException:
                self._unmake(made)
                for entry in entries:
                    for wrapper in entry.results:
                        wrapper._held = None
                self.put_back(entries)
                raise
            self._flush = None
            events.count("trie::hit", len(entries))
            for entry in entries:
                count_recorded(entry.template.func)

    def _make_node(self, entry: Entry, made: list[Node]) -> None:
        template = entry.template
        operands, versions = template.operands_of(entry.captured)
        slots = tuple([entry.captured[place] for place in template.slots])
        args, kwargs = template.rebuild(template.constants, operands, slots)
        site = Site(entry.code, entry.offset)
        node = Node(template.func, args, kwargs, tuple(operands), template.inference, template.context, site)
        made.append(node)
        node.sequence, node.key, node.slots, node.versions = entry.sequence, template.key, slots, versions
        node.draws = entry.draws
        wrappers, values = iter(entry.results), list[Value | None]()
        for output in template.inference.outputs:
            value = self.make_value(node, output, operands, values)
            if value is not None:
                wrapper = next(wrappers)
                value.position = (self.epoch, wrapper._name - self.base)
                wrapper._held = value
                value.holders = (weakref.ref(wrapper),)
        self.note(node)

    def _unmake(self, made: Sequence[Node]) -> None:
        """Nobody has heard of these nodes."""
        gone = set(made)
        storages = {storage for node in made for storage in (*node.storages, *(v.storage for v in node.values()))}
        for storage in storages:
            storage.forget(gone)
        self.tape[:] = [reference for reference in self.tape if reference() not in gone]
        self.effects[:] = [node for node in self.effects if node not in gone]

    @property
    def is_history(self) -> bool:
        """Whether all entries lead to results that somebody holds and that require grad."""
        if self.writes:
            return False
        node = self.trie.current
        if node is None or len(self.entries) != node.depth:
            return self._is_history()
        held = held_numbers(self, None)
        found = node.histories.get(held)
        if found is None:
            if len(node.histories) >= MAX_HISTORIES:
                node.histories.clear()
            found = node.histories[held] = self._is_history()
        return found

    def _is_history(self) -> bool:
        if len(_needed(self.entries)) < len(self.entries):
            return False
        captures = _num_captures(self.entries)
        without = (entry for entry in self.entries if not all(made._prepass.requires_grad for made in entry.results))
        return not any(_is_any_held(entry, captures) for entry in without)

    # Nodes.

    def make_value(
        self, node: Node, output: Output, operands: Sequence[Operand], made: list[Value | None]
    ) -> Value | None:  # fmt: skip
        """The next result of a node, appended to `made`; None if the call returns an operand itself."""
        if output.same_as is not None:
            made.append(None)
            operand = operands[output.same_as]
            if isinstance(operand, Value):
                operand.prepass = same_batch(operand.prepass, output.prepass)
            return None
        index = len(made)
        value = Value(output.prepass, self._output_storage(output, operands, made), node, index)
        value.is_view = output.is_view
        value.is_base = output.shares is None and output.shares_output is None
        value.family = 0 if value.is_base else _family(output, operands, made, node)
        node.set_output(index, value)
        made.append(value)
        return value

    def _output_storage(self, output: Output, operands: Sequence[Operand], made: list[Value | None]) -> Storage:
        if output.shares is not None:
            found = self.storage_of(operands[output.shares], register=True)
            assert found is not None
            return found
        if output.shares_output is not None:
            earlier = made[output.shares_output]
            return Storage() if earlier is None else earlier.storage
        return Storage()

    def note(self, node: Node) -> None:
        """A node was recorded: tell the storages who reads and who writes them; a write to a real one is an effect."""
        inference: Inference = node.inference
        register = node.func in HIDDEN_WRITERS
        reference = weakref.ref(node)
        self.tape.append(reference)
        for operand in node.operands:
            storage = self.storage_of(operand, register)
            if storage is not None:
                storage.add_reader(reference)
                if not isinstance(operand, Value):
                    node.storages.append(storage)
        for index, requires_grad in zip(inference.writes, inference.write_grads, strict=True):
            operand = node.operands[index]
            storage = self.storage_of(operand, register=True)
            assert storage is not None
            storage.add_writer(node)
            if not isinstance(operand, Value):
                node.storages.append(storage)
            if isinstance(operand, Value) and requires_grad:
                operand.prepass = operand.prepass.with_grad(True)
                if operand.family not in storage.with_grad:
                    storage.with_grad = (*storage.with_grad, operand.family)
            if storage.real and not inference.ordered and not node.due:
                node.due = True
                self.effects.append(node)

    def storage_of(self, operand: Operand, register: bool = False) -> Storage | None:
        """The storage of an operand; a real tensor has one only if a pending call writes to it."""
        if isinstance(operand, Value):
            return operand.storage
        return self.real_storage(operand) if register else self._noted_storage(operand)

    def real_storage(self, tensor: torch.Tensor) -> Storage:
        """The storage of a real tensor; it is noted that there is one."""
        key = _storage_key(tensor)
        reference = self.real_storages.get(key)
        found = None if reference is None else reference()
        if found is None:
            if len(self.real_storages) >= self._max_storages:
                self._forget_storages()
            found = Storage(real=True)
            self.real_storages[key] = weakref.ref(found)
        return found

    def _noted_storage(self, tensor: torch.Tensor) -> Storage | None:
        """The storage of a real tensor, if it was noted that there is one."""
        if not self.real_storages:
            return None
        reference = self.real_storages.get(_storage_key(tensor))
        return None if reference is None else reference()

    def _forget_storages(self) -> None:
        """Forget those that nobody holds; it is done seldom, so that a new one costs little."""
        storages = self.real_storages
        for key, reference in list(storages.items()):
            if reference() is None and storages.get(key) is reference:
                del storages[key]
        self._max_storages = max(MIN_STORAGES, 2 * len(storages))

    def reals(self, start: int) -> Iterator[torch.Tensor]:
        """The real operands of the entries from `start` on."""
        for entry in self.entries[start:]:
            yield from entry.template.reals_of(entry.captured)


def _storage_key(tensor: torch.Tensor) -> int:
    return storage_key(tensor.untyped_storage()) if tensor.layout is torch.strided else id(tensor)


def _is_running(frame: FrameType) -> bool:
    """Whether a call of this thread has not ended yet."""
    found: FrameType | None = _getframe()
    while found is not None and found is not frame:
        found = found.f_back
    return found is not None


def _needed(entries: list[Entry]) -> set[int]:
    """Entries, by their sequence, that lead to something that somebody holds, or that write; the rest is garbage."""
    found: set[int] = set()
    held: set[int] = set()
    captures = _num_captures(entries)
    for entry in reversed(entries):
        is_used = any(wrapper._name in held for wrapper in entry.results)
        if is_used or entry.template.inference.writes or _is_any_held(entry, captures):
            found.add(entry.sequence)
            held.update(wrapper._name for wrapper in entry.template.pending_of(entry.captured))
    return found


def _count_own_references() -> int:
    return next(getrefcount(thing) for thing in (object(),))


_OWN_REFERENCES = _count_own_references()
"""How often a result is referred to that nobody holds: by its entry, a variable, and the argument of `getrefcount`."""


def _num_captures(entries: Sequence[Entry]) -> dict[int, int]:
    """How often entries have captured each lazy result, by name."""
    found: dict[int, int] = {}
    for entry in entries:
        for wrapper in entry.template.pending_of(entry.captured):
            found[wrapper._name] = found.get(wrapper._name, 0) + 1
    return found


def _is_any_held(entry: Entry, captures: dict[int, int]) -> bool:
    """Whether somebody outside of the log refers to a result of an entry; PyTorch's own code counts, too."""
    return any(getrefcount(wrapper) > _OWN_REFERENCES + captures.get(wrapper._name, 0) for wrapper in entry.results)


def held_numbers(log: Log, asked: Any) -> tuple[int, ...]:
    """The numbers of results, in a log that is whole, that somebody holds beside the one that is asked for."""
    node = log.trie.current
    assert node is not None
    uses = node.uses
    if uses is None:
        captures = _num_captures(log.entries)
        uses = node.uses = tuple(captures.get(log.base + number, 0) for number in range(log.count))
    found, number = [], 0
    for entry in log.entries:
        for wrapper in entry.results:
            if getrefcount(wrapper) > _OWN_REFERENCES + uses[number] and wrapper is not asked:
                found.append(number)
            number += 1
    return tuple(found)


def count_recorded(func: Any) -> None:
    """A call was recorded (Rule 6)."""
    events.count("lazy::" + function_name(func))


def _family(output: Output, operands: Sequence[Operand], made: list[Value | None], node: Node) -> int:
    """That of what a result is a view of; one of its own for a result that shares the memory and is no view."""
    if not output.is_view:
        return node.sequence
    viewed = operands[output.shares] if output.shares is not None else made[output.shares_output or 0]
    return viewed.family if isinstance(viewed, Value) else 0


def same_batch(before: PrePass, after: PrePass) -> PrePass:
    """What is known about a tensor after a call; a write to its data leaves its batch where it was."""
    if before.batch is None or before.shape != after.shape or before.stride != after.stride:
        return after
    return after.with_batch(before.batch)
