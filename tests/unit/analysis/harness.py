"""The proof of a ruling: run the operator chunk by chunk as the ruling says and compare with the whole call.

*Takes* a `Recorded` call with real tensors and a hypothesis: which operands are Sliced or Merged, and the batch size.
*Gives* nothing if the rule declines, and raises `AssertionError` if chunks do not come to the whole call's results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map_only

from koila.analysis.chunk_rule import Call, ChunkRule, Operand
from koila.analysis.rules import rule_for
from koila.analysis.types import WHOLE, Merged, Sliced, SplitType, chunk_of, store_chunk

TOLERANCE = 1e-10
TOLERANCES = {torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float32: 1e-5, torch.complex64: 1e-5}
"""For the few calls in a narrower dtype."""
Place = tuple[str, int | None]
"""An operand: the argument's name, and its index if the argument is a list."""


@dataclass(frozen=True, eq=False)
class Recorded:
    """One call of an operator with real tensors."""

    target: OpOverload
    arguments: Mapping[str, Any]
    """Every argument by name, defaults filled in."""
    results: tuple[Any, ...]

    def places(self) -> dict[Place, torch.Tensor]:
        """The tensor operands by place."""
        found: dict[Place, torch.Tensor] = {}
        for name, value in self.arguments.items():
            if isinstance(value, torch.Tensor):
                found[name, None] = value
            elif isinstance(value, (list, tuple)):
                found.update({(name, i): item for i, item in enumerate(value) if isinstance(item, torch.Tensor)})
        return found

    def signature(self) -> str:
        """Equal for calls that a rule cannot tell apart."""

        def shown(value: Any) -> Any:
            return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value

        return f"{self.target}{ {k: tree_map_only(torch.Tensor, shown, v) for k, v in self.arguments.items()} }"


def bound(target: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by schema name with defaults."""
    found: dict[str, Any] = {}
    for place, argument in enumerate(target._schema.arguments):
        if place < len(args):
            found[argument.name] = args[place]
        else:
            found[argument.name] = kwargs.get(argument.name, argument.default_value)
    return found


def run(target: OpOverload, *args: Any, **kwargs: Any) -> Recorded:
    """Call the operator and record it."""
    arguments = bound(target, args, kwargs)
    with torch.no_grad():
        outcome = target(**arguments)
    return Recorded(target, arguments, as_results(outcome))


def as_results(outcome: Any) -> tuple[Any, ...]:
    return tuple(outcome) if isinstance(outcome, (tuple, list)) else (outcome,)


def _operand(value: torch.Tensor, kind: SplitType) -> Operand:
    return Operand(tuple(value.shape), value.dtype, kind)


def call_of(recorded: Recorded, types: Mapping[Place, SplitType], num_samples: int) -> Call:
    """What the rule sees."""
    arguments: dict[str, Any] = {}
    for name, value in recorded.arguments.items():
        if isinstance(value, torch.Tensor):
            arguments[name] = _operand(value, types.get((name, None), WHOLE))
        elif isinstance(value, (list, tuple)):
            arguments[name] = tuple(
                _operand(item, types.get((name, i), WHOLE)) if isinstance(item, torch.Tensor) else item
                for i, item in enumerate(value)
            )
        else:
            arguments[name] = value
    results = tuple(_operand(r, WHOLE) if isinstance(r, torch.Tensor) else None for r in recorded.results)
    return Call(recorded.target, arguments, results, num_samples)


def required(ruling: ChunkRule, place: Place) -> SplitType:
    """The type that a ruling needs of one operand."""
    need = ruling.operands.get(place[0], WHOLE)
    if isinstance(need, tuple):
        assert place[1] is not None
        return need[place[1]] or WHOLE
    return need


def chunk_arguments(
    recorded: Recorded, ruling: ChunkRule, pieces: Mapping[Place, Any], num_samples: int
) -> dict[str, Any]:
    """The arguments of one chunk's call: operands replaced, sizes and rewrites applied."""
    arguments: dict[str, Any] = {}
    for name, value in recorded.arguments.items():
        if (name, None) in pieces:
            arguments[name] = pieces[name, None]
        elif isinstance(value, (list, tuple)):
            arguments[name] = [pieces.get((name, i), item) for i, item in enumerate(value)]
        else:
            arguments[name] = value
    first = ruling.result[0] if isinstance(ruling.result, tuple) else ruling.result
    for name in ruling.sizes:
        assert isinstance(first, Sliced)
        arguments[name] = list(first.shape(tuple(recorded.results[0].shape), num_samples))
    return arguments if ruling.rewrite is None else ruling.rewrite(arguments, num_samples)


def _types_in(ruling: ChunkRule) -> Iterator[Any]:
    for need in (*ruling.operands.values(), ruling.result):
        yield from need if isinstance(need, tuple) else (need,)


def granule_of(ruling: ChunkRule, have: Mapping[Place, SplitType]) -> int:
    """Every chunk must be a multiple of it."""
    kinds = [kind.granule for kind in (*_types_in(ruling), *have.values()) if isinstance(kind, Sliced)]
    return math.lcm(*kinds) if kinds else 1


def partitions(num_samples: int, granule: int) -> Iterator[list[int]]:
    """Chunks of one, of two, and uneven ones."""
    units = num_samples // granule
    shapes = [[1] * units] if units <= 6 else []
    shapes.append([2] * (units // 2) + [1] * (units % 2))
    shapes.append([units - 1, 1] if units > 1 else [1])
    seen = []
    for shape in shapes:
        if shape not in seen:
            seen.append(shape)
            yield [size * granule for size in shape]


def _addends(value: torch.Tensor, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    parts = []
    rest = value.clone()
    for _ in range(count - 1):
        if value.dtype.is_floating_point or value.dtype.is_complex:
            part = torch.randn(value.shape, dtype=value.dtype, generator=generator)
        else:
            part = torch.randint(-3, 4, value.shape, generator=generator).to(value.dtype)
        parts.append(part)
        rest = rest - part
    return [*parts, rest]


def prove(recorded: Recorded, types: Mapping[Place, SplitType], num_samples: int) -> ChunkRule | None:
    """Ask the rule under a hypothesis; if it rules, check it at every kind of partition."""
    rule = rule_for(recorded.target)
    ruling = None if rule is None else rule(call_of(recorded, types, num_samples))
    if ruling is None:
        return None
    check_conversions(recorded, ruling, types)
    for sizes in partitions(num_samples, granule_of(ruling, types)):
        merged = _run_chunks(recorded, ruling, sizes, num_samples)
        for got, want in zip(merged, recorded.results, strict=True):
            check_equal(got, want, recorded, types, sizes)
    return ruling


def check_conversions(recorded: Recorded, ruling: ChunkRule, types: Mapping[Place, SplitType]) -> None:
    """A ruling may only ask for what the engine can give."""
    for place in recorded.places():
        have, need = types.get(place, WHOLE), required(ruling, place)
        assert not (isinstance(have, Sliced) and isinstance(need, Sliced) and have != need), "no Sliced → Sliced"
        assert not isinstance(need, Merged) or have == need, "nothing becomes Merged"
    unknown = set(ruling.operands) - {name for name, _ in recorded.places()}
    assert not unknown, f"types for {unknown}, which are no operands"


def _run_chunks(recorded: Recorded, ruling: ChunkRule, sizes: list[int], num_samples: int) -> tuple[Any, ...]:
    operands = recorded.places()
    needs = {place: required(ruling, place) for place in operands}
    sums = {place: _addends(operands[place], len(sizes)) for place, need in needs.items() if isinstance(need, Merged)}
    target: Callable[..., Any] = ruling.target or recorded.target
    sink = _Sink(recorded, ruling, num_samples)
    start = 0
    for index, size in enumerate(sizes):
        pieces: dict[Place, torch.Tensor] = {}
        for place, need in needs.items():
            value = operands[place]
            if isinstance(need, Sliced):
                assert value.shape[need.dim] == need.extent(num_samples), "the type does not fit the operand"
                value = chunk_of(value, need, start, start + size, num_samples)
            pieces[place] = sums[place][index] if place in sums else value
        with torch.no_grad():
            outcome = target(**chunk_arguments(recorded, ruling, pieces, size))
        sink.take(outcome, start, size)
        start += size
    return sink.finish()


class _Sink:
    """Gathers and merges the chunks' results."""

    def __init__(self, recorded: Recorded, ruling: ChunkRule, num_samples: int) -> None:
        self.recorded, self.num_samples = recorded, num_samples
        self.joint = ruling.result if isinstance(ruling.result, Merged) else None
        self.types = ruling.result if isinstance(ruling.result, tuple) else (ruling.result,)
        self.states: dict[int, Any] = {}

    def take(self, outcome: Any, start: int, size: int) -> None:
        if self.joint is not None:
            self._merge(0, self.joint, outcome, size)
            return
        pieces = as_results(outcome)
        assert len(self.types) == len(pieces) == len(self.recorded.results)
        for index, (kind, piece) in enumerate(zip(self.types, pieces, strict=True)):
            whole = self.recorded.results[index]
            if isinstance(kind, Sliced):
                self._store(index, kind, piece, whole, start, size)
            elif isinstance(kind, Merged) and piece is not None:
                assert piece.shape == whole.shape, f"a sum of {tuple(piece.shape)}, not {tuple(whole.shape)}"
                self._merge(index, kind, piece, size)
            else:
                self.states[index] = piece

    def _merge(self, index: int, kind: Merged, piece: Any, size: int) -> None:
        if index in self.states:
            self.states[index] = kind.monoid.add(self.states[index], piece, size)
        else:
            self.states[index] = kind.monoid.start(piece, size)

    def _store(self, index: int, kind: Sliced, piece: Any, whole: Any, start: int, size: int) -> None:
        predicted = kind.shape(tuple(whole.shape), size)
        assert tuple(piece.shape) == predicted, f"chunk has {tuple(piece.shape)}, its type predicts {predicted}"
        assert piece.dtype == whole.dtype, f"chunk has {piece.dtype}, the whole {whole.dtype}"
        room = self.states.setdefault(index, torch.empty(whole.shape, dtype=whole.dtype))
        store_chunk(room, piece, kind, start, start + size, self.num_samples)

    def finish(self) -> tuple[Any, ...]:
        if self.joint is not None:
            return as_results(self.joint.monoid.finish(self.states[0]))
        return tuple(
            kind.monoid.finish(self.states[i]) if isinstance(kind, Merged) and i in self.states else self.states.get(i)
            for i, kind in enumerate(self.types)
        )


def check_equal(got: Any, want: Any, recorded: Recorded, types: Mapping[Place, SplitType], sizes: list[int]) -> None:
    """Exact for integers and booleans, to `TOLERANCE` of the norm otherwise; shapes and dtypes always."""
    if not isinstance(want, torch.Tensor):
        return
    story = f"{recorded.signature()}\n as {dict(types)} in chunks {sizes}\n got {got}\n want {want}"
    assert got.shape == want.shape and got.dtype == want.dtype, story
    if "empty" in str(recorded.target):
        return
    if not (want.dtype.is_floating_point or want.dtype.is_complex):
        assert torch.equal(got, want), story
        return
    values = list(finite(tree_leaves(dict(recorded.arguments)), want))
    tolerance = max(TOLERANCES.get(value.dtype, TOLERANCE) for value in (*values, want))
    scale = max([1.0, *(float(value.abs().max()) for value in values)])
    assert torch.allclose(got, want, rtol=tolerance, atol=tolerance * scale, equal_nan=True), story


def finite(leaves: list[Any], want: torch.Tensor) -> Iterator[torch.Tensor]:
    """Tensors that set the scale of rounding errors."""
    for leaf in (*leaves, want):
        if isinstance(leaf, torch.Tensor) and leaf.numel() and (leaf.dtype.is_floating_point or leaf.dtype.is_complex):
            wide = leaf.float() if leaf.dtype.itemsize == 1 else leaf  # Floats of one byte can hardly do anything.
            yield wide.nan_to_num(posinf=0.0, neginf=0.0)
