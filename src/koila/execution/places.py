"""Where an error of a run in chunks comes from in the user's program.

*Takes* the error of a generated function, in which every line knows the recorded call that it belongs to. *Gives* the
same error with a note of that call's place; for a loss whose label is no class, the error that eager's loss raises.
"""

from __future__ import annotations

import re
from types import TracebackType

import torch.nn.functional as F

from koila.execution.codegen import recorded_call
from koila.ir.graph import Graph
from koila.ir.node import Node

_LOSSES = (F.cross_entropy, F.nll_loss)
_OUT_OF_BOUNDS = re.compile(r"index (-?\d+) is out of bounds for dimension \d+ with size \d+")


def placed(error: Exception, graph: Graph) -> Exception:
    """What is to be raised instead of the error of a run; the error itself if its place is not known."""
    node = _failed_call(graph, error.__traceback__)
    if node is None:
        return error
    found = _OUT_OF_BOUNDS.search(str(error)) if node.func in _LOSSES else None
    if found is not None:  # In chunks a loss is a lookup like any other.
        error = IndexError(f"Target {found[1]} is out of bounds.")
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
