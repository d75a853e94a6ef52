"""Patterns: schedules of one structure at any sizes, filled from formulas instead of built.

*Takes* schedules that were built for some sizes of a program, and the facts about it at another size. *Gives* the
schedule for that size: schedules are aligned step by step, and every number that differs between them gets a formula of
the numbers that the record tells (`koila.ir.formulas`). What has no formula makes no pattern: such a schedule is
built at every size (Rule 3).

The facts are of the new size itself: every value must have the shape that its type predicts there. What a call
allocates inside follows no formula; the table of workspaces is asked again.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from koila import events
from koila._torch import OpOverload, without_modes
from koila.analysis.split import Item, Origin
from koila.errors import AnalysisError
from koila.ir.cache import Cache, HashedOnce
from koila.ir.formulas import Formulas, NoFormula, agree
from koila.ir.numbers import Number
from koila.ir.samples import after_failure, with_sample
from koila.planning.alignment import Alignment, Numbered, Varying, filled
from koila.planning.build import Built, build_schedule, check_shape, slack_of
from koila.planning.catalogue import Catalogue, result_shapes
from koila.planning.cost import VIEW_SECONDS, moving_seconds
from koila.planning.devices import current_rules
from koila.planning.forms import Drawn, forms_of
from koila.planning.in_place import overwritable, variant_of
from koila.planning.operation import Operation, OperatorWork, slice_whole
from koila.planning.outcome import Outcome, outcome_of
from koila.planning.rates import copy_seconds, fresh_bytes
from koila.planning.schedule import Schedule
from koila.planning.step import Kind, Sink, Step

MAX_STEPS = 10_000
"""Patterns are kept as long as their schedules have fewer steps in all; a step takes about one KiB."""
ALWAYS = 4
"""So many programs have patterns in any case."""
MIN_SCHEDULES = 32
"""So many schedules of a program have patterns in any case: the latest that were asked for."""


# One schedule.


@dataclass(frozen=True, slots=True)
class _StepPattern:
    """A step with formulas in the place of numbers."""

    step: Step
    """The step of the first sample."""
    args: Any
    kwargs: Any
    form: Any
    places: Any
    is_fixed: bool
    """Whether nothing about it and its operands varies."""
    is_plain: bool
    """Whether it needs no memory beside its operands and its result."""
    owned: tuple[bool, ...]
    """For each operand, whether it is all of a storage that the schedule made."""
    item: int | None
    """The place of the item that its value is."""
    question: int = -1
    """The same for steps that do the same with operands of the same layout, whatever the sizes."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """What steps that do the same have in common at some sizes."""

    operation: Operation | None
    """What they call; None if it is what each of them calls at other sizes."""
    form: Any
    places: Any
    slack: tuple[int, ...]
    inside_bytes: int
    retained_bytes: int
    seconds: float
    fresh_bytes: int
    may_overwrite: tuple[int, ...]


class _Pattern:
    """The schedules of some items, at any sizes.

    Raises:
        NoFormula: The samples are not alike, or a number follows from nothing that is recorded.
    """

    def __init__(self, samples: Sequence[_Sample], formulas: Formulas) -> None:
        schedules = [sample.schedule for sample in samples]
        first = schedules[0]
        if any(len(schedule.steps) != len(first.steps) or schedule.inputs != first.inputs for schedule in schedules):
            raise NoFormula("schedules differ in length")
        alignment = Alignment(formulas)
        self.formulas, self.chunk, self.inputs, self.wholes = formulas, first.chunk, first.inputs, samples[0].wholes
        self.forms = [alignment.align(each) for each in zip(*(schedule.forms for schedule in schedules), strict=True)]
        self._fixed = {number for number, form in enumerate(self.forms) if not isinstance(form, Varying)}
        self._filling = set[int]()
        self._kinds: dict[int, set[torch.dtype]] = {n: _dtypes(form) for n, form in enumerate(first.forms)}
        self._layouts = {number: alignment.token(form) for number, form in enumerate(self.forms)}
        rows = zip(*(schedule.steps for schedule in schedules), strict=True)
        self.steps = [self._step(row, alignment, samples[0].items) for row in rows]
        self.numbers, self._rivals = tuple(alignment.places), tuple(alignment.rivals)
        self.token = object()
        """Stands for it wherever its schedules are known again."""
        fixed = (pattern.step for pattern in self.steps if pattern.is_fixed)
        self.fixed_forms = {step.value: step.work.form for step in fixed}

    def _step(self, row: tuple[Step, ...], alignment: Alignment, items: dict[int, int]) -> _StepPattern:
        step, keys = row[0], [_key(step) for step in row]
        if any(key != keys[0] for key in keys):
            raise NoFormula("steps differ in what they do")
        places = alignment.align([each.places for each in row])
        owned = tuple(operand in self._filling for operand in step.operands)
        if step.work is None:
            return _StepPattern(step, (), {}, None, places, False, True, owned, None)
        operations = [each.work.operation for each in row]
        args = alignment.align([operation.args for operation in operations])
        kwargs = alignment.align([operation.kwargs for operation in operations])
        form = alignment.align([each.work.form for each in row])
        fixed = not any(isinstance(tree, (Varying, Numbered)) for tree in (args, kwargs, form, places))
        fixed = fixed and self._fixed.issuperset(step.operands)
        self._kinds[step.value] = _dtypes(step.work.form)
        kinds = set().union(*(self._kinds[operand] for operand in step.operands), self._kinds[step.value])
        self._fixed |= {step.value} if fixed else set()
        self._filling |= {step.value} if step.fills_storage else set()
        item, plain = items.get(step.value), _is_plain(step, len(kinds))
        self._layouts[step.value] = alignment.token(form)
        asked = (
            step.work.target, args, kwargs, places, tuple(map(self._layouts.__getitem__, (*step.operands, step.value))),
            step.kind, step.work.kernel, step.work.is_transposed, step.fills_storage, plain, owned,
        )  # fmt: skip
        return _StepPattern(step, args, kwargs, form, places, fixed, plain, owned, item, alignment.token(asked))

    def fill(self, catalogue: Catalogue, sinks: Sequence[Sink], values: Sequence[Number]) -> Schedule:
        """The schedule at the sizes of a catalogue's program.

        Raises:
            NoFormula: A value is not what its type predicts, or a number may follow from several formulas.
        """
        if any(not agree(rivals, values) for rivals in self._rivals):
            raise NoFormula("a number that nobody recorded may follow from several formulas, which differ")
        numbers = [formula(values) for formula in self.numbers]
        items = catalogue.facts.items
        wholes = tuple(items[place] for place in self.wholes)
        forms = [catalogue.whole_form(item) for item in wholes]
        if any(filled(form, numbers) != there for form, there in zip(self.forms, forms, strict=True)):
            raise NoFormula("an input is not as its formula says")
        made = _Filling(self.chunk, numbers, items, {**self.fixed_forms, **dict(enumerate(forms))})
        steps = tuple([pattern.step if pattern.is_fixed else made.step(pattern) for pattern in self.steps])
        return Schedule(self.inputs, steps, wholes, tuple(sinks), self.chunk, tuple(forms), pattern=self.token)


class _Filling:
    """One schedule on its way."""

    def __init__(
        self, chunk: int | None, numbers: Sequence[Number], items: Sequence[Item], forms: dict[int, Any]
    ) -> None:
        self.chunk, self.numbers, self.items, self.forms = chunk, numbers, items, forms
        self.answers: dict[int, _Answer] = {}

    def step(self, pattern: _StepPattern) -> Step:
        step, work = pattern.step, pattern.step.work
        if step.kind is Kind.HAND_ON:
            copied = copy_seconds(self._num_bytes(step.operands[0])) if step.seconds else 0.0
            return _renewed(step, None, _Answer(None, None, (), (), 0, 0, copied, 0, ()))
        item = None if pattern.item is None else self.items[pattern.item]
        found = self.answers.get(pattern.question)
        if found is None:  # Layers of a network do the same.
            found = self.answers[pattern.question] = self._answer(pattern, item)
        self.forms[step.value] = found.form
        if item is not None:
            check_shape(item, found.form, self.chunk)
        operation = found.operation or work.operation
        renewed = OperatorWork(
            operation, found.form, work.recorded, work.kernel, work.is_transposed, work.prefix
        )  # fmt: skip
        return _renewed(step, renewed, found)

    def _answer(self, pattern: _StepPattern, item: Item | None) -> _Answer:
        step, work, numbers = pattern.step, pattern.step.work, self.numbers
        places, form = filled(pattern.places, numbers), filled(pattern.form, numbers)
        self.forms[step.value] = form
        args, kwargs = filled(pattern.args, numbers), filled(pattern.kwargs, numbers)
        same = args is work.operation.args and kwargs is work.operation.kwargs
        operation = work.operation if same else Operation(work.target, args, kwargs)
        over = self._may_overwrite(pattern, operation, form)
        if pattern.is_plain:
            seconds, fresh, inside = self._plain(step, operation, form)
            return _Answer(
                None if same else operation, form, places, slack_of(places), inside, 0, seconds, fresh, over
            )  # fmt: skip
        found = self._asked(step, operation, item)
        if found.form != form or found.kernel != work.kernel:
            raise NoFormula("PyTorch gives another layout")
        seconds = found.seconds + (self._sum_seconds(step) if step.kind is Kind.ADD_PRODUCT else 0.0)
        return _Answer(
            None if same else operation, form, found.places, slack_of(found.places), found.inside_bytes,
            found.retained_bytes, seconds, found.fresh_bytes, over,
        )  # fmt: skip

    def _num_bytes(self, value: int) -> int:
        return sum(form.num_bytes for form in forms_of(self.forms[value]) if form is not None)

    def _plain(self, step: Step, operation: Operation, form: Any) -> tuple[float, int, int]:
        """Seconds, fresh bytes and bytes inside of a step that the table need not be asked for."""
        target = operation.target
        if _is_view(target):
            return VIEW_SECONDS, 0, 0
        given = [0 if form is None else form.num_bytes for form in forms_of(form)]
        fresh, num_bytes = sum(map(fresh_bytes, given)), sum(given)
        inside = 0
        if target is slice_whole:
            drawn = isinstance(self.forms[step.operands[0]], Drawn)
            inside = num_bytes // form.dtype.itemsize if drawn else 0
        else:
            num_bytes += sum(self._num_bytes(step.operands[position]) for position in operation.refs)
        return moving_seconds(target, num_bytes, fresh), fresh, inside

    def _asked(self, step: Step, operation: Operation, item: Item | None) -> Outcome:
        whole = None if item is None else item.node.meta.get("val")
        shapes = lambda: None if item is None else result_shapes(item, self.chunk)  # noqa: E731
        operands = [self.forms[operand] for operand in step.operands]
        return outcome_of(operation, operands, self.chunk or 0, whole, shapes)

    def _sum_seconds(self, step: Step) -> float:
        """What a product takes longer that is added to a sum."""
        return copy_seconds(self._num_bytes(step.value)) + (VIEW_SECONDS if step.work.is_transposed else 0.0)

    def _may_overwrite(self, pattern: _StepPattern, operation: Operation, form: Any) -> tuple[int, ...]:
        step = pattern.step
        if step.kind is not Kind.RUN or not step.fills_storage or variant_of(operation.target) is None:
            return ()
        pairs = zip(step.operands, pattern.owned, strict=True)
        return overwritable(operation, form, [self.forms[each] if owned else None for each, owned in pairs])


def _renewed(step: Step, work: OperatorWork | None, found: _Answer) -> Step:
    """The step with other sizes."""
    return Step(
        step.value, step.operands, found.places, found.slack, found.inside_bytes, found.retained_bytes, found.seconds,
        found.fresh_bytes, found.may_overwrite, step.makes_memory, step.holds_operands, step.is_view,
        step.fills_storage, step.kind, step.sinks, step.starts_merge, step.is_repeat, work,
    )  # fmt: skip


def _key(step: Step) -> Hashable:
    """What a step does, without sizes."""
    work = step.work
    called = None if work is None else (
        work.operation.target, work.recorded, work.kernel, work.is_transposed, work.prefix
    )  # fmt: skip
    return (
        step.value, step.operands, step.makes_memory, step.holds_operands, step.is_view, step.fills_storage, step.kind,
        step.sinks, step.starts_merge, step.is_repeat, called,
    )  # fmt: skip


def _is_view(target: Any) -> bool:
    return getattr(target, "__name__", "") == "getitem" or (isinstance(target, OpOverload) and target.is_view)


def _is_plain(step: Step, num_dtypes: int) -> bool:
    target = step.work.target
    pointwise = isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags and num_dtypes == 1
    return step.kind is Kind.RUN and (_is_view(target) or target is slice_whole or pointwise)


def _dtypes(form: Any) -> set[torch.dtype]:
    inner = form.form if isinstance(form, Drawn) else form
    return {each.dtype for each in forms_of(inner) if each is not None}


# All schedules of a program.


@dataclass(frozen=True, slots=True, eq=False)
class _Sample:
    """A schedule that was built, without its program."""

    numbers: tuple[Number, ...]
    num_inputs: int
    schedule: Schedule
    wholes: tuple[int, ...]
    """The places of the items that it reads."""
    items: dict[int, int]
    """By value, the place of the item that it is."""

    def num_steps(self) -> int:
        return len(self.schedule.steps)


class _Family:
    """The schedules of one structure: for each of them some samples, and the pattern that these make."""

    def __init__(self) -> None:
        self.samples: dict[Hashable, list[_Sample]] = {}
        """By schedule, the least recently used first."""
        self._patterns: dict[Hashable, _Pattern | None] = {}
        self._formulas: dict[Hashable, Formulas] = {}
        self.num_steps = 0
        self._lock = threading.RLock()  # Ctrl-C right before it is released must not stop its own thread for good.

    def add(self, key: Hashable, sample: _Sample) -> None:
        with self._lock:
            before = self.samples.pop(key, [])
            self.samples[key] = after = with_sample(before, sample, lambda each: each.numbers)
            self.num_steps += sum(map(_Sample.num_steps, after)) - sum(map(_Sample.num_steps, before))
            self._patterns.pop(key, None)
            while self.num_steps > MAX_STEPS and len(self.samples) > MIN_SCHEDULES:
                self._drop(next(iter(self.samples)))

    def _drop(self, key: Hashable) -> None:
        self.num_steps -= sum(map(_Sample.num_steps, self.samples.pop(key)))
        self._patterns.pop(key, None)

    def pattern(self, key: Hashable) -> _Pattern | None:
        with self._lock:
            if key in self.samples:
                self.samples[key] = self.samples.pop(key)
            if key not in self._patterns and len(self.samples.get(key, ())) > 1:
                self._patterns[key] = self._make(key)
            return self._patterns.get(key)

    def _make(self, key: Hashable) -> _Pattern | None:
        samples = self.samples[key]
        numbers = tuple(sample.numbers for sample in samples)
        try:
            if numbers not in self._formulas:
                self._formulas = {numbers: Formulas(numbers, samples[0].num_inputs)}
            return _Pattern(samples, self._formulas[numbers])
        except NoFormula as reason:
            events.count(f"sizes::no pattern: {reason}")
            self.samples[key] = left = after_failure(samples)
            self.num_steps += sum(map(_Sample.num_steps, left)) - sum(map(_Sample.num_steps, samples))
            return None


_families: Cache[_Family] = Cache("pattern_cache", MAX_STEPS, lambda family: family.num_steps, ALWAYS)


class Patterns:
    """The schedules of a program: filled where schedules of other sizes tell how, else built, which is a sample."""

    def __init__(self, catalogue: Catalogue, origin: Origin) -> None:
        self._catalogue, self._origin = catalogue, origin
        self._structure = HashedOnce((origin.structure, catalogue.facts.signature, current_rules()))
        self._family = _families.get(self._structure) or _Family()
        self._values: dict[Formulas, tuple[Number, ...] | None] = {}

    def schedule(
        self, items: Sequence[Item], sinks: Sequence[Sink], read: frozenset[Item], chunk: int | None,
        joined: frozenset[Item] = frozenset(),
    ) -> Schedule:  # fmt: skip
        """The schedule of some items; see `koila.planning.build.build_schedule`."""
        places: dict[Any, int] = self._catalogue.facts.places
        handed = tuple((places[sink.key], sink.destination) for sink in sinks)
        outside = tuple(frozenset(map(places.__getitem__, each)) for each in (read, joined))
        key = (tuple(map(places.__getitem__, items)), handed, outside, chunk)
        found = self._filled(key, sinks) if self._catalogue.facts.joint.is_built else None
        if found is not None:
            events.count("sizes::schedules filled")
            return found
        built = build_schedule(self._catalogue, items, sinks, read, chunk, joined)
        self._note(key, built, places)
        return built.schedule

    def _filled(self, key: Hashable, sinks: Sequence[Sink]) -> Schedule | None:
        pattern = self._family.pattern(key)
        values = None if pattern is None else self._symbols(pattern.formulas)
        if pattern is None or values is None:
            return None
        try:
            with without_modes(), torch.no_grad():
                return pattern.fill(self._catalogue, sinks, values)
        except (NoFormula, AnalysisError, RuntimeError, ValueError, IndexError, TypeError) as error:
            reason = error if isinstance(error, NoFormula) else f"PyTorch refuses a step: {type(error).__name__}"
            events.count(f"sizes::schedule built: {reason}")
            return None

    def _symbols(self, formulas: Formulas) -> tuple[Number, ...] | None:
        if formulas not in self._values:
            try:
                self._values[formulas] = formulas.values_for(self._origin.numbers)
            except NoFormula:
                self._values[formulas] = None
        return self._values[formulas]

    def _note(self, key: Hashable, built: Built, places: dict[Any, int]) -> None:
        schedule, origin = built.schedule, self._origin
        wholes: Any = schedule.wholes
        bare = Schedule(schedule.inputs, schedule.steps, chunk=schedule.chunk, forms=schedule.forms)
        made = {value: places[item] for value, item in built.items.items()}
        sample = _Sample(origin.numbers, origin.num_inputs, bare, tuple(map(places.__getitem__, wholes)), made)
        self._family.add(key, sample)
        _families.add(self._structure, self._family)


class _Built:
    """The schedules of what has no other sizes."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue

    def schedule(
        self, items: Sequence[Item], sinks: Sequence[Sink], read: frozenset[Item], chunk: int | None,
        joined: frozenset[Item] = frozenset(),
    ) -> Schedule:  # fmt: skip
        return build_schedule(self._catalogue, items, sinks, read, chunk, joined).schedule


def patterns_of(catalogue: Catalogue) -> Patterns | _Built:
    """Where the schedules of a program come from."""
    origin = catalogue.facts.origin
    return _Built(catalogue) if origin is None else Patterns(catalogue, origin)
