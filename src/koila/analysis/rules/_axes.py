"""Axis labels: the one mechanism behind most rules.

*Takes* a call and a label for every dimension of its operands and results. *Gives* the ruling: a batch that lies in a
labelled dimension is followed through every operand and result that has the same label. A dimension without a label
(None) is rigid: it cannot hold the batch. A result that lacks the batch's label is a sum over the batch if it says so.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from typing import Any

import torch

from koila._torch import OpOverload, schema_of
from koila.analysis.chunk_rule import Call, ChunkRule, Operand
from koila.analysis.monoids import Sum, narrow_dtype
from koila.analysis.types import WHOLE, Merged, Sliced, SplitType

Label = Hashable | None
Labels = tuple[Label, ...]


class _Mismatch(Exception):
    """An operand cannot follow the leader."""


@dataclass(frozen=True, slots=True)
class Axes:
    """The labels of one call."""

    operands: Mapping[str, Any]
    """By argument name: labels of an operand, or a tuple of labels for a list of operands."""
    results: tuple[Labels | None, ...]
    """Labels of each result; None for a result that is the same for every chunk (an empty or absent one)."""
    summed: tuple[bool, ...] = ()
    """For each result: without the batch's label it is the sum of the chunks' results."""
    broadcast: bool = True
    """An operand of size one in the batch's dimension is the same for every chunk."""
    sizes: tuple[str, ...] = field(default=())
    """See `ChunkRule.sizes`."""


def right(ndim: int, rigid: set[int] | frozenset[int] = frozenset()) -> Labels:
    """Labels that agree from the right, as in broadcasting; `rigid` counts dimensions from the left."""
    return tuple(None if dim in rigid else dim - ndim for dim in range(ndim)) if rigid else _all_right(ndim)


@cache
def _all_right(ndim: int) -> Labels:
    return tuple(range(-ndim, 0))


def left(ndim: int, rigid: set[int] | frozenset[int] = frozenset()) -> Labels:
    """Labels that agree from the left."""
    return tuple(None if dim in rigid else dim for dim in range(ndim))


def follow(call: Call, axes: Axes) -> ChunkRule | None:
    """The ruling for the first Sliced operand that all others can follow."""
    for label, kind in _leaders(call, axes):
        try:
            return _led(call, axes, label, kind)
        except _Mismatch:
            continue
    return None


def _leaders(call: Call, axes: Axes) -> Iterator[tuple[Hashable, Sliced]]:
    """The batch's label and structure as each Sliced operand has them, largest operand first."""
    found = []
    for operand, labels in _pairs(call, axes):
        kind = operand.type
        if isinstance(kind, Sliced) and kind.dim < len(labels) and labels[kind.dim] is not None:
            found.append((prod(operand.shape), labels[kind.dim], kind))
    for _, label, kind in sorted(found, key=lambda item: -item[0]):
        assert label is not None
        yield label, kind


def _pairs(call: Call, axes: Axes) -> Iterator[tuple[Operand, Labels]]:
    for name, labels in axes.operands.items():
        value = call[name]
        if isinstance(value, Operand):
            yield value, labels
        elif isinstance(value, tuple):
            for item, item_labels in zip(value, labels, strict=True):
                if isinstance(item, Operand):
                    yield item, item_labels


def _led(call: Call, axes: Axes, label: Hashable, kind: Sliced) -> ChunkRule:
    needs: dict[str, Any] = {}
    for name, labels in axes.operands.items():
        value = call[name]
        if isinstance(value, Operand):
            needs[name] = _need(call, axes, value, labels, label, kind)
        elif isinstance(value, tuple):
            needs[name] = tuple(
                _need(call, axes, item, item_labels, label, kind) if isinstance(item, Operand) else None
                for item, item_labels in zip(value, labels, strict=True)
            )
    results = tuple(_gives(call, axes, index, label, kind) for index in range(len(call.results)))
    if not any(isinstance(result, (Sliced, Merged)) for result in results):
        raise _Mismatch
    sizes = axes.sizes if isinstance(results[0], Sliced) else ()
    return ChunkRule(needs, packed(call, results), sizes)


def packed(call: Call, results: tuple[SplitType, ...]) -> SplitType | tuple[SplitType, ...]:
    """One type for an operator that returns one tensor, a tuple for one that returns several or a list."""
    return results[0] if _returns_one(call.target) else results


@cache
def _returns_one(target: OpOverload) -> bool:
    returns = schema_of(target).returns
    return len(returns) == 1 and isinstance(returns[0].type, torch.TensorType)


def _need(call: Call, axes: Axes, operand: Operand, labels: Labels, label: Hashable, kind: Sliced) -> SplitType:
    if label not in labels:
        return WHOLE
    dim = labels.index(label)
    if operand.shape[dim] != kind.extent(call.num_samples):
        if axes.broadcast and operand.shape[dim] == 1:
            return WHOLE
        raise _Mismatch
    if isinstance(operand.type, Sliced) and operand.type != kind.at(dim):
        raise _Mismatch
    return kind.at(dim)


def _gives(call: Call, axes: Axes, index: int, label: Hashable, kind: Sliced) -> SplitType:
    result, labels = call.results[index], axes.results[index]
    if result is None or labels is None:
        return WHOLE
    if label in labels:
        dim = labels.index(label)
        if result.shape[dim] != kind.extent(call.num_samples):
            raise _Mismatch
        return kind.at(dim)
    if axes.summed and axes.summed[index]:
        return Merged(Sum(narrow_dtype(result.dtype)))
    raise _Mismatch


def demoted(call: Call) -> Call:
    """The call with every Merged operand taken as Whole: where an operator is not linear, a merge is finished first."""

    def whole(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(whole(item) for item in value)
        if isinstance(value, Operand) and isinstance(value.type, Merged):
            return replace(value, type=WHOLE)
        return value

    return replace(call, arguments={name: whole(value) for name, value in call.arguments.items()})
