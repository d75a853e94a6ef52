"""What a graph must keep to be a delegate: it mutates nothing, and it says whether it draws random numbers.

Takes: a graph and example values, or the nodes of a graph.
Gives: a DelegateError that names the operator, or the fact about random numbers.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from koila._torch import FakeTensorMode, OpOverload, RunMode, schema_of, write_count
from koila._torch.delegates import ShapeEnv, detect_fake_mode, pytree
from koila.errors import DelegateError

__all__ = ["describe", "draws_random_numbers", "is_random", "mutates"]

TRAINING_POSITION: Mapping[object, int] = {
    torch.ops.aten.native_batch_norm.default: 5,
    torch.ops.aten.cudnn_batch_norm.default: 5,
    torch.ops.aten.miopen_batch_norm.default: 5,
}
"""Operators that update running statistics without saying so in their schema → where their argument `training` is."""

IN_PLACE_FUNCTIONS = frozenset(
    getattr(operator, name) for name in dir(operator) if re.fullmatch(r"i(add|sub|mul|truediv|floordiv|mod|pow)", name)
) | {operator.setitem}


def draws_random_numbers(function: Callable[..., Any], inputs: Sequence[Any]) -> bool:
    """Run a function over fake values and say whether it draws random numbers.

    Args:
        function: the function.
        inputs: example values, real or fake.

    Raises:
        DelegateError: it changes one of its inputs, or cannot run on fake values.

    >>> draws_random_numbers(torch.nn.functional.dropout, (torch.ones(3),))
    True
    """
    mode = detect_fake_mode(inputs) or FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    fakes = pytree.tree_map_only(torch.Tensor, mode.from_tensor, tuple(inputs))
    tensors = [leaf for leaf in pytree.tree_leaves(fakes) if isinstance(leaf, torch.Tensor)]
    versions = [write_count(tensor) for tensor in tensors]
    observer = _Observer()
    try:
        with torch.no_grad(), mode, observer:
            function(*fakes)
    except DelegateError:
        raise
    except Exception as error:
        raise DelegateError(f"the graph cannot run over fake tensors: {type(error).__name__}: {error}") from error
    changed = [index for index, tensor in enumerate(tensors) if write_count(tensor) != versions[index]]
    if changed:
        raise _mutation(f"the graph changes its tensor input {changed[0]} (state counts first)")
    return observer.saw_random


def is_random(target: object) -> bool:
    """Whether an ATen operator draws random numbers."""
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def mutates(node: torch.fx.Node) -> bool:
    """Whether a node changes a value that another node may hold."""
    target = node.target
    if node.op == "call_method":
        return bool(re.fullmatch(r"\w*[a-z0-9]_|__setitem__|__i[a-z]+__", str(target)))
    if isinstance(target, OpOverload):
        return schema_of(target).is_mutable or _updates_statistics(target, node.args)
    return target in IN_PLACE_FUNCTIONS or bool(node.kwargs.get("inplace", False))


def describe(node: torch.fx.Node) -> str:
    """Give a node's name and, if the trace kept it, the user's file:line."""
    places = re.findall(r'File "([^"]+)", line (\d+)', node.stack_trace or "")
    return f"{node.name}, {places[-1][0]}:{places[-1][1]}" if places else node.name


def _updates_statistics(target: object, args: Sequence[Any]) -> bool:
    position = TRAINING_POSITION.get(target)
    return position is not None and bool(args[position]) and args[3] is not None


def _mutation(fact: str) -> DelegateError:
    return DelegateError(fact + "; a delegate changes nothing", hint="functionalise the graph first")


class _Observer(RunMode):
    """Sees every operator that a function reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.saw_random = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _updates_statistics(func, args):
            raise _mutation(f"the graph updates running statistics ({func})")
        self.saw_random |= is_random(func)
        return func(*args, **(kwargs or {}))
