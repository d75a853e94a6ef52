"""Loop bodies: the work of one phase on one chunk, as one flat Python function.

*Takes* a phase and a chunk size. *Gives* a function in which every value is freed after its last use and every merged
or kept value is handed on as soon as it exists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import fx

from koila.analysis.split import Item, arguments_by_name
from koila.analysis.trace import Slot, SlotArgument
from koila.analysis.types import Sliced, chunk_of
from koila.errors import AnalysisError
from koila.ir.draws import Source
from koila.ir.tree import map_leaves
from koila.planning.plan import Phase


@dataclass(frozen=True)
class Loop:
    """A compiled loop body."""

    function: Callable[..., None]
    """(whole values, first sample, sample after the last, slots, sink) → nothing; the sink gets (index, value)."""
    wholes: tuple[Item, ...]
    """Whole items that the body reads; kept items stand for their buffers."""
    sinks: tuple[Item, ...]
    """What each index of the sink is: the phase's targets, then what it keeps."""
    slots: tuple[Slot, ...]
    executed: Counter[str]
    """How often each operator runs per chunk."""
    source: str
    """The text of the function."""


def slice_whole(value: Any, kind: Sliced, start: int, stop: int, num_samples: int) -> torch.Tensor:
    """A chunk of a whole value or of a random source."""
    if not isinstance(value, Source):
        return chunk_of(value, kind, start, stop, num_samples)
    if kind.dim == 0 and kind.outer == 1:
        return value.rows(start // kind.granule * kind.inner, stop // kind.granule * kind.inner)
    return chunk_of(value.whole(), kind, start, stop, num_samples)


class _Writer:
    """Writes the function's text; objects that have no literal become its globals."""

    def __init__(self, phase: Phase, kept_before: set[Item], num_samples: int, chunk: int, checked: bool) -> None:
        self.phase, self.kept_before, self.num_samples, self.chunk = phase, kept_before, num_samples, chunk
        self.checked = checked
        self.globals: dict[str, Any] = {"slice_whole": slice_whole}
        self.wholes: dict[Item, int] = {}
        self.slots: dict[Slot, int] = {}
        self.names: dict[Item, str] = {}
        self.lines: list[str] = []
        self.executed: Counter[str] = Counter()

    def write(self) -> Loop:
        sinks = (*self.phase.targets, *self.phase.kept)
        wanted: dict[Item, list[int]] = {}
        for index, item in enumerate(sinks):
            wanted.setdefault(item, []).append(index)
        dying = self._last_uses()
        for number, item in enumerate(self.phase.body):
            self.names[item] = name = f"v{number}"
            self.lines.append(f"{name} = {self._expression(item)}")
            if self.checked:
                self.lines.append(f"check({number}, {name})")
            self.lines += [f"sink({index}, {name})" for index in wanted.get(item, ())]
            if dying[number]:
                self.lines.append("del " + ", ".join(self.names[gone] for gone in dying[number]))
        text = "def body(w, start, stop, slots, sink, check=None):\n    " + "\n    ".join(self.lines or ["pass"]) + "\n"
        exec(compile(text, "<koila loop>", "exec"), self.globals)
        return Loop(self.globals["body"], tuple(self.wholes), sinks, tuple(self.slots), self.executed, text)

    def _last_uses(self) -> list[list[Item]]:
        seen: set[Item] = set()
        dying: list[list[Item]] = []
        for item in reversed(self.phase.body):
            operands = () if item in self.kept_before else item.operands
            used = [item, *(operand for operand in operands if operand.per_chunk)]
            fresh = [operand for operand in dict.fromkeys(used) if operand not in seen]
            seen.update(fresh)
            dying.append(fresh)
        return dying[::-1]

    def _expression(self, item: Item) -> str:
        if item in self.kept_before:
            return self._slice(item, item)
        if item.kind == "slice":
            return self._slice(item, item.operands[0])
        if item.kind == "part":
            return f"{self.names[item.operands[0]]}[{item.index}]"
        self.executed[str(item.node.target)] += 1
        return self._call(item)

    def _slice(self, item: Item, whole: Item) -> str:
        kind = self._constant(item.type)
        return f"slice_whole({self._whole(whole)}, {kind}, start, stop, {self.num_samples})"

    def _whole(self, item: Item) -> str:
        return f"w[{self.wholes.setdefault(item, len(self.wholes))}]"

    def _call(self, item: Item) -> str:
        target, arguments = chunk_call(item, self.chunk)
        names = {number: self._operand(operand, target) for number, operand in enumerate(item.operands)}
        function = self._constant(target)
        if not isinstance(target, torch._ops.OpOverload):
            return f"{function}({', '.join(f'{n}={self._literal(v, names)}' for n, v in arguments.items())})"
        parts: list[str] = []
        for argument in target._schema.arguments:
            if argument.name not in arguments:
                continue
            text = self._literal(arguments[argument.name], names)
            # An argument that the rewrite left out makes the following ones keywords.
            keyword = argument.kwarg_only or len(parts) < names_of(target).index(argument.name)
            parts.append(f"{argument.name}={text}" if keyword else text)
        return f"{function}({', '.join(parts)})"

    def _operand(self, operand: Item, target: Any) -> str:
        """A kernel that was traced with contiguous memory may rely on it; a chunk of it need not be contiguous."""
        name = self.names[operand] if operand.per_chunk else self._whole(operand)
        return f"{name}.contiguous()" if needs_contiguous(operand, target) else name

    def _literal(self, value: Any, names: dict[int, str]) -> str:
        if isinstance(value, _Operand):
            return names[value.index]
        if isinstance(value, SlotArgument):
            return f"slots[{self.slots.setdefault(value.slot, len(self.slots))}]"
        if isinstance(value, (list, tuple)):
            return "[" + ", ".join(self._literal(item, names) for item in value) + "]"
        if value is None or type(value) in (bool, int, str) or (type(value) is float and isfinite(value)):
            return repr(value)
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        name = f"k{len(self.globals)}"
        self.globals[name] = value
        return name


def names_of(target: torch._ops.OpOverload) -> list[str]:
    """The names of an operator's arguments, in order."""
    return [argument.name for argument in target._schema.arguments]


@dataclass(frozen=True, slots=True)
class _Operand:
    """Stands for the operand of that index among an item's arguments."""

    index: int


def chunk_call(item: Item, chunk: int) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The operator and its arguments for a chunk of that many samples, tensors as `_Operand`s."""
    numbers = iter(range(len(item.operands)))
    swap = lambda leaf: _Operand(next(numbers)) if isinstance(leaf, fx.Node) else leaf  # noqa: E731
    arguments = {name: map_leaves(value, swap) for name, value in arguments_by_name(item.node).items()}
    ruling = item.ruling
    assert ruling is not None
    if ruling.sizes:
        shape = chunk_shape(item, chunk)
        arguments.update({name: list(shape) for name in ruling.sizes})
    if ruling.rewrite is not None:
        arguments = ruling.rewrite(arguments, chunk)
    return as_reshape(ruling.target or item.node.target, arguments)


VIEWS = {torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default}


def as_reshape(target: Any, arguments: dict[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A chunk may lie in memory otherwise than the whole value: a view becomes a reshape."""
    if target not in VIEWS:
        return target, arguments
    return torch.ops.aten.reshape.default, {"self": arguments["self"], "shape": arguments["size"]}


def needs_contiguous(operand: Item, target: Any) -> bool:
    """Whether an operator is a kernel that was traced with this operand contiguous."""
    if not isinstance(target, torch._ops.OpOverload) or target.is_view or torch.Tag.pointwise in target.tags:
        return False
    value = operand.node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.ndim < 2 or target is torch.ops.aten.reshape.default:
        return False
    return value.is_contiguous()


def chunk_shape(item: Item, chunk: int) -> tuple[int, ...]:
    """The shape that an item's type predicts for a chunk (of its first result)."""
    value, kind = item.node.meta["val"], item.type
    if isinstance(kind, tuple):
        value, kind = value[0], kind[0]
    shape = tuple(value.shape)
    return kind.shape(shape, chunk) if isinstance(kind, Sliced) else shape


def _check_shapes(phase: Phase, chunk: int) -> Callable[[int, Any], None]:
    def check(number: int, value: Any) -> None:
        item = phase.body[number]
        if isinstance(value, torch.Tensor) and isinstance(item.type, Sliced):
            expected = chunk_shape(item, chunk)
            if tuple(value.shape) != expected:
                found = f"{item.node.target} gives {list(value.shape)} for a chunk of {chunk} samples"
                raise AnalysisError(f"{found}, {item.type} predicts {list(expected)}")

    return check


def compile_loop(phase: Phase, kept_before: set[Item], num_samples: int, chunk: int) -> Loop:
    """The loop body for one chunk size, propagated once over fake tensors before it is used."""
    checked = _Writer(phase, kept_before, num_samples, chunk, checked=True).write()
    fakes = [item.node.meta["val"] for item in checked.wholes]
    mode = next((fake.fake_mode for fake in fakes if hasattr(fake, "fake_mode")), None)
    if mode is not None:
        with mode, torch.no_grad():
            checked.function(fakes, 0, chunk, [0.5] * len(checked.slots), lambda *_: None, _check_shapes(phase, chunk))
    return _Writer(phase, kept_before, num_samples, chunk, checked=False).write()
