"""Where an error of a run in chunks comes from in the user's program.

*Takes* the error of a generated function, in which every line knows the recorded call that it belongs to. *Gives* the
same error with a note of that call's place; for a label that is no class, and for an index that is not there, the error
that eager raises.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F

from koila.execution.codegen import recorded_call
from koila.ir.graph import Graph
from koila.ir.node import Node


def _no_class(label: str, dim: str, size: str) -> str:
    return f"Target {label} is out of bounds."


def _no_element(place: str, dim: str, size: str) -> str:
    # Negative places have been counted from the end by then.
    asked = int(place) - int(size) if int(place) < 0 else int(place)
    return f"index {asked} is out of bounds for dimension {dim} with size {size}"


_IN_CHUNKS_A_LOOKUP: dict[Any, Callable[[str, str, str], str]] = {
    F.cross_entropy: _no_class, F.nll_loss: _no_class, torch.Tensor.__getitem__: _no_element,
}  # fmt: skip
"""Functions that in chunks look up elements by another kernel than in eager, and what eager's says of one that is not
there."""
_OUT_OF_BOUNDS = re.compile(r"index (-?\d+) is out of bounds for dimension (\d+) with size (\d+)")


def placed(error: Exception, graph: Graph) -> Exception:
    """What is to be raised instead of the error of a run; the error itself if its place is not known."""
    node = _failed_call(graph, error.__traceback__)
    if node is None:
        return error
    found = _OUT_OF_BOUNDS.search(str(error)) if node.func in _IN_CHUNKS_A_LOOKUP else None
    if found is not None and not isinstance(error, IndexError):
        error = IndexError(_IN_CHUNKS_A_LOOKUP[node.func](*found.groups()))
    error.add_note(f"{node.name} was recorded at {node.site}")
    return error


def _failed_call(graph: Graph, traceback: TracebackType | None) -> Node | None:
    """The recorded call that the innermost line of generated code belongs to; a backward pass has none."""
    found = None
    while traceback is not None:
        here = recorded_call(traceback)
        found = found if here is None else here
        traceback = traceback.tb_next
    return None if found is None else graph.nodes[found]
