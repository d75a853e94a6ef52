"""Outlines: what a family reads of a joint graph, in a fifth of its memory.

*Takes* a `Joint`. *Gives* an `Outline`: plain nodes that know the places of their operands, and not their users.
Nothing can be changed in it or run, but its nodes can be compared with those of other sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from koila.analysis.trace import Joint, Traced


@dataclass(frozen=True, slots=True)
class Reference:
    """Stands for a node of the graph among arguments."""

    index: int


@dataclass(frozen=True, slots=True, eq=False)
class OutlineNode:
    """A node of a joint graph, with references in the place of nodes."""

    op: str
    target: Any
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    value: Any
    """What is known about its result: tensors without data; None for what has none."""
    recorded: Any
    """The recorded call that it comes from; None if it comes from none."""
    takes_everything: bool
    """Whether it is a slice that leaves nothing out."""


class Outline:
    """A joint graph without its FX graph."""

    def __init__(self, joint: Joint) -> None:
        self.joint = replace(joint, module=Traced(fx.Graph(), joint.module.constants))
        """All of it but the nodes."""
        places = {node: Reference(index) for index, node in enumerate(joint.module.graph.nodes)}
        self.nodes = tuple([_outlined(node, places) for node in joint.module.graph.nodes])


def _outlined(node: fx.Node, places: Mapping[fx.Node, Reference]) -> OutlineNode:
    args, kwargs = _with_references((node.args, node.kwargs), places)
    return OutlineNode(
        node.op, node.target, node.name, args, kwargs or _NOTHING, node.meta.get("val"), node.meta.get("recorded"),
        takes_everything(node),
    )  # fmt: skip


_NOTHING: dict[str, Any] = {}


def _with_references(tree: Any, places: Mapping[fx.Node, Reference]) -> Any:
    if isinstance(tree, fx.Node):
        return places[tree]
    if isinstance(tree, tuple):
        return tuple([_with_references(item, places) for item in tree])
    if isinstance(tree, list):
        return [_with_references(item, places) for item in tree]
    if isinstance(tree, dict):
        return {name: _with_references(item, places) for name, item in tree.items()}
    if isinstance(tree, slice):
        return slice(*(_with_references(part, places) for part in (tree.start, tree.stop, tree.step)))
    return tree


def takes_everything(node: fx.Node) -> bool:
    """Whether a node is a slice that leaves nothing out."""
    if node.target is not torch.ops.aten.slice.Tensor:
        return False
    source: Any = node.args[0]
    return bool(source.meta["val"].shape == node.meta["val"].shape)
