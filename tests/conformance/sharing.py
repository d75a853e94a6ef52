"""What the runs of one trial have in common is done once.

*Takes* koila's tracer and analysis. *Gives* the same functions with a short memory: a trace does not depend on the cut,
and an analysis does not depend on the chunk size. Every run is planned and made on its own.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from koila.analysis import program as programs
from koila.analysis.trace import Joint
from koila.ir.cache import Cache
from koila.ir.graph import Graph
from koila.ir.job import Demand
from koila.planning.in_force import forget_decisions

_memory: Cache[Any] = Cache("conformance_memory", 256)


def _traced(graph: Graph, demand: Demand, whole_norms: bool) -> Any:
    """A program's structure without its batch, and the floats of its slots."""
    calls, metas, _, counting, outputs = graph.key
    return calls, metas, counting, outputs, tuple(node.slots for node in graph.nodes), demand, whole_norms


def _analysed(joint: Joint, batches: dict[int, int], num_samples: int, wanted: set[int] | None, *others: Any) -> Any:
    chosen = None if wanted is None else frozenset(wanted)
    return joint.module, tuple(batches.items()), num_samples, chosen, *others


def _remember(module: Any, name: str, key: Callable[..., Any]) -> None:
    original = getattr(module, name)
    if not hasattr(original, "__wrapped__"):

        @wraps(original)
        def remembering(*args: Any) -> Any:
            return _memory.get_or_add((name, key(*args)), lambda: original(*args))

        setattr(module, name, remembering)


@contextmanager
def share() -> Iterator[None]:
    """Remember what does not depend on the run, in a scope."""
    before = programs.trace, programs.analyse
    _remember(programs, "trace", _traced)
    _remember(programs, "analyse", _analysed)
    try:
        yield
    finally:
        programs.trace, programs.analyse = before
        _memory.clear()


def forget() -> None:
    """Every entry starts with no program known: what it finds does not depend on the entries before it."""
    _memory.clear()
    programs.forget_programs()
    forget_decisions()
    gc.collect()
