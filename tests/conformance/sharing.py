"""What the cuts of one trial have in common is done once: the joint trace of a program does not depend on the cut.

*Takes* koila's tracer. *Gives* the same tracer with a short memory; cutting, planning and running are never shared.
"""

from __future__ import annotations

import gc
from functools import wraps
from typing import Any

from koila.analysis.trace import Demand, Joint
from koila.execution import programs
from koila.ir.cache import Cache
from koila.ir.graph import Graph

_joints: Cache[Joint] = Cache("conformance_traces", 16)


def _key(graph: Graph, demand: Demand) -> Any:
    """A program's structure without its batch, and the floats of its slots."""
    calls, metas, _, counting, outputs = graph.key
    return calls, metas, counting, outputs, tuple(node.slots for node in graph.nodes), demand


def share_traces() -> None:
    """Trace each program once for all of its cuts."""
    original = programs.trace
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def trace(graph: Graph, demand: Demand) -> Joint:
        return _joints.get_or_add(_key(graph, demand), lambda: original(graph, demand))

    programs.trace = trace


def forget() -> None:
    """Every entry starts with no program known: what it finds does not depend on the entries before it."""
    _joints.clear()
    programs._joints.clear()
    programs._plans.clear()
    gc.collect()
