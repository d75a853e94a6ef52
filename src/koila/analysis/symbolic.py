"""Symbolic shapes: every shape of a typed program, with the batch as a symbol.

*Takes* the facts of a program. *Gives* the shape of each value, in which a dimension that holds the batch is written as
a formula of it. A dimension that only happens to have the size of the batch stays a number.
"""

from __future__ import annotations

import torch

from koila.analysis.split import Facts
from koila.analysis.types import Sliced


def apply_symbolic_shapes(facts: Facts, symbol: str = "B") -> dict[str, tuple[int | str, ...]]:
    """The shape of every value of a typed program, its batch written as a symbol."""
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
