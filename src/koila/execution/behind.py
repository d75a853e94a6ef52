"""Behind the leaves: what a backward pass costs once it has left a program.

*Takes* a program and its budget. *Gives* the bytes that autograd holds behind its leaves, and those that it allocates
there. Results of earlier runs in chunks are such leaves: their programs run again in the same backward pass, within
what this program's gradients leave of the budget.
"""

from __future__ import annotations

from typing import Any

from koila._budget import Budget
from koila.ir.graph import Graph
from koila.planning.eager_history import eager_history
from koila.planning.whole_peak import leaf_bytes


def history_behind(graph: Graph, budget: Budget) -> tuple[int, int]:
    """The bytes that are held, and those that a backward pass allocates."""
    allowed = budget.allowed_bytes
    gradients = leaf_bytes(leaf for leaf in graph.leaves if leaf.requires_grad)

    def rerun(node: Any, alive: int) -> int:
        return 0 if allowed is None else node.state.rerun_bytes(allowed - gradients - alive)

    found = eager_history(graph.leaves, rerun)
    known = _known_peak(graph)
    backward = found.backward_bytes
    return found.held_bytes, backward if known is None else min(backward, max(0, known - found.held_bytes))


def _known_peak(graph: Graph) -> int | None:
    """The peak of the one value with a history, if the run that made it was projected with its backward pass."""
    made = [leaf for leaf in graph.leaves if leaf.grad_fn is not None]
    if len(made) != 1:
        return None
    operands = (value for node in graph.nodes for value in node.values() if value.real is made[0])
    return next((value.backward_peak_bytes for value in operands), None)
