"""Stories: what an unsplit run allocates and frees, one event after the other, at any sizes.

*Takes* the stories of some programs of one structure, as a tracker saw them on fake tensors. *Gives* the story of such
a program at new sizes: the same events with other bytes, each of which follows from the sizes by a formula. What
kernels allocate inside follows from none; the table of workspaces is asked again. Where a formula is missing, the
program is run on fake tensors again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from koila._torch.fakes import fake_on_cpu
from koila.ir.formulas import Formula, Formulas, NoFormula, Values
from koila.ir.samples import after_failure, with_sample
from koila.planning.forms import Form
from koila.planning.tracker import Call, Life
from koila.planning.workspace import retained_bytes, workspace_bytes


@dataclass(frozen=True, eq=False)
class Story:
    """The events of a run."""

    trail: Sequence[int]
    """Bytes that are allocated, or freed (below zero), in order."""
    operators: Sequence[str]
    """The operator of each event."""
    lives: Sequence[Life]
    """The storages."""
    calls: Sequence[Call] = ()
    """The calls whose kernels may allocate something."""

    @cached_property
    def peak(self) -> tuple[int, int]:
        """The most bytes alive, and the event that brings them."""
        now, most, position = 0, 0, 0
        for number, change in enumerate(self.trail):
            now += change
            if now > most:
                most, position = now, number
        return most, position

    def largest_at(self, position: int) -> Life | None:
        """The largest storage that is alive after an event; the first of equals."""
        alive = [life for life in self.lives if life.born <= position and (life.died is None or life.died > position)]
        return max(alive, key=lambda life: life.birth.num_bytes, default=None)


class Stories:
    """The stories of one structure; `num_inputs` numbers of a program are those of its inputs."""

    def __init__(self, num_inputs: int) -> None:
        self._num_inputs = num_inputs
        self._samples: list[tuple[Values, Story]] = []
        self._formulas: Formulas | None = None
        self._trail: list[int | Formula] = []
        self._sizes: list[int | Formula] = []
        self._shapes: list[list[int | Formula]] = []
        self._calls: list[Any] = []

    @property
    def weight(self) -> int:
        """How many events it holds."""
        return sum(len(story.trail) for _, story in self._samples)

    def add(self, numbers: Values, story: Story) -> None:
        """One more program is known."""
        self._samples = with_sample(self._samples, (numbers, story), lambda each: each[0])
        self._formulas = None
        if len(self._samples) < 2:
            return
        stories = [each for _, each in self._samples]
        try:
            formulas = Formulas([each for each, _ in self._samples], self._num_inputs)
            _check_alike(stories)
            inside = {place for call in stories[0].calls for place in _places(call)}
            changes = enumerate(zip(*(each.trail for each in stories), strict=True))
            self._trail = [0 if place in inside else _number(formulas, values) for place, values in changes]
            calls = zip(*(each.calls for each in stories), strict=True)
            number = lambda values: _number(formulas, tuple(values))  # noqa: E731
            self._calls = [_aligned([(call.args, call.kwargs, call.result) for call in row], number) for row in calls]
            births = list(zip(*([life.birth for life in each.lives] for each in stories), strict=True))
            self._sizes = [_number(formulas, tuple(birth.num_bytes for birth in row)) for row in births]
            self._shapes = [
                [_number(formulas, sizes) for sizes in zip(*(birth.shape for birth in row), strict=True)]
                for row in births
            ]
        except NoFormula:
            self._samples = after_failure(self._samples)
            return
        self._formulas = formulas

    def tell(self, numbers: Values) -> Story:
        """The story at new sizes.

        Raises:
            NoFormula: It follows from nothing that is known.
        """
        if self._formulas is None:
            raise NoFormula("too few are known, or they are not alike")
        symbols = self._formulas.values_for(numbers)
        known: dict[Formula, int] = {}

        def number(value: int | Formula) -> int:
            if isinstance(value, int):
                return value
            if value not in known:
                known[value] = int(value(symbols))
            return known[value]

        like = self._samples[0][1]
        trail = [number(value) for value in self._trail]
        for call, layout in zip(like.calls, self._calls, strict=True):
            args, kwargs, result = _made(layout, number, "cpu" if call.target in _BY_DEVICE else "meta")
            hidden = workspace_bytes(call.target, args, result, kwargs)
            kept = retained_bytes(call.target, args, result, kwargs)
            trail[call.at : call.at + 3] = [kept, hidden - kept, kept - hidden]
            if call.released is not None:
                trail[call.released] = -kept
        lives = [
            replace(life, birth=replace(life.birth, num_bytes=number(size), shape=tuple(map(number, shape))))
            for life, size, shape in zip(like.lives, self._sizes, self._shapes, strict=True)
        ]
        return Story(trail, like.operators, lives)


_BY_DEVICE = {torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default}
"""Operators whose kernel is chosen by the device."""


def _places(call: Call) -> list[int]:
    """The changes of a story that a call makes."""
    return [*range(call.at, call.at + 3), *([] if call.released is None else [call.released])]


def _aligned(trees: list[Any], number: Callable[[Sequence[Any]], Any]) -> Any:
    """Arguments of a call with formulas in the place of the numbers that differ."""
    first = trees[0]
    if any(type(tree) is not type(first) for tree in trees):
        raise NoFormula("the runs are not alike")
    if isinstance(first, Form):
        if any(len(tree.shape) != len(first.shape) or tree.dtype != first.dtype for tree in trees):
            raise NoFormula("the runs are not alike")
        shape = [number(sizes) for sizes in zip(*(tree.shape for tree in trees), strict=True)]
        stride = [number(steps) for steps in zip(*(tree.stride for tree in trees), strict=True)]
        return replace(first, shape=tuple(shape), stride=tuple(stride))
    if isinstance(first, (list, tuple)):
        if any(len(tree) != len(first) for tree in trees):
            raise NoFormula("the runs are not alike")
        return [_aligned(list(items), number) for items in zip(*trees, strict=True)]
    if isinstance(first, dict):
        return {name: _aligned([tree[name] for tree in trees], number) for name in first}
    if all(tree is first or tree == first for tree in trees):
        return first
    return number(trees) if type(first) is int else first


def _made(tree: Any, number: Callable[[Any], int], device: str) -> Any:
    if isinstance(tree, Form):
        shape, stride = tuple(map(number, tree.shape)), tuple(map(number, tree.stride))
        made = torch.empty_strided(shape, stride, dtype=tree.dtype, device="meta")
        return fake_on_cpu(made) if device == "cpu" else made
    if isinstance(tree, Formula):
        return number(tree)
    if isinstance(tree, list):
        return [_made(item, number, device) for item in tree]
    if isinstance(tree, dict):
        return {name: _made(item, number, device) for name, item in tree.items()}
    return tree


def _number(formulas: Formulas, values: Values) -> int | Formula:
    if all(value == values[0] for value in values):
        return int(values[0])
    found = formulas.formula(values)
    if found is None:
        raise NoFormula("bytes follow from nothing that is recorded")
    return found


def _check_alike(stories: Sequence[Story]) -> None:
    first = stories[0]
    for other in stories[1:]:
        same = len(first.trail) == len(other.trail) and first.operators == other.operators
        if not same or len(first.lives) != len(other.lives) or len(first.calls) != len(other.calls):
            raise NoFormula("the runs are not alike")
        for call, their in zip(first.calls, other.calls, strict=True):
            if (call.target, call.at, call.released) != (their.target, their.at, their.released):
                raise NoFormula("the runs are not alike")
        for mine, theirs in zip(first.lives, other.lives, strict=True):
            if (mine.born, mine.died, len(mine.birth.shape)) != (theirs.born, theirs.died, len(theirs.birth.shape)):
                raise NoFormula("the runs are not alike")
