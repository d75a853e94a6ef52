"""Storages: the memory that the values of a body lie in, who shares it and who takes it over.

*Takes* a body. *Gives* for each value its storages, the bytes that a call allocates beside its results, and the calls
that are written over an operand. Views share a storage; operators' own workspaces come from
`koila.planning.workspace`.
"""

from __future__ import annotations

from contextlib import nullcontext
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from koila.analysis.rules.reduce import chunk_moments, moments_bytes
from koila.ir.cache import Cache
from koila.ir.tree import map_leaves
from koila.planning.body import SINKS, Body, FakeSource, call_key, like, slice_whole
from koila.planning.reuse import candidates, is_new
from koila.planning.wide import runs_wide, wide_bytes
from koila.planning.workspace import retained_bytes, workspace_bytes

aten = torch.ops.aten

Ref = tuple[fx.Node, int]
"""A storage: the call that made it, and which of its results lies in it."""


def tensors_of(value: Any) -> list[torch.Tensor | None]:
    """The results of a call, one for each place."""
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [each if isinstance(each, torch.Tensor) and each.layout == torch.strided else None for each in values]


def note_aliases(graph: fx.Graph) -> None:
    """Write on each node which results lie in an operand's storage: (operand, place), or None for a new one.

    The notes survive copying: they speak of operands by their number.
    """
    for node in graph.nodes:
        if "alias" in node.meta:
            continue
        known: dict[int, tuple[int, int]] = {}
        for number, operand in enumerate(node.all_input_nodes):
            for place, tensor in enumerate(tensors_of(operand.meta.get("val"))):
                if tensor is not None:
                    known.setdefault(tensor.untyped_storage()._cdata, (number, place))
        found: list[tuple[int, int] | None] = []
        for tensor in tensors_of(node.meta.get("val")):
            found.append(None if tensor is None else known.get(tensor.untyped_storage()._cdata))
        node.meta["alias"] = tuple(found)


def num_bytes(node: fx.Node, place: int) -> int:
    """The size of the storage that a result lies in."""
    tensor = tensors_of(node.meta.get("val"))[place]
    return 0 if tensor is None else tensor.untyped_storage().nbytes()


class Storages:
    """Which storages the values of a body lie in."""

    def __init__(self, graph: fx.Graph) -> None:
        note_aliases(graph)
        self.refs: dict[fx.Node, list[Ref]] = {}
        self.num_bytes: dict[Ref, int] = {}
        """Of those that the body makes; what it reads is somebody else's."""
        for node in graph.nodes:
            operands = node.all_input_nodes
            self.refs[node] = [
                (node, place) if alias is None else self.refs[operands[alias[0]]][alias[1]]
                for place, alias in enumerate(node.meta["alias"])
            ]
            if node.op != "placeholder":
                own = (ref for ref in self.refs[node] if ref[0] is node)
                # A product that is added to a sum has no storage of its own.
                self.num_bytes.update({ref: 0 if "fused" in node.meta else num_bytes(*ref) for ref in own})
                if isinstance(node.target, torch._ops.OpOverload) and (node, 0) in self.num_bytes:
                    inside(node)
                    self.num_bytes[node, 0] += node.meta["inside"][1]

    def made_by(self, node: fx.Node) -> list[Ref]:
        """The storages that a call makes."""
        return [ref for ref in self.refs[node] if ref[0] is node and ref in self.num_bytes]


def storages_of(body: Body) -> Storages:
    """The storages of a body, found once."""
    found = body.notes.get("storages")
    if found is None:
        found = body.notes["storages"] = Storages(body.graph)
    return found


def last_steps(body: Body) -> dict[Ref, int]:
    """For each storage, the number of the last call that reads it or makes a value in it; found once."""
    last: dict[Ref, int] | None = body.notes.get("last")
    if last is None:
        refs, last = storages_of(body).refs, {}
        for step, node in enumerate(body.calls):
            for each in (node, *node.all_input_nodes):
                last.update((ref, step) for ref in refs[each])
        body.notes["last"] = last
    return last


def shared_storages(body: Body) -> set[Ref]:
    """Storages that somebody outside may hold: something in them is handed on, or a region reads them."""
    refs, found = storages_of(body).refs, set[Ref]()
    for node in body.calls:
        if node.target in SINKS or not (isinstance(node.target, torch._ops.OpOverload) or node.target is getitem):
            found.update(ref for operand in node.all_input_nodes for ref in refs[operand])
    return found


def reused(body: Body) -> dict[fx.Node, fx.Node]:
    """The calls that write their result into an operand which nobody reads afterwards; found once."""
    found = body.notes.get("reused")
    if found is None:
        refs, sizes = storages_of(body).refs, storages_of(body).num_bytes
        last, shared = last_steps(body), shared_storages(body)
        found = body.notes["reused"] = {}
        views = {node for node in body.calls if isinstance(v := node.meta.get("val"), torch.Tensor) and v._is_view()}
        for step, node in enumerate(body.calls):
            for operand in candidates(node):
                (ref,) = refs[operand]
                # A storage that keeps a workspace alive is more than its value.
                free = last[ref] == step and ref not in shared and num_bytes(*ref) == sizes.get(ref)
                others = [each for each in node.all_input_nodes if each is not operand]
                # What is handed on must not be a view: a sum would start with a copy of it.
                alone = (node, 0) not in shared or operand not in views
                if free and alone and is_new(ref[0]) and not any(ref in refs[each] for each in others):
                    found[node] = operand
                    views |= {node} if operand in views else set()
                    break
    return found


def inside(node: fx.Node) -> int:
    """Bytes that a call allocates and frees while it runs."""
    target = node.target
    if target is slice_whole:
        whole: Any = node.args[0]
        # Bits are opened to bytes in blocks.
        return node.meta["val"].numel() if isinstance(whole.meta["val"], FakeSource) else 0
    if target is chunk_moments:
        return moments_bytes(node.all_input_nodes[0].meta["val"])
    if not isinstance(target, torch._ops.OpOverload):
        return getattr(target, "transient_bytes", 0)
    if "inside" not in node.meta:
        node.meta["inside"] = _workspaces(node)
    return int(node.meta["inside"][0])


_CONVOLUTIONS = {aten.convolution.default, aten.convolution_backward.default}


def _workspaces(node: fx.Node) -> tuple[int, int]:
    """What an operator allocates in its kernel, and what of it stays alive with its results."""
    target: Any = node.target
    operands: list[Any] = [operand.meta.get("val") for operand in node.all_input_nodes]
    types = {value.dtype for value in (*operands, node.meta["val"]) if isinstance(value, torch.Tensor)}
    if runs_wide(target, node.meta["val"]):
        return wide_bytes([*operands, node.meta["val"]]), 0
    if target.is_view or (torch.Tag.pointwise in target.tags and len(types) == 1):
        return 0, 0
    swap = lambda leaf: leaf.meta["val"] if isinstance(leaf, fx.Node) else leaf  # noqa: E731
    args, kwargs = map_leaves((tuple(node.args), dict(node.kwargs)), swap)
    key = call_key(target, args, kwargs)
    return _known.get_or_add(key, lambda: _ask_table(target, args, kwargs, node.meta["val"]))


_known: Cache[tuple[int, int]] = Cache("workspace_cache", 16384)


def _ask_table(target: Any, *call: Any) -> tuple[int, int]:
    on_cpu = target in _CONVOLUTIONS  # The choice of a kernel depends on the device.
    with FakeTensorMode() if on_cpu else nullcontext():
        if on_cpu:
            call = map_leaves(call, lambda leaf: like(leaf, "cpu") if isinstance(leaf, torch.Tensor) else leaf)
        args, kwargs, result = call
        hidden = workspace_bytes(target, args, result, kwargs)
        return hidden, retained_bytes(target, args, result, kwargs)
