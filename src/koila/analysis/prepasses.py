"""Shape and batch inference by name: thin functions over the split rules.

*Takes* a shape, its batch and a reduction. *Gives* the shape and the batch of the result; `apply_symbolic_shapes` gives
every shape of a typed program with the batch as a symbol. Nothing here knows a formula: fake tensors give shapes, the
rule tables give batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from koila.analysis.chunk_rule import Call, Operand
from koila.analysis.rules import rule_for
from koila.analysis.split import Facts
from koila.analysis.types import WHOLE, Sliced
from koila.interfaces import BatchInfo

aten = torch.ops.aten
Inferred = tuple[tuple[int, ...], BatchInfo | None]


def reduce_dims(
    shape: Sequence[int], dim: int | Sequence[int] | None = None, keepdim: bool = False, batch: BatchInfo | None = None
) -> Inferred:
    """Shape and batch of a reduction over some dimensions.

    >>> reduce_dims((8, 3, 5), dim=1, batch=BatchInfo(0, 8))
    ((8, 5), BatchInfo(index=0, value=8))
    >>> reduce_dims((8, 3), dim=0, batch=BatchInfo(0, 8))
    ((3,), None)
    """
    dims = None if dim is None else [dim] if isinstance(dim, int) else list(dim)
    return _inferred(aten.sum.dim_IntList, shape, {"dim": dims, "keepdim": keepdim}, batch)


def mean(
    shape: Sequence[int], dim: int | Sequence[int] | None = None, keepdim: bool = False, batch: BatchInfo | None = None
) -> Inferred:
    """Shape and batch of a mean: those of the sum that it is made of."""
    return reduce_dims(shape, dim, keepdim, batch)


def _inferred(target: Any, shape: Sequence[int], options: dict[str, Any], batch: BatchInfo | None) -> Inferred:
    with FakeTensorMode():
        operand = torch.empty(tuple(shape))
        result = tuple(target(operand, *options.values()).shape)
    rule = rule_for(target)
    if batch is None or rule is None:
        return result, None
    described = Operand(tuple(shape), torch.float32, Sliced(batch.index % len(shape)))
    arguments = {"self": described, **options, "dtype": None}
    ruling = rule(Call(target, arguments, (Operand(result, torch.float32, WHOLE),), batch.value))
    kind = None if ruling is None else ruling.result
    return result, batch.map(kind.dim) if isinstance(kind, Sliced) else None


def apply_symbolic_shapes(facts: Facts, symbol: str = "B") -> dict[str, tuple[int | str, ...]]:
    """The shape of every value of a typed program, its batch written as a symbol.

    A dimension that only happens to have the size of the batch stays a number.
    """
    found: dict[str, tuple[int | str, ...]] = {}
    for node in facts.joint.module.graph.nodes:
        value, kind = node.meta.get("val"), facts.types.get(node.name)
        if isinstance(value, torch.Tensor):
            shape: list[int | str] = list(value.shape)
            if isinstance(kind, Sliced):
                shape[kind.dim] = _symbolic(kind, symbol)
            found[node.name] = tuple(shape)
    return found


def _symbolic(kind: Sliced, symbol: str) -> str:
    text = symbol if kind.granule == 1 else f"{symbol}/{kind.granule}"
    text = text if kind.outer == 1 else f"{kind.outer}*{text}"
    return text if kind.inner == 1 else f"{text}*{kind.inner}"
