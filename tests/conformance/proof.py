"""What the analysis proves about the results of a pending program.

*Takes* lazy results. *Gives* whether one of them is Sliced, Merged or Uniform.
"""

from __future__ import annotations

from typing import Any

import koila
from koila.analysis.program import program_of
from koila.analysis.split import Item, analyse
from koila.ir.graph import collect
from koila.ir.job import Demand
from tests.conformance.trees import tensors_of


def is_proved(outputs: Any) -> bool:
    """Whether some result is cut, merged, or made from nothing that is cut."""
    values = [t._value for t in tensors_of(outputs) if isinstance(t, koila.LazyTensor)]
    if any(value.real is not None and value.batch is not None for value in values):
        return True  # A result is a cut input itself.
    pending = [value for value in values if value.real is None]
    if not pending:
        return False
    graph = collect(pending, [])
    program = program_of(graph, Demand())
    joint = program.joint
    facts = analyse(joint, graph.batches, program.num_samples, set(range(len(pending))))
    inputs = zip(_placeholders(joint), joint.inputs, strict=True)
    cut = {node for node, found in inputs if _is_cut(found, graph.batches)}
    return any(_holds(item, cut) for item in facts.results if item is not None)


def _placeholders(joint: Any) -> list[Any]:
    return [node for node in joint.module.graph.nodes if node.op == "placeholder"]


def _is_cut(found: Any, batches: dict[int, int]) -> bool:
    return found.kind == "leaf" and found.index in batches


def _holds(result: Item, cut: set[Any]) -> bool:
    if result.kind in ("finish", "gather"):
        return True
    seen: set[Item] = set()
    pending = [result]
    while pending:
        item = pending.pop()
        if item not in seen:
            seen.add(item)
            if item.kind == "input" and item.node in cut:
                return False
            pending += item.operands
    return True
