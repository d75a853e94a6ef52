"""Cost: how long a call is expected to take, from its floating-point operations and the bytes it touches.

*Takes* a call on fake or meta tensors, or a schedule. *Gives* seconds on a nominal machine.
"""

from __future__ import annotations

import operator
from functools import cache
from math import prod
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from koila._torch import OpOverload
from koila.ir.recurrent import LAYER, LAYER_BACKWARD
from koila.ir.tree import leaves, map_leaves
from koila.planning.devices import current_rules
from koila.planning.operation import join_pieces, slice_whole
from koila.planning.rates import BYTES, FLOPS, FRESH, fresh_bytes, shared_seconds
from koila.planning.schedule import Schedule, once_per_schedule

aten = torch.ops.aten

_SLOW = ("exp", "log", "tanh", "gelu", "silu", "sigmoid", "softplus", "erf", "pow", "sin", "cos", "mish", "elu")
_QUICK = ("relu", "leaky_relu", "prelu", "threshold", "hardtanh", "hardsigmoid")
"""Pointwise functions whose names only look slow."""
_PLAIN = (
    "sum", "cat", "clone", "_to_copy", "fill", "full", "slice_whole", "join_pieces", "addmm", "mm", "bmm",
    "convolution",
)  # fmt: skip
VIEW_SECONDS = 1e-6
"""What a view costs."""


def node_seconds(node: fx.Node) -> float:
    """The expected time of one node of a joint graph."""
    if node.op != "call_function":
        return VIEW_SECONDS
    swap = lambda leaf: leaf.meta.get("val") if isinstance(leaf, fx.Node) else leaf  # noqa: E731
    args, kwargs = map_leaves((tuple(node.args), dict(node.kwargs)), swap)
    return call_seconds(node.target, args, kwargs, node.meta.get("val"))


def call_seconds(target: Any, args: Any, kwargs: Any, result: Any) -> float:
    """The expected time of one call."""
    overload = isinstance(target, OpOverload)
    if target is operator.getitem or (overload and target.is_view):
        return VIEW_SECONDS
    if target in (slice_whole, join_pieces):
        args = ()  # It reads no more than it gives.
    num_bytes, fresh = tree_bytes((args, kwargs, result)), large_bytes(result)
    return moving_seconds(target, num_bytes, fresh, _flops(target, args, kwargs, result) if overload else 0.0)


def moving_seconds(target: Any, num_bytes: int, num_fresh: int, flops: float = 0.0) -> float:
    """The expected time of a call that reads and writes so many bytes, some of them fresh, and computes as much."""
    rules = current_rules()
    work = num_bytes / _bytes_per_second(target) / rules.byte_speed
    if flops:
        work += flops / _first(FLOPS, str(target)) / rules.flop_speed
    return rules.call_seconds + shared_seconds(work) + num_fresh / FRESH


def tree_bytes(tree: Any) -> int:
    """The bytes of all tensors of a tree."""
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(tree) if isinstance(leaf, torch.Tensor))


def _first(table: dict[str, float], name: str) -> float:
    return next(rate for part, rate in table.items() if part in name)


@cache
def _bytes_per_second(target: Any) -> float:
    name = str(getattr(target, "__name__", target)).split(".")[0]
    if torch.Tag.pointwise in getattr(target, "tags", ()):
        slow = any(part in name for part in _SLOW) and not name.startswith(_QUICK)
        return BYTES["slow" if slow else "plain"]
    return BYTES["plain"] if name in _PLAIN else _first(BYTES, name)


_PRODUCTS = {aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1}
"""By plain product, the position of its first factor."""
_LAYERS = {LAYER: (0, 2.0), LAYER_BACKWARD: (2, 6.0)}
"""By recurrent layer, the position of its input, and the operations for each element of a weight and each position."""


def _flops(target: Any, args: Any, kwargs: Any, result: Any) -> float:
    if target in _PRODUCTS:
        return 2.0 * result.numel() * args[_PRODUCTS[target]].shape[-1]
    if target in _LAYERS:
        place, operations = _LAYERS[target]
        return operations * prod(args[place].shape[:2]) * (args[place + 2].numel() + args[place + 3].numel())
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


def large_bytes(result: Any) -> int:
    """The bytes of results that are made of new pages every time."""
    return sum(fresh_bytes(tree_bytes(leaf)) for leaf in leaves(result))


@once_per_schedule
def schedule_seconds(schedule: Schedule) -> float:
    """The expected time of a schedule; what is written over an operand needs no new pages."""
    saved = sum(step.fresh_bytes for step in schedule.steps) - schedule_fresh_bytes(schedule)
    return sum(step.seconds for step in schedule.steps) - saved / FRESH


@once_per_schedule
def schedule_fresh_bytes(schedule: Schedule) -> int:
    """The bytes of results that are made of new pages every time."""
    written = schedule.overwritten
    return sum(step.fresh_bytes for step in schedule.steps if step.value not in written)
