"""Row constructors: the words that the tables of rules are written in.

*Takes* a short description of an operator's dimensions. *Gives* its `Rule`.

Two words cover most operators. `letters("self=ik mat2=kj -> ij+")` names dimensions: a lower-case letter may hold the
batch, an upper-case one is rigid; `*` stands for any leading dimensions (agreeing from the right, broadcast), `_` for
any trailing rigid ones; a result with `+` is summed over a batch whose letter it lacks, a result `-` is the same for
every chunk. An operand with fewer dimensions than letters has the last ones. `along("dim")` is for operators that
work inside one dimension of same-shaped operands and treat all others as a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

import torch

from koila.analysis.chunk_rule import Call, ChunkRule, Operand, Rule
from koila.analysis.prepasses import dims_of
from koila.analysis.rules._axes import Axes, Labels, follow, right
from koila.analysis.types import Merged, Sliced, SplitType

Check = Callable[[Call], bool]


def pointwise(call: Call) -> ChunkRule | None:
    """Every element of a result comes from the elements at the same (broadcast) place."""
    return follow(call, Axes(_aligned(call), tuple(None if r is None else right(r.ndim) for r in call.results)))


def elementwise(*sizes: str, only: Sequence[str] | None = None) -> Rule:
    """Pointwise, with arguments that hold the result's size, or in some of its operands only."""

    def rule(call: Call) -> ChunkRule | None:
        labels = {name: value for name, value in _aligned(call).items() if only is None or name in only}
        results = tuple(None if r is None else right(r.ndim) for r in call.results)
        return follow(call, Axes(labels, results, sizes=sizes))

    return rule


def _aligned(call: Call) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in call.operands().items():
        if isinstance(value, Operand):
            found[name] = right(value.ndim)
        else:
            found[name] = tuple(() if item is None else right(item.ndim) for item in value)
    return found


@dataclass(frozen=True, slots=True)
class _Spec:
    operands: dict[str, str]
    results: tuple[str, ...]


def _parsed(text: str) -> _Spec:
    before, _, after = text.partition("->")
    pairs = (word.split("=") for word in before.split())
    return _Spec(dict(pairs), tuple(after.split()))


def _spelled(word: str, ndim: int) -> Labels:
    """The labels of a word for an operand of that many dimensions."""
    word = word.rstrip("+")
    if word.endswith("_"):
        word = word[:-1].ljust(ndim, "_")[:ndim] if not word.startswith("*") else word
    leading = 0
    if word.startswith("*"):
        word = word[1:]
        leading = max(0, ndim - len(word))
    letters = word[len(word) - (ndim - leading) :]
    star: Labels = tuple(("*", place - leading) for place in range(leading))
    return (*star, *(letter if letter.islower() else None for letter in letters))


def letters(text: str, *, sizes: tuple[str, ...] = (), when: Check | None = None, broadcast: bool = True) -> Rule:
    """A rule from named dimensions; see the module's first paragraph."""
    spec = _parsed(text)

    def rule(call: Call) -> ChunkRule | None:
        if when is not None and not when(call):
            return None
        operands = {
            name: _spelled(word, call[name].ndim)
            for name, word in spec.operands.items()
            if isinstance(call[name], Operand)
        }
        results = tuple(
            None if result is None or word == "-" else _spelled(word, result.ndim)
            for word, result in zip(spec.results, call.results, strict=True)
        )
        summed = tuple(word.endswith("+") for word in spec.results)
        return follow(call, Axes(operands, results, summed, broadcast=broadcast, sizes=sizes))

    return rule


def along(dim: str, *, first: str = "self", when: Check | None = None, free: Sequence[str] = ()) -> Rule:
    """The operator works inside the dimensions that the argument `dim` names; every other one is a batch.

    `first` names the operand that has the full number of dimensions. Operands and results of that rank follow it;
    others are Whole.
    """

    def rule(call: Call) -> ChunkRule | None:
        if when is not None and not when(call):
            return None
        ndim = call[first].ndim
        rigid = dims_of(call[dim], ndim)
        operands = {
            name: right(ndim, rigid)
            for name, value in call.operands().items()
            if isinstance(value, Operand) and value.ndim == ndim and name not in free
        }
        results = tuple(None if r is None else right(ndim, rigid) if r.ndim == ndim else () for r in call.results)
        return follow(call, Axes(operands, results, broadcast=False))

    return rule


def trailing(num_rigid: int, *, sizes: tuple[str, ...] = ()) -> Rule:
    """The last `num_rigid` dimensions of every operand and result are rigid, the leading ones are a batch."""

    def labels(value: Operand) -> Labels:
        return right(value.ndim, set(range(max(0, value.ndim - num_rigid), value.ndim)))

    def rule(call: Call) -> ChunkRule | None:
        operands = {name: labels(value) for name, value in call.operands().items() if isinstance(value, Operand)}
        results = tuple(None if r is None else labels(r) for r in call.results)
        return follow(call, Axes(operands, results, broadcast=False, sizes=sizes))

    return rule


def either(*rules: Rule) -> Rule:
    """The first of several rules that rules."""

    def rule(call: Call) -> ChunkRule | None:
        return next((ruling for rule in rules if (ruling := rule(call)) is not None), None)

    return rule


def plain_number(value: Any) -> bool:
    """Whether an argument is a number that the trace fixed: one that varies from step to step has a type of its own."""
    return type(value) in (int, float)


def inexact(dtype: torch.dtype) -> bool:
    """Whether a dtype can be shared out by fractions."""
    return dtype.is_floating_point or dtype.is_complex


def weighted(ruling: ChunkRule, call: Call, result: SplitType | tuple[SplitType, ...]) -> ChunkRule:
    """The ruling with the chunk's result scaled by the chunk's share of the samples."""
    total = call.num_samples

    def rewrite(arguments: dict[str, Any], num_samples: int) -> dict[str, Any]:
        return {"share": num_samples / total, **arguments}

    return replace(ruling, result=result, rewrite=rewrite, target=_scaled(call.target))


@cache
def _scaled(whole: Any) -> Callable[..., Any]:
    """An operator whose result is scaled: one function for each, so that schedules of other sizes call the same."""

    def scaled(share: float, **arguments: Any) -> Any:
        return torch.ops.aten.mul.Scalar(whole(**arguments), share)

    return scaled


def dense(rule: Rule, *names: str) -> Rule:
    """For kernels that read these operands as if they were contiguous: a chunk's are made so where they are not."""

    def densely(call: Call) -> ChunkRule | None:
        ruling = rule(call)
        if ruling is None or all(_outermost(call[name], ruling.operands.get(name)) for name in names):
            return ruling
        return replace(ruling, target=_on_dense(call.target, names))

    return densely


@cache
def _on_dense(kernel: Any, names: tuple[str, ...]) -> Callable[..., Any]:
    """A kernel on contiguous operands: one function for each, so that schedules of other sizes call the same."""

    def target(**arguments: Any) -> Any:
        return kernel(**{name: value.contiguous() if name in names else value for name, value in arguments.items()})

    return target


def _outermost(operand: Operand, kind: Any) -> bool:
    """Whether a chunk of a contiguous value is contiguous."""
    return not isinstance(kind, Sliced) or kind.outer * prod(operand.shape[: kind.dim]) == 1


def shared_out(rule: Rule, factor: str) -> Rule:
    """For `factor * self + product`: a sum over the batch takes `self` in shares, by number of samples."""

    def shares(call: Call) -> ChunkRule | None:
        ruling = rule(call)
        if ruling is None or not isinstance(ruling.result, Merged):
            return ruling
        if not inexact(call.result.dtype) or not plain_number(call[factor]):
            return None
        total = call.num_samples

        def rewrite(arguments: dict[str, Any], num_samples: int) -> dict[str, Any]:
            return {**arguments, factor: arguments[factor] * num_samples / total}

        return replace(ruling, rewrite=rewrite)

    return shares
