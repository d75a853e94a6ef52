"""FX graphs of many nodes, made fast.

*Takes* a node's name, target and arguments. *Gives* the node, at the end of a graph. `Graph.create_node` takes several
times as long: it looks for symbolic sizes among all arguments, of which koila's graphs have none, and for a free name.
"""

from __future__ import annotations

from typing import Any

from torch import fx


def add_node(
    graph: fx.Graph, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str
) -> fx.Node:
    """Append a node to a graph in which no other has that name.

    Look at: torch/fx/graph.py, `Graph.create_node`, which does the same after its checks.

    >>> graph = fx.Graph()
    >>> number = add_node(graph, "placeholder", "x", (), {}, "x")
    >>> negative = add_node(graph, "call_function", abs, (number,), {}, "y")
    >>> len(graph.nodes), list(number.users) == [negative], graph.placeholder("x").name
    (2, True, 'x_1')
    """
    namespace: Any = graph._graph_namespace
    assert name not in namespace._used_names, f"{name} stands for another node"
    namespace._used_names.add(name)
    node = fx.Node(graph, name, op, target, args, kwargs)
    namespace.associate_name_with_obj(name, node)
    graph._insert(node)
    graph._find_nodes_lookup_table.insert(node)
    graph._len += 1
    return node
