"""Cutting a graph into the parts that a backend takes and the rest.

Takes: a functional ATen graph (from `make_fx` or export) and a backend, or a rule that says which nodes it takes.
Gives: the same graph with each maximal part replaced by one call of `call_delegate`.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch

from koila._torch import OpOverload
from koila._torch.delegates import CapabilityBasedPartitioner, OperatorSupportBase
from koila.delegates.call import OPERATOR_NAME, call_delegate, get_lowered_module_name
from koila.delegates.contract import describe, is_random, mutates
from koila.delegates.lowered import LoweredBackendModule
from koila.delegates.original import lift
from koila.delegates.registry import CompileSpec, get_backend
from koila.errors import DelegateError

__all__ = ["Supported", "partition"]

Supported: TypeAlias = Callable[[torch.fx.Node], bool]
"""Whether a backend takes a node."""

PART_PREFIX = "_koila_part_"


def partition(
    graph_module: torch.fx.GraphModule,
    supported: str | Supported,
    *,
    backend_id: str = "eager",
    compile_specs: Sequence[CompileSpec] = (),
) -> torch.fx.GraphModule:
    """Hand the maximal supported parts of a graph to a backend.

    A part never contains a random or impure operator, nor one that is not ATen's: for those it is not proved that
    they may move. Two supported nodes with an unsupported one between them are two parts.

    Args:
        graph_module: the graph; it is not changed. Parameters are shared with the result.
        supported: the name of a backend, which then takes all that may move (or what its method ``supports(node)``
            says), or a rule.
        backend_id: the backend, if ``supported`` is a rule.
        compile_specs: options for the backend.

    Returns:
        The graph with calls of ``lowered_module_0``, ``lowered_module_1``, … in the order of the graph.

    Raises:
        DelegateError: the graph changes a value in place, or the cut would change the order of random numbers.

    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> x = torch.ones(2)
    >>> parts = partition(make_fx(lambda x: x.sin().cumsum(0).cos())(x), lambda node: "cumsum" not in node.name)
    >>> [name for name, _ in parts.named_children()]
    ['lowered_module_0', 'lowered_module_1']
    """
    if isinstance(supported, str):
        backend_id = supported
        supported = getattr(get_backend(backend_id), "supports", _anything)
    _require_functional(graph_module)
    result = torch.fx.GraphModule(graph_module, copy.deepcopy(graph_module.graph))
    random_order = _random_names(result)
    proposer = CapabilityBasedPartitioner(result, _Support(supported), allows_single_node_partition=True)
    proposer.fuse_partitions(proposer.propose_partitions(), prefix=PART_PREFIX)
    if _random_names(result) != random_order:  # Rule 1
        raise DelegateError(
            "the parts would change the order in which random numbers are drawn",
            where=", ".join(random_order),
            hint="mark fewer nodes as supported",
        )
    for node in result.graph.find_nodes(op="call_module"):
        if str(node.target).startswith(PART_PREFIX):
            _replace_by_delegate(result, node, backend_id, compile_specs)
    result.graph.lint()
    result.recompile()
    return result


class _Support(OperatorSupportBase):
    """The rule of the backend, limited to what may move."""

    def __init__(self, supported: Supported) -> None:
        self._supported = supported

    def is_node_supported(self, submodules: Mapping[str, torch.nn.Module], node: torch.fx.Node) -> bool:
        if node.op == "call_function" and node.target is operator.getitem:
            source = node.args[0]
            return isinstance(source, torch.fx.Node) and self.is_node_supported(submodules, source)
        return _may_move(node) and self._supported(node)


def _may_move(node: torch.fx.Node) -> bool:
    # Rule 3: what is not proved to be a pure function of its arguments stays where it is.
    is_aten = node.op == "call_function" and isinstance(node.target, OpOverload)
    return is_aten and not is_random(node.target) and not node.is_impure()


def _anything(node: torch.fx.Node) -> bool:
    return True


def _require_functional(graph_module: torch.fx.GraphModule) -> None:
    for node in graph_module.graph.nodes:
        if node.op in ("call_function", "call_method") and mutates(node):
            raise DelegateError(
                f"the graph changes a value in place ({node.target}); parts of it cannot be moved",
                where=describe(node),
                hint="trace it under torch.func.functionalize",
            )


def _random_names(graph_module: torch.fx.GraphModule) -> list[str]:
    return [node.name for node in graph_module.graph.nodes if is_random(node.target)]


def _replace_by_delegate(
    root: torch.fx.GraphModule, node: torch.fx.Node, backend_id: str, compile_specs: Sequence[CompileSpec]
) -> None:
    part = root.get_submodule(str(node.target))
    assert isinstance(part, torch.fx.GraphModule)
    lifted = lift(part)
    assert not lifted.state, "a part takes parameters as arguments"
    processed = get_backend(backend_id).preprocess(lifted.graph_module, compile_specs)
    lowered = LoweredBackendModule(backend_id, lifted, processed, compile_specs, is_random=False)
    root.delete_submodule(str(node.target))
    with root.graph.inserting_before(node):
        attribute = root.graph.get_attr(get_lowered_module_name(root, lowered))
        call = root.graph.create_node("call_function", call_delegate, (attribute, *node.args), name=OPERATOR_NAME)
    call.meta = copy.copy(node.meta)
    node.replace_all_uses_with(call)
    root.graph.erase_node(node)
