"""Pending calls that read what is about to be written: they run first (Rule 5).

*Takes* operands that somebody writes to, lazy or real. *Gives* nothing; what was recorded before the write has the
numbers of before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from koila import events
from koila._torch.transforms import outermost_data
from koila.capture.bridge import Bridge
from koila.capture.pending import address_of, recorder
from koila.errors import BudgetError, KoilaError
from koila.ir.node import Node, Value
from koila.ir.source import user_site

WHY = "a write to what it reads"


class _Readers:
    """What was recorded before a write, and reads what is written."""

    def __init__(self, written: Sequence[Value | torch.Tensor]) -> None:
        self._addresses = {address for operand in written if (address := address_of(operand)) is not None}
        self._storages = {id(operand.storage) for operand in written if isinstance(operand, Value)}
        self.nodes: list[Node] = []
        self.pending: list[Value] = []
        """Results of calls that have not run."""
        self.released: list[Value] = []
        """Values that a run has computed and not kept; they could not be computed again."""
        spoiled: set[Node] = set()
        lost: set[Node] = set()
        for node in recorder.recorded():
            if node.has_changed or (lost and any(value.node in lost for value in node.values())):
                lost.add(node)  # It was left pending at an earlier write.
                continue
            reads = any(self._is_written(operand) for operand in node.operands)
            if reads:
                self.nodes.append(node)
            if reads and not node.done:
                self.pending += [] if node.failed or node.left_behind else _results(node)
            elif reads or (spoiled and any(value.node in spoiled for value in node.values())):
                spoiled.add(node)
                self.released += node.waiting() if node.done else []

    def _is_written(self, operand: Value | torch.Tensor) -> bool:
        if isinstance(operand, Value) and id(operand.storage) in self._storages:
            return True
        return address_of(operand) in self._addresses

    def give_up(self, refusal: BudgetError | None) -> None:
        """What has not run by now is stale, whether a version will tell or not; a refusal may be the reason."""
        for node in self.nodes:
            if not node.done or any(value.node is node for value in _results(node)):
                node.note_change(self._is_written, refusal)


def _results(node: Node) -> list[Value]:
    """Values that a call makes, and those that it writes to."""
    made = [value for index in range(node.num_outputs) if (value := node.output(index)) is not None]
    return made + [each for i in node.inference.writes if isinstance(each := node.operands[i], Value)]


def run_readers(written: Sequence[Value | torch.Tensor]) -> None:
    """What was recorded before a write must see the data before it."""
    found = _Readers(written)
    due = [*found.pending, *found.released]
    if due:
        Bridge.realizer.materialize(due, WHY)
    for operand in written if recorder.place.reruns else ():  # Also what has just run may run again.
        real = operand.real if isinstance(operand, Value) else operand
        if real is not None:
            recorder.warn_reruns(real, unseen=False)


def before_write(tensor: torch.Tensor, unseen: bool = False) -> None:
    """A real tensor is about to be written by code that knows nothing of lazy values.

    Args:
        tensor: The tensor.
        unseen: Whether its version will not tell.

    Nobody has asked for these values. What was released once and is too large to be kept stays pending: whoever reads
    it after the write gets a `StaleInputError`. So does what no budget allows to run: whoever reads it gets the
    `BudgetError` then.
    """
    tensor = outermost_data(tensor)
    if recorder.is_read(tensor):
        _run_for_others(_Readers([tensor]))
    if recorder.place.reruns:  # Also what has just run may run again.
        recorder.warn_reruns(tensor, unseen)


def before_hook(tensor: torch.Tensor) -> None:
    """A hook will be registered on a real tensor: gradients that were asked for before do not pass through it."""
    asked = (node for node in recorder.recorded() if node.func is torch.autograd.grad and not node.done)
    due = [value for node in asked if any(each is tensor for each in node.operands) for value in _results(node)]
    if due:
        Bridge.realizer.materialize(due, "a hook on what it is a gradient of")


def before_flag(tensor: torch.Tensor) -> None:
    """A real tensor will be frozen or thawed: what was recorded with it before has, or has not, a gradient for it.

    Other tensors in the same memory have a flag of their own.
    """
    reads = lambda operand: (operand.real if isinstance(operand, Value) else operand) is tensor  # noqa: E731
    pending = recorder.pending() if recorder.is_read(tensor) else ()
    due = [value for node in pending if any(map(reads, node.operands)) for value in _results(node)]
    if due:
        events.forced(WHY, user_site())
        try:
            Bridge.realizer.materialize(due, WHY)
        except KoilaError as error:
            _leave_pending(error)


def _leave_pending(error: KoilaError) -> None:
    """Nobody has asked for what could not run: whoever reads it will see an error then."""
    events.count("readers::left pending", site=user_site())
    error.__traceback__ = error.__context__ = None  # Its frames hold what was to run.


def _run_for_others(found: _Readers) -> None:
    refusal: BudgetError | None = None
    try:
        if found.pending:
            events.forced(WHY, user_site())
            Bridge.realizer.materialize(found.pending, WHY)
        Bridge.realizer.run_what_fits(found.released, WHY)
    except KoilaError as error:
        refusal = error if isinstance(error, BudgetError) else None
        _leave_pending(error)
    found.give_up(refusal)
