"""Uniform values: a chunk of a whole value that is remade instead of cut out.

*Takes* a node whose operands are all whole, and the chunk that somebody wants of its result. *Gives* the chunks of its
operands from which the same operator makes it, or None. Zeros, ones, expanded scalars, masks drawn at random and
whatever is pointwise in them are never held whole for this reason; the work is the same, done piece by piece.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from koila._torch import OpOverload
from koila.analysis.chunk_rule import ChunkRule
from koila.analysis.rules.view import factored
from koila.analysis.types import Sliced
from koila.ir.tree import leaves

aten = torch.ops.aten
Plan = tuple[ChunkRule, list[Sliced | None]]

_FACTORIES = {
    aten.full.default: ("size",),
    aten.zeros.default: ("size",),
    aten.ones.default: ("size",),
    aten.empty.memory_format: ("size",),
    aten.new_zeros.default: ("size",),
    aten.new_ones.default: ("size",),
    aten.new_full.default: ("size",),
    aten.new_empty.default: ("size",),
}
"""Factories with the argument that holds their size: nothing of the operand's data is used."""

_LIKE = {
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default,
}  # fmt: skip
_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
_ELEMENTWISE = {aten.clone.default, aten._to_copy.default, aten.where.self}


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _aligned(node: fx.Node, operand: fx.Node, kind: Sliced) -> Sliced | None:
    """The operand's part in a broadcast result: None if it is the same for every chunk."""
    shape, result = _shape(operand), _shape(node)
    dim = kind.dim - (len(result) - len(shape))
    return kind.at(dim) if dim >= 0 and shape[dim] != 1 else None


def _int(argument: Any) -> int:
    return int(argument)


def _operands(node: fx.Node) -> list[fx.Node]:
    return [leaf for leaf in leaves((node.args, node.kwargs)) if isinstance(leaf, fx.Node)]


def operand_types(node: fx.Node, kind: Sliced, num_samples: int) -> Plan | None:
    """How a chunk of a whole node's result is made from its operands, each by a type or None for the whole of it."""
    target, operands = node.target, _operands(node)
    if not isinstance(target, OpOverload) or not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    if kind.dim >= len(_shape(node)) or _shape(node)[kind.dim] != kind.extent(num_samples):
        return None
    if target in _FACTORIES:
        return ChunkRule({}, kind, sizes=_FACTORIES[target]), [None] * len(operands)
    if target in _LIKE:
        return ChunkRule({"self": kind}, kind), [kind]
    if target is aten.expand.default:
        return ChunkRule({}, kind, sizes=("size",)), [_aligned(node, operands[0], kind)]
    if target in _ELEMENTWISE or torch.Tag.pointwise in target.tags:
        return ChunkRule({}, kind), [_aligned(node, operand, kind) for operand in operands]
    return _moved(node, operands, kind, num_samples)


def _moved(node: fx.Node, operands: list[fx.Node], kind: Sliced, num_samples: int) -> Plan | None:
    """Operators that only rearrange: where the chunk was before."""
    target = node.target
    rank = len(_shape(operands[0])) if operands else 0
    if target in _VIEWS:
        before = factored(_shape(node), kind, _shape(operands[0]), num_samples)
        size = "shape" if target is aten.reshape.default else "size"
        return None if before is None else (ChunkRule({}, kind, sizes=(size,)), [before])
    if target is aten.permute.default:
        order: Any = node.args[1]
        return ChunkRule({}, kind), [kind.at(order[kind.dim] % rank)]
    if target is aten.t.default and rank == 2:
        return ChunkRule({}, kind), [kind.at(1 - kind.dim)]
    if target is aten.transpose.int:
        first, second = (_int(node.args[place]) % rank for place in (1, 2))
        return ChunkRule({}, kind), [kind.at({first: second, second: first}.get(kind.dim, kind.dim))]
    if target is aten.unsqueeze.default:
        added = _int(node.args[1]) % (rank + 1)
        return None if added == kind.dim else (ChunkRule({}, kind), [kind.at(kind.dim - (kind.dim > added))])
    return None
