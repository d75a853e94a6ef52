"""Facts at other sizes: how a program is cut, from how it was cut at two or three sizes.

*Takes* facts that were found out for some sizes of a program, and its joint graph at another size that was built from
formulas. *Gives* the facts for that size: items are compared one by one, and a number in their types that differs is
told by the record: only one that is recorded itself, at every size seen, is taken from there. For types with any other
number (how many elements a variance is of) the rule of the operator is asked. Facts that differ in anything else make
no others: such a program is analysed at every size (Rule 3), and so is one whose numbers do not follow from each other
as they did.

No other rules are asked. Who has to make the call of a chunk anew asks them then: `Facts.ruling_of`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from koila import events
from koila.analysis.split import Facts, Item, Origin, part_type, rule_again
from koila.analysis.trace import Joint
from koila.analysis.types import Sliced
from koila.ir.cache import Cache
from koila.ir.formulas import Formula, Formulas, NoFormula
from koila.ir.numbers import Number
from koila.ir.samples import after_failure, with_sample

MAX_ITEMS = 12_000
"""Facts are kept as long as they have fewer items in all."""
ALWAYS = 4
"""So many programs have some in any case."""


@dataclass(frozen=True, slots=True)
class _Row:
    """An item without its program."""

    kind: str
    node: int
    operands: tuple[int, ...]
    index: int | None
    phase: int
    is_remade: bool


class _Sample:
    """Facts without their program."""

    def __init__(self, facts: Facts, origin: Origin) -> None:
        nodes = {node: place for place, node in enumerate(facts.joint.module.graph.nodes)}
        places = facts.places
        self.numbers, self.num_inputs = origin.numbers, origin.num_inputs
        self.rows = tuple(
            _Row(item.kind, nodes[item.node], tuple([places[operand] for operand in item.operands]), item.index,
                 item.phase, item.is_remade)
            for item in facts.items
        )  # fmt: skip
        self.results = tuple(None if item is None else places[item] for item in facts.results)
        self.types = (tuple(item.type for item in facts.items), tuple(facts.types.values()))
        self.rest = (facts.gathers, facts.granule, facts.num_phases)
        self.signature = facts.signature


class _Resized:
    """The facts of one structure at any sizes.

    Raises:
        NoFormula: The samples are not alike, or a number follows from nothing that is recorded.
    """

    def __init__(self, samples: Sequence[_Sample]) -> None:
        first = self._first = samples[0]
        for other in samples[1:]:
            if (other.rows, other.results, other.rest) != (first.rows, first.results, first.rest):
                raise NoFormula("facts differ in what they cut")
        self._formulas = Formulas([sample.numbers for sample in samples], first.num_inputs)
        items, nodes = (zip(*(sample.types[part] for sample in samples), strict=True) for part in (0, 1))
        self._known: dict[Any, Any] = {}
        self._items, self._nodes = list(map(self._align, items)), list(map(self._align, nodes))
        self._order = _operands_first(first.rows)

    def _align(self, types: tuple[Any, ...]) -> Any:
        """The type with formulas in the place of numbers: a tuple of the parts of a `Sliced`, or itself."""
        if types not in self._known:
            self._known[types] = self._aligned(types)
        return self._known[types]

    def _aligned(self, types: tuple[Any, ...]) -> Any:
        first = types[0]
        if all(kind == first for kind in types):
            return first
        if isinstance(first, tuple) and all(isinstance(kind, tuple) and len(kind) == len(first) for kind in types):
            parts = tuple(map(self._align, zip(*types, strict=True)))
            return _ASK if _ASK in parts else parts
        if not all(isinstance(kind, Sliced) for kind in types):
            return _ASK
        columns = [tuple(getattr(kind, name) for kind in types) for name in ("dim", "outer", "inner", "granule")]
        parts = tuple(map(self._number, columns))
        return _ASK if _ASK in parts else _Varying(parts)

    def _number(self, values: tuple[int, ...]) -> Any:
        if all(value == values[0] for value in values):
            return values[0]
        return self._formulas.formula(values) if self._formulas.is_recorded(values) else _ASK

    def at(self, joint: Joint, num_samples: int, origin: Origin) -> Facts:
        """The facts at the sizes of a program."""
        filling = _Filling(joint, num_samples, self._formulas.values_for(origin.numbers))
        for place, tree in enumerate(self._nodes):
            filling.add_type(filling.nodes[place], tree)
        rows, items = self._first.rows, list[Any](self._first.rows)
        for place in self._order:
            row = rows[place]
            operands = tuple([items[operand] for operand in row.operands])
            kind = filling.item_type(row, self._items[place], operands)
            items[place] = Item(
                row.kind, filling.nodes[row.node], kind, operands, None, row.index, row.phase, row.is_remade
            )  # fmt: skip
        results = tuple(None if place is None else items[place] for place in self._first.results)
        gathers, granule, num_phases = self._first.rest
        facts = Facts(joint, num_samples, results, filling.types, gathers, granule, num_phases, tuple(items), origin)
        facts.__dict__["signature"] = self._first.signature
        return facts


_ASK: Any = object()
"""Stands for a type that only the rules know: a number in it is not recorded as such."""


@dataclass(frozen=True, slots=True)
class _Varying:
    """A `Sliced` with formulas in the place of numbers."""

    parts: tuple[Any, ...]


class _Filling:
    """The types of one size on their way."""

    def __init__(self, joint: Joint, num_samples: int, symbols: Sequence[Number]) -> None:
        self.nodes: list[fx.Node] = list(joint.module.graph.nodes)
        self.num_samples, self.symbols = num_samples, symbols
        self.types: dict[str, Any] = {}
        self._known: dict[int, Any] = {}

    def add_type(self, node: fx.Node, tree: Any) -> None:
        """The type of a node; those of its operands are there."""
        self.types[node.name] = self._asked(node) if tree is _ASK else self._filled(tree)

    def item_type(self, row: _Row, tree: Any, operands: tuple[Item, ...]) -> Any:
        """The type of an item, whose operands are there."""
        if tree is not _ASK:
            return self._filled(tree)
        if row.kind == "part":
            return part_type(operands[0].type, row.index or 0)
        if row.kind != "chunk" or row.is_remade:
            raise NoFormula("what is cut follows from nothing that is recorded")
        return self.types[self.nodes[row.node].name]

    def _asked(self, node: fx.Node) -> Any:
        if node.target is operator.getitem:
            source, index = node.args
            assert isinstance(source, fx.Node) and isinstance(index, int)
            return part_type(self.types[source.name], index)
        ruling = rule_again(node, self.types, self.num_samples)
        if ruling is None:
            raise NoFormula("an operator is not cut any more")
        return ruling.result

    def _filled(self, tree: Any) -> Any:
        key = id(tree)
        if key not in self._known:
            self._known[key] = self._made(tree)
        return self._known[key]

    def _made(self, tree: Any) -> Any:
        if isinstance(tree, tuple):
            return tuple(map(self._filled, tree))
        if not isinstance(tree, _Varying):
            return tree
        parts: list[Any] = [part(self.symbols) if isinstance(part, Formula) else part for part in tree.parts]
        return Sliced(*parts)


def _operands_first(rows: Sequence[_Row]) -> list[int]:
    """The places of items, those of operands before those of their users."""
    order: dict[int, None] = {}
    pending = [(place, False) for place in range(len(rows))]
    while pending:
        place, opened = pending.pop()
        if place in order:
            continue
        if opened:
            order[place] = None
        else:
            pending.append((place, True))
            pending += [(operand, False) for operand in rows[place].operands if operand not in order]
    return list(order)


class _Family:
    """The facts of one structure: some samples, and what these make."""

    def __init__(self) -> None:
        self.samples: list[_Sample] = []
        self.resized: _Resized | None = None

    def num_items(self) -> int:
        return sum(len(sample.rows) for sample in self.samples)

    def add(self, sample: _Sample) -> None:
        self.samples = with_sample(self.samples, sample, lambda each: each.numbers)
        self.resized = None
        if len(self.samples) > 1:
            try:
                self.resized = _Resized(self.samples)
            except (NoFormula, ValueError) as reason:
                events.count(f"sizes::no facts of other sizes: {reason}")
                self.samples = after_failure(self.samples)


_families: Cache[_Family] = Cache("facts_cache", MAX_ITEMS, _Family.num_items, ALWAYS)


def known_facts(joint: Joint, num_samples: int, origin: Origin) -> Facts | None:
    """The facts of a program from those of other sizes; None if nothing is known, or if it was traced itself."""
    family = _families.get(origin.structure) if joint.is_built else None
    if family is None or family.resized is None:
        return None
    try:
        facts = family.resized.at(joint, num_samples, origin)
        events.count("sizes::facts resized")
        return facts
    except NoFormula as reason:
        events.count(f"sizes::analysed: {reason}")
        return None


def note_facts(facts: Facts, origin: Origin) -> Facts:
    """Remember facts for other sizes of their program."""
    family = _families.get(origin.structure) or _Family()
    family.add(_Sample(facts, origin))
    _families.add(origin.structure, family)
    return facts
