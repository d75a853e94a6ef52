"""Cost: how long a call is expected to take, from its floating-point operations and the bytes it touches.

*Takes* a node with fake values. *Gives* seconds on a nominal machine. Only ratios matter: they decide which of two
plans is the faster one.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from koila.ir.tree import leaves, map_leaves

FLOPS = 40e9
"""Floating-point operations per second of a dense kernel."""
BYTES = 8e9
"""Bytes per second of a kernel that only moves data."""
CALL = 5e-6
"""Seconds per call."""


def seconds(node: fx.Node) -> float:
    """The expected time of one call; views are free. Noted on the node."""
    if "seconds" not in node.meta:
        node.meta["seconds"] = _seconds(node)
    return float(node.meta["seconds"])


def _seconds(node: fx.Node) -> float:
    target: Any = node.target
    if hasattr(target, "seconds"):
        return float(target.seconds)
    overload = isinstance(target, torch._ops.OpOverload)
    if target is operator.getitem or (overload and target.is_view) or node.op != "call_function":
        return 1e-6
    swap = lambda leaf: leaf.meta.get("val") if isinstance(leaf, fx.Node) else leaf  # noqa: E731
    args, kwargs, result = map_leaves((tuple(node.args), dict(node.kwargs), node.meta.get("val")), swap)
    if getattr(target, "__name__", "") == "slice_whole":
        args = ()  # It reads no more than it gives.
    touched = sum(t.numel() * t.element_size() for t in leaves((args, kwargs, result)) if isinstance(t, torch.Tensor))
    return CALL + touched / BYTES + (_flops(target, args, kwargs, result) / FLOPS if overload else 0.0)


def _flops(target: Any, args: Any, kwargs: Any, result: Any) -> float:
    if "flash_attention_for_cpu" in str(target):
        batch, heads, queries, width = args[-6 if "backward" in str(target) else 0].shape[:4]
        keys = args[1].shape[2]
        return (10.0 if "backward" in str(target) else 4.0) * batch * heads * queries * keys * width
    formula = flop_registry.get(target.overloadpacket)
    if formula is None:
        return 0.0
    try:
        return float(formula(*args, **kwargs, out_val=result))
    except Exception:  # A formula that does not know this form of the call says nothing about it.
        return 0.0


def total_seconds(calls: list[fx.Node]) -> float:
    """The expected time of a straight-line program."""
    return sum(map(seconds, calls))
