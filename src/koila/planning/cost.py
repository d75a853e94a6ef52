"""Cost: how long a call is expected to take, from its floating-point operations and the bytes it touches.

*Takes* a node with fake values. *Gives* seconds on a nominal machine. Only ratios matter: they decide which of two
plans is the faster one.
"""

from __future__ import annotations

import operator
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from koila.ir.tree import leaves, map_leaves
from koila.planning.body import Body
from koila.planning.storages import reused

FLOPS = {"convolution": 55e9, "attention": 40e9, "": 75e9}
"""Floating-point operations per second of a dense kernel, by a part of its name."""
BYTES = {"batch_norm": 2e9, "softmax": 3e9, "norm": 8e9, "pool": 2e9, "slow": 5e9, "plain": 30e9, "": 8e9}
"""Bytes per second, read and written: of kernels with such a name, of pointwise ones, and of all others."""
_SLOW = ("exp", "log", "tanh", "gelu", "silu", "sigmoid", "softplus", "erf", "pow", "sin", "cos", "mish", "elu")
_PLAIN = ("sum", "cat", "clone", "_to_copy", "fill", "full", "slice_whole", "addmm", "mm", "bmm", "convolution")
FRESH = 1.6e9
"""Bytes per second at which the system hands out pages; a large result is made of new ones every time."""
LARGE = 32 * 2**20
"""From this size on, the allocator gives pages back at once."""
CALL = 5e-6
"""Seconds per call. `python -m benchmarks.costs` shows these rates beside those of the machine at hand."""


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
    found = CALL + _num_bytes((args, kwargs, result)) / _bytes_per_second(target)
    found += large_bytes(node) / FRESH
    if overload and (flops := _flops(target, args, kwargs, result)):
        found += flops / _first(FLOPS, str(target))
    return found


def _num_bytes(tree: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(tree) if isinstance(leaf, torch.Tensor))


def _first(table: dict[str, float], name: str) -> float:
    return next(rate for part, rate in table.items() if part in name)


@cache
def _bytes_per_second(target: Any) -> float:
    name = str(getattr(target, "__name__", target)).split(".")[0]
    if torch.Tag.pointwise in getattr(target, "tags", ()):
        return BYTES["slow" if any(part in name for part in _SLOW) else "plain"]
    return BYTES["plain"] if name in _PLAIN else _first(BYTES, name)


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


def large_bytes(node: fx.Node) -> int:
    """The bytes of results that are made of new pages every time."""
    return sum(size for leaf in leaves(node.meta.get("val")) if (size := _num_bytes(leaf)) >= LARGE)


def body_seconds(body: Body) -> float:
    """The expected time of a straight-line program; what is written over an operand needs no new pages."""
    return sum(map(seconds, body.calls)) - sum(map(large_bytes, reused(body))) / FRESH
