"""Behind the leaves: what a backward pass costs once it has left a program.

*Takes* a program and its budget. *Gives* the bytes that autograd holds behind its leaves, and those that it allocates
there. Results of earlier runs in chunks are such leaves: their programs run again in the same backward pass, within
what this program's gradients leave of the budget. A leaf that the program only takes detached is held, and no more: a
hidden state that a loop carries from batch to batch costs no second backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from koila._budget import Budget
from koila.ir.graph import Graph
from koila.ir.node import Node, Value
from koila.planning.eager_history import eager_history
from koila.planning.whole_peak import leaf_bytes


def history_behind(graph: Graph, budget: Budget) -> tuple[int, int]:
    """The bytes that are held, and those that a backward pass allocates."""
    made = [leaf for leaf in graph.leaves if leaf.grad_fn is not None]
    if not made:
        return 0, 0
    allowed = budget.allowed_bytes
    gradients = leaf_bytes(leaf for leaf in graph.leaves if leaf.requires_grad)

    def rerun(node: Any, alive: int) -> int:
        return 0 if allowed is None else node.state.rerun_bytes(allowed - gradients - alive)

    held, reached = eager_history(made).held_bytes, _reached(graph)
    backward, known = eager_history(reached, rerun).backward_bytes, _known_peak(graph, reached)
    return held, backward if known is None else min(backward, max(0, known - held))


def _reached(graph: Graph) -> list[torch.Tensor]:
    """The leaves with a history to which gradients may come: those that not only calls without a gradient read.

    Asked of calls and not of their results: a program that runs again has results that are bound by now.
    """
    calls = (node for node in graph.nodes if node.context.grad and _has_gradient(node))
    operands = (*(operand for node in calls for operand in node.operands), *graph.outputs)
    reals = {id(operand.real if isinstance(operand, Value) else operand) for operand in operands}
    return [leaf for leaf in graph.leaves if leaf.grad_fn is not None and id(leaf) in reals]


def _has_gradient(node: Node) -> bool:
    """Whether autograd goes through a call: not through `detach`."""
    return any(output.prepass.requires_grad for output in node.inference.outputs) or bool(node.inference.writes)


def _known_peak(graph: Graph, made: Sequence[torch.Tensor]) -> int | None:
    """The peak of the one value with a history, if the run that made it was projected with its backward pass."""
    if len(made) != 1:
        return None
    operands = (value for node in graph.nodes for value in node.values() if value.real is made[0])
    return next((value.backward_peak_bytes for value in operands), None)
