"""Labels without a class: what eager's losses say of them.

*Takes* the error of a run in chunks, where a loss is a lookup like any other. *Gives* the error that eager's loss
raises, if the place that the lookup did not find is one of its labels.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from koila.execution.whole_run import run_whole
from koila.ir.graph import Graph, collect
from koila.ir.node import Node, Value

_LOSSES = (F.cross_entropy, F.nll_loss)
_OUT_OF_BOUNDS = re.compile(r"index (-?\d+) is out of bounds for dimension \d+ with size \d+")
_NUM_CALLS = 16
"""Labels that are made by more calls than this are not computed a second time."""


def label_error(graph: Graph, error: Exception) -> IndexError | None:
    """Eager's error for a label that is no class; None if the error is about something else."""
    found = _OUT_OF_BOUNDS.search(str(error))
    if found is None:
        return None
    label = int(found[1])
    for node in graph.nodes:
        if node.func in _LOSSES and any(bool((labels == label).any()) for labels in _labels(node)):
            wrong = IndexError(f"Target {label} is out of bounds.")
            wrong.add_note(f"{node.name} was recorded at {node.site}")
            return wrong
    return None


def _labels(node: Node) -> Iterator[torch.Tensor]:
    """The labels of a loss, unless they are random or dear to make."""
    given = node.args[1] if len(node.args) > 1 else node.kwargs["target"]
    if isinstance(given, torch.Tensor):
        yield given
    elif given.real is not None:
        yield given.real
    else:
        own = collect([given], [])
        if len(own.nodes) <= _NUM_CALLS and not any(each.draws for each in own.nodes):
            yield _computed(own, given)


def _computed(graph: Graph, labels: Value) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = run_whole(graph, {labels}, set())[0][labels]
    return found
