"""Code for bodies: each becomes one flat Python function.

*Takes* a `Body`. *Gives* a function in which every value is freed or written over after its last use, and every merged,
kept or stored value is handed on as soon as it exists.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import fx

from koila.analysis.split import Item
from koila.analysis.trace import Slot, SlotArgument
from koila.planning.body import SINKS, Body, sink_product
from koila.planning.region import Region
from koila.planning.reuse import variant_of
from koila.planning.storages import reused
from koila.planning.wide import PRODUCTS, runs_wide


@dataclass(frozen=True)
class Loop:
    """A compiled body."""

    function: Callable[..., None]
    """(whole values, first sample, sample after the last, slots, sink) → nothing; the sink gets (index, value)."""
    wholes: tuple[Item, ...]
    """Whole items that the body reads; kept items stand for their buffers."""
    sinks: tuple[Item, ...]
    """What each index of the sink is."""
    slots: tuple[Slot, ...]
    executed: Counter[str]
    """How often each operator runs per call."""
    source: str
    """The text of the function."""


class _Writer:
    """Writes the function's text; objects that have no literal become its globals."""

    def __init__(self, body: Body, region_code: Callable[[Region], Callable[..., Any]]) -> None:
        self.body, self.region_code = body, region_code
        self.globals: dict[str, Any] = {}
        self.known: dict[int, str] = {}
        self.slots: dict[Slot, int] = {}
        self.names: dict[fx.Node, str] = {}
        self.executed: Counter[str] = Counter()
        self.reused = reused(body)

    def write(self) -> Loop:
        lines: list[str] = []
        calls = self.body.calls
        dying = last_uses(calls)
        wholes = iter(range(len(self.body.wholes)))
        for node in self.body.graph.nodes:
            if node.op == "placeholder":
                self.names[node] = node.name if node.name in _KEPT else f"w[{next(wholes)}]"
        for number, (node, gone) in enumerate(zip(calls, dying, strict=True)):
            self.names[node] = f"v{number}"
            lines += self._statement(node)
            lines += [f"{self.names[each]} = None" for each in gone]
        text = "def body(w, start, stop, slots, sink):\n    " + "\n    ".join(lines or ["pass"]) + "\n"
        exec(compile(text, "<koila body>", "exec"), self.globals)
        return Loop(self.globals["body"], self.body.wholes, self.body.sinks, tuple(self.slots), self.executed, text)

    def _statement(self, node: fx.Node) -> list[str]:
        if "skipped" in node.meta:
            return []
        if "fused" in node.meta:
            fused, (first, second) = node.meta["fused"], map(self._literal, node.args)
            self._count(node.target)
            return [f"{self._constant(sink_product)}(sink, {fused.index}, {first}, {second}, {fused.turned})"]
        call = self._call(node)
        return [call if node.target in SINKS else f"{self.names[node]} = {call}"]

    def _call(self, node: fx.Node) -> str:
        target = node.target
        if target is operator.getitem:
            return f"{self._literal(node.args[0])}[{node.args[1]}]"
        if isinstance(target, Region):
            slots = [f"slots[{self.slots.setdefault(slot, len(self.slots))}]" for slot in target.slots]
            arguments = [self._literal(value) for value in node.args]
            return f"{self._constant(self.region_code(target))}([{', '.join(slots)}], {', '.join(arguments)})"
        self._count(target)
        target = _kernel(node)
        arguments = [self._literal(value) for value in node.args]
        if node in self.reused:
            variant = variant_of(target)
            assert variant is not None
            target = variant.target
            arguments += [] if variant.out is None else [f"{variant.out}={self.names[self.reused[node]]}"]
        arguments += [f"{name}={self._literal(value)}" for name, value in node.kwargs.items()]
        return f"{self._constant(target)}({', '.join(arguments)})"

    def _count(self, target: Any) -> None:
        if isinstance(target, torch._ops.OpOverload):
            self.executed[str(target)] += 1

    def _literal(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self.names[value]
        if isinstance(value, SlotArgument):
            return f"slots[{self.slots.setdefault(value.slot, len(self.slots))}]"
        if isinstance(value, (list, tuple)):
            return "[" + ", ".join(self._literal(item) for item in value) + "]"
        if value is None or type(value) in (bool, int, str) or (type(value) is float and isfinite(value)):
            return repr(value)
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        if id(value) not in self.known:
            self.known[id(value)] = name = f"k{len(self.globals)}"
            self.globals[name] = value
        return self.known[id(value)]


def _trained_layer(*arguments: Any) -> Any:
    """oneDNN's recurrent layer makes the workspace of its backward only where gradients are recorded."""
    with torch.set_grad_enabled(bool(arguments[-1])):
        return torch.ops.aten.mkldnn_rnn_layer.default(*arguments)


def _kernel(node: fx.Node) -> Any:
    """What runs for a call: its operator, or another function with the same numbers."""
    if node.target is torch.ops.aten.mkldnn_rnn_layer.default:
        return _trained_layer
    return PRODUCTS[node.target] if runs_wide(node.target, node.meta.get("val")) else node.target


_KEPT = ("start", "stop", "sink")


def last_uses(calls: list[fx.Node]) -> list[list[fx.Node]]:
    """For each call, the values that nobody reads after it."""
    seen: set[fx.Node] = set()
    dying: list[list[fx.Node]] = []
    for node in reversed(calls):
        if "skipped" in node.meta:
            dying.append([])
            continue
        used = [*node.all_input_nodes, *([] if node.target in SINKS or "fused" in node.meta else [node])]
        fresh = [each for each in dict.fromkeys(used) if each not in seen and each.name not in _KEPT]
        seen.update(fresh)
        dying.append(fresh)
    return dying[::-1]


def compile_body(body: Body, region_code: Callable[[Region], Callable[..., Any]]) -> Loop:
    """The function of a body; `region_code` makes those of its regions."""
    return _Writer(body, region_code).write()
