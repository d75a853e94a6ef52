"""Building schedules: items become steps with known sizes.

*Takes* items of a plan and, for a loop, a chunk size. *Gives* a `Schedule`. Each call is run on meta tensors: every
chunk must have the shape that its type predicts (Rule 3). Matrix products that only a sum reads are added to it in
place, and a sum of two gradients is added up one by one.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from koila._torch import OpOverload, without_modes
from koila.analysis.monoids import can_own
from koila.analysis.split import Item
from koila.analysis.types import Sliced
from koila.errors import AnalysisError
from koila.planning.catalogue import (
    Catalogue,
    chunk_shape,
    is_plain_sum,
    needs_contiguous,
    result_shapes,
)
from koila.planning.cost import VIEW_SECONDS
from koila.planning.devices import current_rules
from koila.planning.forms import Drawn, Form, forms_of
from koila.planning.in_place import overwritable
from koila.planning.operation import Bound, Operation, OperatorWork, Ref, join_pieces, open_source, slice_whole
from koila.planning.outcome import Outcome, outcome_of, storage_bytes
from koila.planning.rates import copy_seconds
from koila.planning.schedule import Schedule
from koila.planning.step import Destination, Kind, Place, Sink, Step

aten = torch.ops.aten

_CLONE = Operation(aten.clone.default, (Ref(0),), {"memory_format": torch.contiguous_format})
_OPEN = Operation(open_source, (Ref(0),), {})


@dataclass(frozen=True, slots=True, eq=False)
class Built:
    """A schedule, and which item each of its values is; copies and opened sources are none."""

    schedule: Schedule
    items: dict[int, Item]


@dataclass(frozen=True, eq=False)
class _Value:
    """A value while its schedule is built."""

    number: int
    form: Any
    storage_bytes: list[int]
    """By place, the bytes of the storage that it lies in."""
    views: tuple[bool, ...]
    """By place, whether PyTorch calls it a view."""
    is_outside: bool = False
    """Whether it comes from outside."""

    @cached_property
    def filling(self) -> Form | None:
        """The form of a single tensor that is all of its storage, each element once."""
        form = self.form
        fills = isinstance(form, Form) and form.num_bytes == self.storage_bytes[0] > 0 and form.is_dense
        return form if fills else None


class _Builder:
    def __init__(
        self, catalogue: Catalogue, kept_before: set[Item], chunk: int | None, joined: frozenset[Item]
    ) -> None:
        self.catalogue, self.kept_before, self.chunk, self.joined = catalogue, kept_before, chunk, joined
        self.num_samples = catalogue.facts.num_samples
        self.steps: list[Step] = []
        self.inputs: dict[Item, _Value] = {}
        self.values: dict[Item, _Value] = {}
        self.contiguous: dict[int, _Value] = {}
        self.opened: dict[Item, _Value] = {}

    def build(self, items: Sequence[Item], sinks: Sequence[Sink]) -> Built:
        wanted, sums = self._wanted(items, sinks)
        run = [item for item in items if item not in sums]
        for number, item in enumerate(dict.fromkeys(self._read_outside(run))):
            form = self.catalogue.whole_form(item)
            self.inputs[item] = _Value(number, form, storage_bytes(form), (False,) * len(forms_of(form)), True)
        with without_modes(), torch.no_grad():
            for item in run:
                self.values[item] = value = self._item(item)
                check_shape(item, value.form, self.chunk)
                for index in wanted.get(item, ()):
                    self._hand_on(item, value, index, sinks[index].destination)
        steps = self.steps if self.chunk is None else _fuse_products(self.steps, sinks)
        inputs = tuple(len(value.views) for value in self.inputs.values())
        forms = tuple(value.form for value in self.inputs.values())
        schedule = Schedule(inputs, tuple(steps), tuple(self.inputs), tuple(sinks), self.chunk, forms)
        return Built(schedule, {value.number: item for item, value in self.values.items()})

    def _wanted(self, items: Sequence[Item], sinks: Sequence[Sink]) -> tuple[dict[Item, list[int]], set[Item]]:
        """By item, the sinks that it is handed on to; and the items that need not be computed themselves."""
        wanted: dict[Item, list[int]] = {}
        sums = set[Item]()
        readers = Counter(operand for item in items for operand in item.operands)
        handed: list[Any] = [sink.key for sink in sinks]
        readers.update(handed)
        for index, item in enumerate(handed):
            parts = [item] if self.chunk is None else summands(item, readers, sums)
            for part in parts:
                wanted.setdefault(part, []).append(index)
        return wanted, sums

    def _read_outside(self, items: Sequence[Item]) -> Iterator[Item]:
        """The whole items that some items read, in the order in which they are read."""
        made: set[Item] = set()
        for item in items:
            if item in self.kept_before:
                yield item
            elif item.kind == "slice":
                yield item.operands[0]
            else:
                yield from (operand for operand in item.operands if operand not in made)
            made.add(item)

    def _item(self, item: Item) -> _Value:
        if item in self.kept_before:
            return self._slice(item, item)
        if item.kind == "slice":
            return self._slice(item, item.operands[0])
        if item.kind == "part":
            assert item.index is not None
            return self._part(self.values[item.operands[0]], item.index)
        operation = self.catalogue.operation(item, self.chunk)
        operands = [self._operand(operand, operation.target) for operand in item.operands]
        if operation.target is operator.getitem:
            return self._part(operands[0], int(operation.args[1]))
        whole, recorded = item.node.meta.get("val"), item.node.meta.get("recorded")
        return self._call(operation, operands, whole, recorded, lambda: result_shapes(item, self.chunk))

    def _slice(self, item: Item, whole: Item) -> _Value:
        args = (Ref(0), item.type, Bound.START, Bound.STOP, self.num_samples)
        target = join_pieces if item in self.joined else slice_whole
        return self._call(Operation(target, args, {}), [self.inputs[whole]])

    def _part(self, source: _Value, index: int) -> _Value:
        """One of several results: no call, only a name for it."""
        index = index % len(source.form)
        form, here = source.form[index], slice(index, index + 1)
        value = _Value(self._number(), form, source.storage_bytes[here], source.views[here])
        step = Step(
            value.number, (source.number,), ((0, index),) if isinstance(form, Form) else (0,), seconds=VIEW_SECONDS,
            is_view=value.views[0], fills_storage=value.filling is not None,
            work=OperatorWork(Operation(operator.getitem, (Ref(0), index), {}), form),
        )  # fmt: skip
        self.steps.append(step)
        return value

    def _operand(self, item: Item, target: Any) -> _Value:
        """A kernel that was traced with contiguous memory may rely on it; a chunk of it need not be contiguous."""
        value = self.values.get(item) or self._opened(item)
        form = value.form
        if not isinstance(form, Form) or form.is_contiguous or not needs_contiguous(item, target):
            return value
        if value.number not in self.contiguous:
            self.contiguous[value.number] = self._call(_CLONE, [value])
        return self.contiguous[value.number]

    def _opened(self, item: Item) -> _Value:
        whole = self.inputs[item]
        if not isinstance(whole.form, Drawn):
            return whole
        if item not in self.opened:
            self.opened[item] = self._call(_OPEN, [whole])
        return self.opened[item]

    # Steps.

    def _number(self) -> int:
        return len(self.inputs) + len(self.steps)

    def _call(
        self, operation: Operation, given: list[_Value], whole: Any = None, recorded: Any = None,
        shapes: Callable[[], Any] = lambda: None,
    ) -> _Value:  # fmt: skip
        """A step that calls an operator on some operands."""
        operands = list({given[ref].number: given[ref] for ref in operation.refs}.values())
        positions = {value.number: position for position, value in enumerate(operands)}
        operation = operation.renumbered([positions.get(value.number, 0) for value in given])
        outcome = outcome_of(operation, [value.form for value in operands], self.chunk or 0, whole, shapes)
        value = _result(self._number(), outcome, operands)
        self.steps.append(_step(operation, outcome, value, operands, recorded))
        return value

    def _hand_on(self, item: Item, value: _Value, index: int, destination: Destination) -> None:
        keeps = destination is Destination.KEEP
        value = self._piece(item, value) if keeps else value
        num_bytes = sum(form.num_bytes for form in forms_of(value.form) if form is not None)
        starts = isinstance(value.form, Form) and can_own(
            value.form.dtype, value.views[0], num_bytes, value.storage_bytes[0]
        )
        step = Step(
            self._number(), (value.number,), seconds=0.0 if keeps else copy_seconds(num_bytes), holds_operands=True,
            kind=Kind.HAND_ON, sinks=(index,), starts_merge=starts,
        )  # fmt: skip
        self.steps.append(step)

    def _piece(self, item: Item, value: _Value) -> _Value:
        """The value as a piece that can be held: with memory of its own, laid out as a slice of the whole value is."""
        form, whole = value.form, self.catalogue.whole_form(item)
        if value.filling is not None and not value.is_outside and not value.views[0] and form.stride == whole.stride:
            return value
        layout = torch.contiguous_format if whole.is_contiguous else torch.channels_last
        return self._call(Operation(aten.clone.default, (Ref(0),), {"memory_format": layout}), [value])


def check_shape(item: Item, form: Any, chunk: int | None) -> None:
    """Raise unless a chunk's value has the shape that its type predicts (Rule 3)."""
    if chunk is None or not isinstance(form, Form) or not isinstance(item.type, Sliced):
        return
    expected = chunk_shape(item, chunk)
    if form.shape != expected:
        found = f"{item.node.target} gives {list(form.shape)} for a chunk of {chunk} samples"
        raise AnalysisError(f"{found}, {item.type} predicts {list(expected)}")


def _result(number: int, outcome: Outcome, operands: Sequence[_Value]) -> _Value:
    """The value that a call gives."""
    sizes: list[int] = []
    views: list[bool] = []
    for place, is_view in zip(outcome.places, outcome.views, strict=True):
        if isinstance(place, int):
            sizes.append(place)
            views.append(is_view)
        else:
            source = operands[place[0]]
            sizes.append(source.storage_bytes[place[1]])
            # An operator may give its operand itself.
            views.append(is_view or source.views[place[1]])
    return _Value(number, outcome.form, sizes, tuple(views))


def _step(
    operation: Operation, outcome: Outcome, value: _Value, operands: Sequence[_Value], recorded: int | None
) -> Step:
    target = operation.target
    overload = isinstance(target, OpOverload)
    filling = [None if operand.is_outside else operand.filling for operand in operands]
    return Step(
        value=value.number,
        operands=tuple(operand.number for operand in operands),
        places=outcome.places,
        slack_bytes=slack_of(outcome.places),
        inside_bytes=outcome.inside_bytes,
        retained_bytes=outcome.retained_bytes,
        seconds=outcome.seconds,
        fresh_bytes=outcome.fresh_bytes,
        may_overwrite=overwritable(operation, value.filling, filling),
        makes_memory=overload and target is not aten.reshape.default,
        holds_operands=not overload,
        is_view=len(value.views) == 1 and value.views[0],
        fills_storage=value.filling is not None,
        work=OperatorWork(operation, outcome.form, recorded, outcome.kernel),
    )


def slack_of(places: Sequence[Place]) -> tuple[int, ...]:
    """By how much the blocks of some results may be larger; nothing where none is."""
    rules = current_rules()
    if not rules.unsplit_bytes:
        return ()
    return tuple(rules.slack_bytes(place) if isinstance(place, int) else 0 for place in places)


_ACCUMULATED = (torch.float32, torch.float64)


def _fuse_products(steps: list[Step], sinks: Sequence[Sink]) -> list[Step]:
    """Matrix products that only a sum reads are added to it in place; the steps between are gone."""
    makers = {step.value: step for step in steps}
    readers = Counter(operand for step in steps for operand in step.operands)
    fused: dict[int, Step] = {}
    gone: set[int] = set()
    for step in steps:
        if step.kind is not Kind.HAND_ON or not sinks[step.sinks[0]].is_plain_sum:
            continue
        value = makers.get(step.operands[0])
        turned = value is not None and _is_transposition(value)
        product = makers.get(value.operands[0]) if turned and value is not None else value
        if value is None or product is None or readers[value.value] != 1 or readers[product.value] != 1:
            continue
        if _is_product(product):
            between = [step, value] if turned else [step]
            gone.update(each.value for each in between)
            fused[product.value] = replace(
                product, kind=Kind.ADD_PRODUCT, sinks=step.sinks, may_overwrite=(),
                seconds=product.seconds + sum(each.seconds for each in between),
                work=replace(product.work, is_transposed=turned),
            )  # fmt: skip
    return [fused.get(step.value, step) for step in steps if step.value not in gone]


def _is_transposition(step: Step) -> bool:
    if step.kind is not Kind.RUN:
        return False
    operation = step.work.operation
    return operation.target is aten.t.default or (
        operation.target is aten.permute.default and list(operation.args[1]) == [1, 0]
    )


def _is_product(step: Step) -> bool:
    if step.kind is not Kind.RUN or step.work.target is not aten.mm.default:
        return False
    return step.work.form.dtype in _ACCUMULATED


def summands(item: Item, readers: Counter[Item], sums: set[Item]) -> list[Item]:
    """Values that can be added to a sum one by one, instead of their sum: two gradients of one weight.

    Nobody else may read them: the first of them becomes the sum. What is added up elsewhere is put into `sums`.
    """
    if not (item.kind == "chunk" and item.node.target is aten.add.Tensor and is_plain_sum(item)) or readers[item] > 1:
        return [item]
    value, alike = item.node.meta["val"], item.operands
    fits = len(set(alike)) == 2 and len(item.node.args) == 2 and not item.node.kwargs
    for operand in alike:
        other = operand.node.meta["val"] if operand.kind == "chunk" else None
        fits = fits and isinstance(other, torch.Tensor) and (other.shape, other.dtype) == (value.shape, value.dtype)
        fits = fits and readers[operand] == 1 and is_plain_sum(operand)
    if not fits:
        return [item]
    sums.add(item)
    return [part for operand in alike for part in summands(operand, readers, sums)]


def build_schedule(
    catalogue: Catalogue, items: Sequence[Item], sinks: Sequence[Sink], kept_before: Iterable[Item] = (),
    chunk: int | None = None, joined: frozenset[Item] = frozenset(),
) -> Built:  # fmt: skip
    """The schedule of some items; the keys of `sinks` are the items that are handed on.

    Of the items that were kept before, `joined` lie in pieces that are smaller than a chunk.
    """
    return _Builder(catalogue, set(kept_before), chunk, joined).build(items, sinks)
