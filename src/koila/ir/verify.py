"""The verifier of recorded graphs: says what is wrong with an illegal one.

*Takes* a `Graph`. *Gives* nothing, or an `AnalysisError` that names the node.
"""

from __future__ import annotations

from koila.errors import AnalysisError
from koila.ir.graph import Graph
from koila.ir.node import Node, Value


def _operand_problem(node: Node, operand: object, done: set[Node]) -> str | None:
    if not isinstance(operand, Value) or operand.real is not None:
        return None
    if operand.node is None:
        return "reads a value that has neither a producer nor data"
    if operand.node not in done:
        return f"reads a result of {operand.node.name}, which is not computed before it"
    if operand.index >= operand.node.num_outputs:
        return f"reads result {operand.index} of {operand.node.name}, which has {operand.node.num_outputs}"
    return None


def _node_problem(node: Node, done: set[Node]) -> str | None:
    if len(node.versions) != len(node.operands):
        return f"has {len(node.operands)} operands but {len(node.versions)} versions"
    if len(node.draws) != len(node.inference.draws):
        return f"draws {len(node.inference.draws)} random tensors but holds {len(node.draws)}"
    if any(index >= len(node.operands) for index in node.inference.writes):
        return "writes to an operand that it does not have"
    problems = (_operand_problem(node, operand, done) for operand in node.operands)
    return next((problem for problem in problems if problem is not None), None)


def verify(graph: Graph) -> None:
    """Check that each node reads only what stands before it.

    Raises:
        AnalysisError: The graph is illegal; the message names the node and its line.
    """
    done: set[Node] = set()
    for index, node in enumerate(graph.nodes):
        problem = _node_problem(node, done)
        if problem is not None:
            raise AnalysisError(f"illegal graph: node %{index} {node.name} {problem}", where=str(node.site))
        done.add(node)
    for value in graph.outputs:
        if value.real is None and value.node not in done:
            raise AnalysisError("illegal graph: a wanted value is not computed by any of its nodes")
