"""Formulas: how numbers of a program follow from the sizes of its inputs.

*Takes* the numbers of two or more programs of one structure, as samples. *Gives* `Formulas`: the few of them that vary
by themselves, the symbols, and for any number that was seen in every sample a `Formula` of the symbols, if there is one
of the few kinds that are looked for: a product of symbols, times a whole number, plus or minus at most two; for floats
also the inverse of one (a mean), or its root. From numbers that are not sizes of inputs, the order of a norm, say, only
the inverse follows: nothing that was recorded would contradict a formula that fits by chance. There is no division on
purpose: `(T - 1) // 2 + 1` and `T // 2` agree in too many samples.

A number that nobody recorded may follow from several things alike, if the samples do not tell them apart, or may seem
to be a constant because a product (4 · 6 and 6 · 4) or a part of a size (the halves of 8 and 9) stood still. So there
is a sample more than sizes of inputs that vary by themselves, and nothing is said about a program in which products, or
parts, that were alike in all samples are not alike any more. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations_with_replacement
from math import gcd, prod

Number = int | float
Values = tuple[Number, ...]
"""What a number is in each sample."""
SMALL = 2
"""The largest summand of a formula. Sizes below it have ways of their own: PyTorch drops or expands such dimensions."""
_DEGREES = ((1, 64), (2, 12), (3, 5))
"""Products of so many factors are taken of so many symbols."""
_COMPARED = ((1, 64), (2, 32), (3, 12))
"""Products of so many factors are compared of so many recorded numbers."""
_PARTS = (2, 3, 4, -2)
"""The parts of a size that programs use, rounded down, and the half rounded up."""


@dataclass(frozen=True, slots=True)
class Formula:
    """factor · product of symbols + summand, divided by a whole number; or factor · (product + summand)^power."""

    symbols: tuple[int, ...]
    factor: Number = 1
    summand: Number = 0
    power: float = 1.0
    divisor: int = 1

    def __call__(self, values: Sequence[Number]) -> Number:
        return self.of(prod(values[symbol] for symbol in self.symbols))

    def of(self, product: Number) -> Number:
        """The number for a product of symbols."""
        if self.power == 1.0:
            found = self.factor * product + self.summand
            return found if self.divisor == 1 else found / self.divisor
        if self.power == -1.0:
            return self.factor / (self.divisor * (product + self.summand))
        return self.factor * float(product + self.summand) ** self.power


_ROUNDING = 1e-15


def agree(rivals: Sequence[Formula], values: Sequence[Number]) -> bool:
    """Whether formulas give the same number for some values of the symbols, but for rounding."""
    found = [formula(values) for formula in rivals]
    return all(abs(value - found[0]) <= _ROUNDING * abs(found[0]) for value in found)


class NoFormula(Exception):
    """A number that varies between samples follows from nothing that is known."""


def _gives(formula: Formula, product: Number, value: Number) -> bool:
    return (formula.power == 1.0 or product + formula.summand > 0) and float(formula.of(product)) == value


def _is_whole(values: Values) -> bool:
    return all(type(value) is int for value in values)


class Formulas:
    """The symbols of some samples, and formulas of them.

    Args:
        samples: The numbers of each program.
        first: So many numbers at the beginning are those of inputs: symbols are looked for among them first.

    Raises:
        NoFormula: There are too few samples.

    >>> found = Formulas([(8, 20, 160), (8, 27, 216)], 2)
    >>> found.symbols, found.formula((19, 26))
    ((1,), Formula(symbols=(0,), factor=1, summand=-1, power=1.0, divisor=1))
    >>> found.values_for((8, 31, 248))
    (31,)
    """

    def __init__(self, samples: Sequence[Values], first: int = 0) -> None:
        self._samples = samples
        self._columns: list[Values] = []
        self._numbers: set[int] = set()
        """Symbols that are whole numbers among arguments, not sizes of inputs."""
        self._products: list[tuple[Values, tuple[int, ...]]] = []
        self._known: dict[tuple[type, Values], Formula | None] = {}
        self._rivals: dict[tuple[type, Values], tuple[Formula, ...]] = {}
        found: list[int] = []
        self._changing: list[tuple[int, Formula]] = []
        columns: list[Values] = list(zip(*samples, strict=True))
        varying = [place for place, column in enumerate(columns) if any(value != column[0] for value in column)]
        # Sizes of inputs first, the small ones before their products.
        inputs = sorted((place for place in varying if place < first), key=lambda place: columns[place])
        for place in (*inputs, *(place for place in varying if place >= first)):
            if not _is_whole(columns[place]) or self.formula(columns[place]) is None:
                found.append(place)
                self._add(columns[place], is_number=place >= first)
        self.symbols = tuple(found)
        """The places of the numbers that vary by themselves."""
        self._shifted: list[Formula] = []
        """Symbols times and plus something, as they are recorded: `B * (2 * T + 1)` is a product of one."""
        own = [(symbol,) for symbol in range(len(found))]
        for column in dict.fromkeys(columns[place] for place in varying if _is_whole(columns[place])):
            formula = self.formula(column)
            is_shifted = formula is not None and formula.summand and formula.divisor == 1
            if formula is not None and is_shifted and formula.power == 1.0 and formula.symbols in own:
                self._shifted.append(formula)
                self._add(column, is_number=formula.symbols[0] in self._numbers)
        for place in varying:
            formula = self.formula(columns[place])
            assert formula is not None
            self._changing.append((place, formula))
        self._fixed = [(place, column[0]) for place, column in enumerate(columns) if place not in set(varying)]
        self._recorded = {columns[place] for place in varying}
        if sum(place < first for place in found) >= len(samples):
            raise NoFormula("too few traces for so many sizes that vary")
        self._alike = list(self._products_alike(varying, columns))
        of_sizes = [place for place, formula in self._changing if self._numbers.isdisjoint(formula.symbols)]
        self._parts = list(self._parts_alike(of_sizes, columns))

    def _products_alike(
        self, varying: Sequence[int], columns: Sequence[Values]
    ) -> Iterator[tuple[tuple[int, ...], int, tuple[int, ...], int]]:
        """Recorded numbers, and products of two or three, that differ by a factor only, or from a constant.

        Each is given by the places of its factors, with its value in the first sample.
        """
        seen: dict[Values, tuple[tuple[int, ...], int]] = {(1,) * len(self._samples): ((), 1)}
        whole = {columns[place]: place for place in reversed(varying) if _is_whole(columns[place])}
        places = sorted(whole.values())
        chosen = (combinations_with_replacement(places[:most], degree) for degree, most in _COMPARED)
        for factors in chain.from_iterable(chosen):
            values = [prod(int(columns[place][sample]) for place in factors) for sample in range(len(self._samples))]
            divisor = gcd(*values)
            if divisor:
                other = seen.setdefault(tuple([value // divisor for value in values]), (factors, values[0]))
                if other[0] != factors:
                    yield factors, values[0], *other

    def _parts_alike(
        self, places: Sequence[int], columns: Sequence[Values]
    ) -> Iterator[tuple[int, int, int | None, int]]:
        """Sizes whose half, third or quarter (rounded up, if the part is negative) is the same in all samples, or is
        another size plus or minus a little: the place of that, or None, and the rest.

        A third or a quarter that is one is left out: few sizes would be left.
        """
        whole = {columns[place]: place for place in reversed(places) if _is_whole(columns[place])}
        for column, place, part in ((*item, part) for item in whole.items() for part in _PARTS):
            values = [abs(int(size) // part) for size in column]
            if len(set(values)) == 1 and (values[0] > 1 or abs(part) == 2):
                yield place, part, None, values[0]
            for other, its in whole.items():
                rests = {value - int(size) for value, size in zip(values, other, strict=True)}
                if len(rests) == 1 and abs(min(rests)) <= SMALL:
                    yield place, part, its, rests.pop()

    def _add(self, column: Values, is_number: bool) -> None:
        """One more symbol: its products with the others."""
        if is_number and _is_whole(column):
            self._numbers.add(len(self._columns))
        self._columns.append(column)
        self._known.clear()
        self._products = []
        whole = [symbol for symbol, column in enumerate(self._columns) if _is_whole(column)]
        for degree, most in _DEGREES:
            for symbols in combinations_with_replacement(whole[:most], degree):
                values = tuple(
                    prod(self._columns[symbol][sample] for symbol in symbols) for sample in range(len(self._samples))
                )
                self._products.append((values, symbols))
        self._products += [(values, (s,)) for s, values in enumerate(self._columns) if s not in whole]

    def formula(self, values: Values) -> Formula | None:
        """The formula of a number that is so much in the samples."""
        key = (type(values[0]), values)
        if key not in self._known:
            self._known[key] = next(self._wholes(values) if _is_whole(values) else self._floats(values), None)
        return self._known[key]

    def is_recorded(self, values: Values) -> bool:
        """Whether a number that is so much in the samples is among those that are recorded.

        Its formula is then more than likely: `values_for` has checked it in every new program.
        """
        return values in self._recorded

    def rivals(self, values: Values) -> tuple[Formula, ...]:
        """All formulas that give a number that nobody recorded: where they differ, nothing is known of it."""
        if self.is_recorded(values):
            return ()
        key = (type(values[0]), values)
        if key not in self._rivals:
            self._rivals[key] = tuple(self._wholes(values) if _is_whole(values) else self._floats(values))
        return self._rivals[key]

    def _wholes(self, values: Values) -> Iterator[Formula]:
        products = [(product, symbols) for product, symbols in self._products if _is_whole(product)]
        for product, symbols in products:
            factor, rest = divmod(values[0], product[0]) if product[0] else (0, 1)
            if not rest and factor and all(v == factor * p for v, p in zip(values, product, strict=True)):
                yield Formula(symbols, factor)
        for product, symbols in products:
            other = next((sample for sample, p in enumerate(product) if p != product[0]), None)
            if other is None:
                continue
            factor, rest = divmod(values[other] - values[0], product[other] - product[0])
            summand = values[0] - factor * product[0]
            if rest or not factor or abs(summand) > SMALL:
                continue
            if all(v == factor * p + summand for v, p in zip(values, product, strict=True)):
                yield Formula(symbols, factor, summand)

    def _floats(self, values: Values) -> Iterator[Formula]:
        of_sizes = [(product, symbols) for product, symbols in self._products if self._numbers.isdisjoint(symbols)]
        for power in (1.0, -1.0, -0.5, 0.5):
            for product, symbols in self._products if power == -1.0 else of_sizes:
                for factor in (1, -1, 2, -2, 0.5, -0.5):
                    for summand in (0, 1, -1):
                        formula = Formula(symbols, factor, summand, power)
                        if all(_gives(formula, p, value) for p, value in zip(product, values, strict=True)):
                            yield formula
        for product, symbols in self._products if values[0] else ():
            for factor, summand in ((f, s) for f in (1, -1, 2, -2) for s in (0, 1, -1)):
                first = values[0] * (product[0] + summand)
                formula = Formula(symbols, factor, summand, -1.0, round(factor / first) if first else 0)
                pairs = zip(product, values, strict=True)
                if formula.divisor > 0 and all(_gives(formula, p, value) for p, value in pairs):
                    yield formula
        for product, symbols in of_sizes:
            divisor = round(product[0] / values[0]) if values[0] else 0
            if abs(divisor) > 1 and all(p / divisor == v for v, p in zip(values, product, strict=True)):
                yield Formula(symbols, divisor=divisor)

    def values_for(self, numbers: Values) -> Values:
        """What the symbols are in a new program, and the shifted ones after them.

        Raises:
            NoFormula: One of its numbers is not as the formulas say.
        """
        values = tuple(numbers[place] for place in self.symbols)
        if any(type(value) is int and 0 <= value < SMALL for value in values):
            raise NoFormula("a size is smaller than two")
        if any(numbers[place] != value for place, value in self._fixed):
            raise NoFormula("a number that was the same in all traces is another")
        values = (*values, *(formula(values) for formula in self._shifted))
        if any(numbers[place] != formula(values) for place, formula in self._changing):
            raise NoFormula("a number is not as its formula says")
        for place, part, other, rest in self._parts:
            if abs(int(numbers[place]) // part) != rest + (0 if other is None else numbers[other]):
                raise NoFormula("a part of a size that was like another number in all traces is not")
        of = lambda places: prod(numbers[place] for place in places)  # noqa: E731
        if any(of(one) * other != of(another) * first for one, first, another, other in self._alike):
            raise NoFormula("products of sizes that the traces did not tell apart differ")
        return values
