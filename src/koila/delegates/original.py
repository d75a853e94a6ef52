"""The graph that a delegate stands for, with its state turned into inputs.

Takes: a `torch.fx.GraphModule` or a `torch.export.ExportedProgram`.
Gives: `Lifted`: a graph whose placeholders are first the state (parameters, buffers, constants), then the arguments.

Without state of its own, a graph is a pure function: parameters get gradients, fake values and proxies on the same
way as every other argument.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx.graph import CodeGen

from koila._torch import storage_key
from koila._torch.delegates import PyTreeCodeGen, codegen_of, has_storage, pytree
from koila.errors import DelegateError

__all__ = ["Lifted", "OriginalModule", "lift", "without_aliases"]

STATE_KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


@dataclass(frozen=True)
class Lifted:
    """A graph without state, and what it takes to call it like the module that it came from."""

    graph_module: torch.fx.GraphModule
    """Placeholders: the state in the order of ``state``, then the (flat) arguments."""
    state: dict[str, torch.Tensor]
    """Name → parameter, buffer or constant; the very tensors of the source."""
    takes_leaves: bool
    """Whether the graph wants its arguments as a flat list of leaves."""
    out_spec: pytree.TreeSpec | None
    """The structure of the result, if the graph gives leaves."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Lifted:
        # A TreeSpec never changes, and PyTorch warns when one is copied or pickled.
        return replace(self, graph_module=copy.deepcopy(self.graph_module, memo), state=copy.deepcopy(self.state, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        spec = None if self.out_spec is None else pytree.treespec_dumps(self.out_spec)
        return _load_lifted, (self.graph_module, self.state, self.takes_leaves, spec)

    def flatten(self, args: Sequence[Any]) -> Sequence[Any]:
        """Give the arguments as the graph wants them."""
        return pytree.tree_leaves(tuple(args)) if self.takes_leaves else args

    def unflatten(self, result: Any) -> Any:
        """Give the graph's result the structure of the source's."""
        if self.out_spec is None:
            return result
        leaves = result if isinstance(result, (list, tuple)) else (result,)
        return pytree.tree_unflatten(leaves, self.out_spec)


def _load_lifted(
    graph_module: torch.fx.GraphModule, state: dict[str, torch.Tensor], takes_leaves: bool, spec: str | None
) -> Lifted:
    return Lifted(graph_module, state, takes_leaves, None if spec is None else pytree.treespec_loads(spec))


class OriginalModule:
    """The original graph as the operator, export and Dynamo call it: ``original_module.module()(*inputs)``."""

    def __init__(self, graph_module: torch.fx.GraphModule) -> None:
        self.graph_module = graph_module
        self.num_inputs = sum(node.op == "placeholder" for node in graph_module.graph.nodes)

    def module(self) -> Callable[..., Any]:
        """Give the function of the inputs (state first) that the delegate stands for."""
        return self

    def __call__(self, *args: Any) -> Any:
        """Run the original graph; its results are made independent of its inputs."""
        if len(args) != self.num_inputs:
            raise DelegateError(
                f"the delegate takes {self.num_inputs} inputs (state included), got {len(args)}",
                hint="call the lowered module itself: it adds its state",
            )
        return without_aliases(self.graph_module(*args), args)


def without_aliases(result: Any, args: Any) -> Any:
    """Copy each tensor of a result that shares memory with an argument or with an earlier result.

    A higher-order operator promises results of its own: functionalisation, Dynamo and autograd rely on it.

    >>> x = torch.zeros(2)
    >>> without_aliases(x.view(2, 1), (x,)).data_ptr() == x.data_ptr()
    False
    """
    seen = {_storage(leaf) for leaf in pytree.tree_leaves(args)} - {None}

    def own(value: Any) -> Any:
        storage = _storage(value)
        if storage in seen:
            return value.clone()
        if storage is not None:
            seen.add(storage)
        return value

    return pytree.tree_map(own, result)


def lift(module: torch.fx.GraphModule | torch.export.ExportedProgram) -> Lifted:
    """Turn the state of a graph into inputs.

    Raises:
        DelegateError: the graph is of another kind, updates its state, or holds state that is not a tensor.

    >>> class Scale(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.factor = torch.nn.Parameter(torch.ones(3))
    ...     def forward(self, x):
    ...         return x * self.factor
    >>> lifted = lift(torch.fx.symbolic_trace(Scale()))
    >>> list(lifted.state), [node.name for node in lifted.graph_module.graph.nodes]
    (['state_factor'], ['state_factor', 'x', 'mul', 'output'])
    """
    if isinstance(module, torch.export.ExportedProgram):
        return _lift_exported(module)
    if isinstance(module, torch.fx.GraphModule):
        return _lift_graph_module(module)
    raise DelegateError(
        f"cannot lower a {type(module).__name__}: a graph is needed",
        hint="torch.export.export(module, args), or make_fx",
    )


# Graph modules.


def _lift_graph_module(module: torch.fx.GraphModule) -> Lifted:
    codegen = codegen_of(module.graph)
    if type(codegen) not in (CodeGen, PyTreeCodeGen):
        raise DelegateError(
            f"cannot lower a graph module with {type(codegen).__name__}", hint="trace it with make_fx first"
        )
    out_spec = codegen.pytree_info.out_spec if isinstance(codegen, PyTreeCodeGen) else None
    lifter = _Lifter(module)
    graph = lifter.run()
    return Lifted(torch.fx.GraphModule(module, graph), lifter.state, isinstance(codegen, PyTreeCodeGen), out_spec)


def call_with_state(
    module: torch.nn.Module, state: dict[str, torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a module with other tensors in the place of its own; one node in a trace, as when FX loads a graph."""
    leaves = pytree.tree_leaves((state, args, kwargs))
    proxy = next((leaf for leaf in leaves if isinstance(leaf, torch.fx.Proxy)), None)
    if proxy is not None:
        return proxy.tracer.create_proxy("call_function", call_with_state, (module, state, args, kwargs), {})
    return torch.func.functional_call(module, state, args, kwargs)


class _Lifter:
    """Copies a graph, with a placeholder for each tensor that it would look up."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        self.module = module
        self.graph = torch.fx.Graph()
        self.state: dict[str, torch.Tensor] = {}
        self.slots: dict[int, torch.fx.Node] = {}
        self.copies: dict[torch.fx.Node, torch.fx.Node] = {}

    def run(self) -> torch.fx.Graph:
        for node in self.module.graph.nodes:
            for name, tensor in self._state_of(node).items():
                self._add_slot(name, tensor)
        for node in self.module.graph.nodes:
            self.copies[node] = self._copy(node)
        self.graph.lint()
        return self.graph

    def _state_of(self, node: torch.fx.Node) -> dict[str, torch.Tensor]:
        """Give the tensors that a node would look up, by their names in the module."""
        if node.op == "get_attr":
            value = _attribute(self.module, node)
            return {str(node.target): value} if isinstance(value, torch.Tensor) else {}
        if node.op == "call_module":
            named = _named_tensors(self.module.get_submodule(str(node.target)))
            return {f"{node.target}.{name}": tensor for name, tensor in named.items()}
        return {}

    def _add_slot(self, name: str, tensor: torch.Tensor) -> None:
        if id(tensor) in self.slots:
            return
        slot = self.graph.placeholder("state_" + re.sub(r"\W", "_", name))
        self.slots[id(tensor)] = slot
        self.state[slot.name] = tensor

    def _copy(self, node: torch.fx.Node) -> torch.fx.Node:
        if node.op == "get_attr" and isinstance(tensor := _attribute(self.module, node), torch.Tensor):
            return self.slots[id(tensor)]
        if node.op == "call_module":
            return self._call_with_state(node)
        return self.graph.node_copy(node, self.copies.__getitem__)

    def _call_with_state(self, node: torch.fx.Node) -> torch.fx.Node:
        named = _named_tensors(self.module.get_submodule(str(node.target)))
        values = {name: self.slots[id(tensor)] for name, tensor in named.items()}
        args = torch.fx.map_arg(node.args, self.copies.__getitem__)
        kwargs = torch.fx.map_arg(node.kwargs, self.copies.__getitem__)
        submodule = self.graph.get_attr(str(node.target))
        return self.graph.call_function(call_with_state, (submodule, values, args, kwargs))


def _attribute(module: torch.nn.Module, node: torch.fx.Node) -> Any:
    value: Any = module
    for name in str(node.target).split("."):
        value = getattr(value, name)
    return value


def _named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return {**parameters, **dict(module.named_buffers(remove_duplicate=False))}


# Exported programs, whose graphs have inputs for their state already.


def _lift_exported(program: torch.export.ExportedProgram) -> Lifted:
    _require_pure(program)
    values = {**program.state_dict, **program.constants}
    state: dict[str, torch.Tensor] = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind in STATE_KINDS:
            assert spec.target is not None
            state["state_" + re.sub(r"\W", "_", spec.target)] = values[spec.target]
    graph = _Lifter(program.graph_module).run()
    return Lifted(torch.fx.GraphModule(program.graph_module, graph), state, True, program.call_spec.out_spec)


def _require_pure(program: torch.export.ExportedProgram) -> None:
    for output in program.graph_signature.output_specs:
        if output.kind is not OutputKind.USER_OUTPUT:
            raise DelegateError(
                f"the exported program updates {output.target!r} ({output.kind.name}); a delegate updates nothing",
                hint="export the module in eval mode, or keep this part outside",
            )
    for entry in program.graph_signature.input_specs:
        if entry.kind not in (*STATE_KINDS, InputKind.USER_INPUT):
            raise DelegateError(f"the exported program holds {entry.target!r} ({entry.kind.name}), not a tensor")


def _storage(value: Any) -> int | None:
    if isinstance(value, torch.Tensor) and has_storage(value):
        return storage_key(value.untyped_storage())
    return None
