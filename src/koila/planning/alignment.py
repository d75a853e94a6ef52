"""Alignment: structures of several sizes become one, with formulas in the place of numbers that differ.

*Takes* arguments, layouts and split types, one of each sample, and the formulas of the samples' numbers. *Gives* a
structure that `filled` makes those of any size of.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from koila.analysis.marks import SlotArgument
from koila.analysis.types import Sliced
from koila.ir.formulas import Formula, Formulas, NoFormula
from koila.ir.numbers import Number
from koila.planning.forms import Drawn, Form


@dataclass(frozen=True, slots=True)
class Numbered:
    """Stands for a number that varies, by its place among the formulas of a pattern."""

    place: int


@dataclass(frozen=True, slots=True)
class Varying:
    """Stands for a structure that holds numbers that vary."""

    make: Callable[[list[Any]], Any]
    parts: tuple[Any, ...]


_THAT_VARY = {Numbered, Varying}
_OPENED: dict[type, tuple[Callable[[Any], Iterable[Any]], Callable[[list[Any]], Any]]] = {
    list: (iter, list),
    tuple: (iter, tuple),
    Form: (lambda form: (form.shape, form.stride, form.dtype, form.is_conj, form.is_neg), lambda parts: Form(*parts)),
    Drawn: (lambda drawn: (drawn.form,), lambda parts: Drawn(*parts)),
    Sliced: (lambda kind: (kind.dim, kind.outer, kind.inner, kind.granule), lambda parts: Sliced(*parts)),
}
"""What is looked into: how it is taken apart, and put together again."""


class Alignment:
    """Makes one structure of those in all samples, with formulas in the place of numbers that differ."""

    def __init__(self, formulas: Formulas) -> None:
        self._formulas = formulas
        self.places: dict[Formula, int] = {}
        """By formula of a number that varies, its place."""
        self.rivals: set[tuple[Formula, ...]] = set()
        """Formulas of one number that nobody recorded: a size at which they differ is not filled."""
        self._tokens: dict[Hashable, int] = {}
        self._forms: dict[tuple[Form, ...], Any] = {}
        """What was aligned before: layers of a network give the same layouts."""
        self._varying: dict[int, tuple[Varying, int]] = {}
        """By identity, structures with numbers that vary, and their tokens."""

    def align(self, values: Sequence[Any]) -> Any:
        """The structure of these, one of each sample; itself where nothing varies.

        Raises:
            NoFormula: They are not alike, or a number follows from nothing that is recorded.
        """
        first, kind = values[0], type(values[0])
        for value in values:
            if type(value) is not kind:
                raise NoFormula("steps differ in type")
        if kind is int or kind is float:
            return self._number(tuple(values))
        if kind is Form:
            return self._form(tuple(values))
        if kind is dict:
            return self._opened(values, dict.values, lambda parts: dict(zip(first, parts, strict=True)))
        opened = list if isinstance(first, list) else kind  # FX has lists of its own.
        if opened in _OPENED:
            return self._opened(values, *_OPENED[opened])
        if isinstance(first, torch.Tensor):
            raise NoFormula("a step holds a tensor")
        keys = [value.slot for value in values] if isinstance(first, SlotArgument) else values
        if any(key != keys[0] for key in keys):
            raise NoFormula("steps differ in what has no number")
        return first

    def _form(self, forms: tuple[Form, ...]) -> Any:
        if forms not in self._forms:
            self._forms[forms] = self._opened(forms, *_OPENED[Form])
        return self._forms[forms]

    def token(self, tree: Any) -> int:
        """A number for what was aligned: equal only for what is equal at every size."""
        kind = type(tree)
        if kind is Varying:
            return self._varying_token(tree)
        if isinstance(tree, (list, tuple)):
            key: Hashable = (kind, *map(self.token, tree))
        elif isinstance(tree, dict):
            key = (kind, *tree, *map(self.token, tree.values()))
        elif kind is float:
            key = (kind, repr(tree))  # Zero has two signs.
        else:
            key = (kind, id(tree) if isinstance(tree, SlotArgument) or kind.__hash__ is None else tree)
        return self._tokens.setdefault(key, len(self._tokens))

    def _varying_token(self, tree: Varying) -> int:
        known = self._varying.get(id(tree))
        if known is None:
            key = (Varying, tree.make, *map(self.token, tree.parts))
            known = self._varying[id(tree)] = tree, self._tokens.setdefault(key, len(self._tokens))
        return known[1]

    def _opened(self, values: Sequence[Any], take: Callable[[Any], Any], make: Callable[[list[Any]], Any]) -> Any:
        opened = [tuple(take(value)) for value in values]
        if len(set(map(len, opened))) > 1:
            raise NoFormula("steps differ in length")
        parts = tuple([self.align(each) for each in zip(*opened, strict=True)])
        return values[0] if _THAT_VARY.isdisjoint(map(type, parts)) else Varying(make, parts)

    def _number(self, values: tuple[Number, ...]) -> Any:
        if values.count(values[0]) == len(values):
            return values[0]
        formula = self._formulas.formula(values)
        if formula is None:
            raise NoFormula(f"{', '.join(map(str, values))} follow from nothing that is recorded")
        self.rivals.add(self._formulas.rivals(values))
        return Numbered(self.places.setdefault(formula, len(self.places)))


def filled(tree: Any, numbers: Sequence[Number]) -> Any:
    """What was aligned, with these numbers in the places of those that vary."""
    kind = type(tree)
    if kind is Numbered:
        return numbers[tree.place]
    return tree.make([filled(part, numbers) for part in tree.parts]) if kind is Varying else tree
