"""Split rules: what each operator does with a chunk of the batch.

*Takes* an operator. *Gives* its rule: a function from a `Call` to a `ChunkRule`, or None where the operator must run
whole (Rule 3). An operator is a line in the table of its family.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from koila._torch import OpOverload, OpOverloadPacket
from koila.analysis.chunk_rule import Call, ChunkRule, Operand, Rule
from koila.analysis.rules import (
    attention,
    conv,
    devices,
    index,
    linalg,
    loss,
    matmul,
    norm,
    pointwise,
    recurrent,
    reduce,
    softmax,
    view,
)
from koila.analysis.rules._axes import demoted
from koila.analysis.rules.linear import LINEAR, Linear, keeps_sum
from koila.analysis.types import Merged, Sliced

__all__ = ["FAMILIES", "LINEAR", "RULES", "rule_for"]

FAMILIES: dict[str, dict[Any, Rule]] = {
    "pointwise": pointwise.ROWS,
    "reduce": reduce.ROWS,
    "matmul": matmul.ROWS,
    "view": view.ROWS,
    "index": index.ROWS,
    "loss": loss.ROWS,
    "norm": norm.ROWS,
    "conv": conv.ROWS,
    "attention": attention.ROWS,
    "softmax": softmax.ROWS,
    "linalg": linalg.ROWS,
    "recurrent": recurrent.ROWS,
    "devices": devices.ROWS,
}

RULES: dict[OpOverload | OpOverloadPacket, Rule] = {
    target: rule for rows in FAMILIES.values() for target, rule in rows.items()
}


@cache
def rule_for(target: OpOverload) -> Rule | None:
    """The rule of an operator, or None if it always runs whole.

    >>> import torch
    >>> rule_for(torch.ops.aten.nonzero.default) is None
    True
    """
    if not isinstance(target, OpOverload):
        return None
    rule = RULES.get(target) or RULES.get(target.overloadpacket) or pointwise.tagged(target)
    linear = LINEAR.get(target)
    return None if rule is None and linear is None else _decided(rule, linear)


def _decided(rule: Rule | None, linear: Linear | None) -> Callable[[Call], ChunkRule | None]:
    """Keep a sum open where the operator is linear; else take merges as finished and follow the slices."""

    def decide(call: Call) -> ChunkRule | None:
        kinds = _kinds(call)
        if linear is not None and Merged in kinds:
            ruling = keeps_sum(call, linear)
            if ruling is not None:
                return ruling
        if rule is None or Sliced not in kinds:
            return None
        return rule(demoted(call) if Merged in kinds else call)

    return decide


def _kinds(call: Call) -> set[type]:
    """The kinds of types that the operands of a call have."""
    values = call.arguments.values()
    found = {type(value.type) for value in values if isinstance(value, Operand)}
    for value in values:
        if isinstance(value, tuple):
            found |= {type(item.type) for item in value if isinstance(item, Operand)}
    return found
