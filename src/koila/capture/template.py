"""Templates: a recorded call as it is recognised when it comes again.

*Takes* a call that repeated a known one, with what was recorded for it. *Gives* a `Template`: a matcher, made from the
pattern of the arguments, that looks whether another call is the same one of the program, and what a node needs then.

The matcher compares what the key of the trie compares (see `koila.capture.scan.trie_key`): names of values of this
program, layouts of tensors that are real, static arguments with their types, which operands are the same object. What
varies is captured: operands, versions of real ones, numbers that are slots. Matchers are compiled once per pattern;
the things that they compare with are constants of the template.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from keyword import iskeyword
from typing import Any

import torch

from koila._torch import make_wrapper
from koila.capture.bridge import Bridge
from koila.capture.scan import Scan
from koila.ir.cache import Cache
from koila.ir.node import Value
from koila.ir.prepass import Inference, Output, PrePass, prepass_of
from koila.ir.replay import Context
from koila.ir.slots import ANY_FLOAT, is_slot, slotted_by

PENDING, BOUND, REAL = range(3)
"""Kinds of operands: a value of this program, a lazy tensor that has its data, a plain tensor."""
_TYPES = (torch.Tensor, torch.nn.Parameter)
_LITERALS = (bool, type(None), type(...))
"""Constants of which there is one object each."""
_CONSTANTS = (int, float, complex, str, torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout)

Match = Callable[[Any, Any, tuple[Any, ...], int], tuple[Any, ...] | None]
_Code = tuple[Match, Any]
"""The compiled parts of a template: `match` and `rebuild`."""


class _NoTemplate(Exception):
    """The call is recorded one by one."""


@dataclass(frozen=True, eq=False, slots=True)
class Template:
    """A call of a known program."""

    func: Any
    context: Context
    inference: Inference
    key: Any
    """`Node.key` of its node."""
    match: Match
    """Takes arguments, keyword arguments, `constants` and the name of the program's first value. Gives what varies."""
    constants: tuple[Any, ...]
    operands: tuple[tuple[int, int], ...]
    """(kind, place among what is captured) of each operand, in order."""
    positions: tuple[int, ...]
    """For each operand of kind `PENDING` its number in the program; -1 for others."""
    slots: tuple[int, ...]
    """Where the slots are among what is captured."""
    rebuild: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]
    """Takes `constants`, operands and slots. Gives the arguments of the node."""
    arguments: str
    """The arguments of a run, as text to be formatted with expressions for `constants` (c), what is captured (g), and
    operands that are values of the program (e)."""
    makers: tuple[tuple[Callable[[], Any], PrePass], ...]
    """For each new result what makes its wrapper, and what is known about it."""
    first: int
    """The number of the first new result in the program."""
    kind: type | None
    """The list or tuple that the results stand in; None for a single result."""
    returned: int
    """Where the operand that the call returns itself is among what is captured; -1 if it gives new results, or None."""
    writes: bool
    """Whether it writes to a value of the program."""

    def operands_of(self, captured: tuple[Any, ...]) -> tuple[list[Any], tuple[Any, ...]]:
        """The operands of a node, and their versions."""
        operands: list[Any] = []
        versions: list[Any] = []
        for kind, place in self.operands:
            if kind == PENDING:
                operands.append(captured[place]._held)
                versions.append(None)
            else:
                operands.append(captured[place])
                start = place + 1 + (kind == BOUND)
                versions.append(captured[start : start + 3])
        return operands, tuple(versions)

    def pending_of(self, captured: tuple[Any, ...]) -> list[Any]:
        """The lazy operands that are results of this program."""
        return [captured[place] for kind, place in self.operands if kind == PENDING]

    def reals_of(self, captured: tuple[Any, ...]) -> list[torch.Tensor]:
        """The real operands."""
        return [captured[place + (kind == BOUND)] for kind, place in self.operands if kind != PENDING]


def template_for(
    func: Any, scan: Scan, inference: Inference, context: Context, epoch: int, first: int
) -> Template | None:  # fmt: skip
    """The template of a call that was recorded just now; None if it is recorded one by one.

    Args:
        func: The function.
        scan: Its arguments, taken apart.
        inference: What is known about the call.
        context: The ambient state that it was recorded in.
        epoch: The program that it was recorded in.
        first: The number of its first result in the program.
    """
    try:
        _check(scan, inference)
        pattern = _Pattern(func, scan, epoch, _same_as(inference))
        outputs, kind, returned = _results(inference, pattern)
    except _NoTemplate:
        return None
    match, rebuild = pattern.compiled()
    makers = tuple((wrapper_maker(output.prepass, context.default_dtype), output.prepass) for output in outputs)
    return Template(
        func, context, inference, (scan.function, context, tuple(scan.statics)), match, tuple(pattern.constants),
        tuple(pattern.operands), tuple(pattern.positions), tuple(pattern.slots), rebuild, pattern.arguments, makers,
        first, kind, returned, any(index not in inference.hidden_writes for index in inference.writes),
    )  # fmt: skip


def _check(scan: Scan, inference: Inference) -> None:
    """A call whose effects a node must tell at once, or whose aliases differ from step to step, has no template."""
    if inference.reshapes or inference.ordered or inference.forced or scan.foreign:
        raise _NoTemplate
    if not inference.outputs and not (inference.writes and inference.structure is None):
        raise _NoTemplate
    for index in inference.writes:
        operand = scan.operands[index]
        hidden = index in inference.hidden_writes
        if hidden != (not isinstance(operand, Value)) or (isinstance(operand, Value) and operand.storage.real):
            raise _NoTemplate
    if not inference.writes and all(output.is_fresh for output in inference.outputs):
        return
    # Whether views of inputs share memory with each other, which a result or a write may depend on, is not known by
    # their names.
    views = [o for o in scan.operands if isinstance(o, Value) and o.node is not None and o.storage.real]
    bound = [o for o in scan.operands if isinstance(o, Value) and o.node is None]
    if len(views) + bool(views and bound) > 1:
        raise _NoTemplate


def _same_as(inference: Inference) -> int | None:
    """The operand that a call returns itself, if it is the only result."""
    return inference.structure.same_as if type(inference.structure) is Output else None


def _results(inference: Inference, pattern: _Pattern) -> tuple[tuple[Output, ...], type | None, int]:
    structure = inference.structure
    if structure is None:
        return (), None, -1
    if type(structure) is Output:
        if structure.same_as is None:
            return (structure,), None, -1
        return (), None, pattern.returned
    if not isinstance(structure, (list, tuple)) or tuple(structure) != inference.outputs:
        raise _NoTemplate
    if any(output.same_as is not None for output in inference.outputs):
        raise _NoTemplate
    return inference.outputs, type(structure), -1


def wrapper_maker(prepass: PrePass, default_dtype: torch.dtype | None = None) -> Callable[[], Any]:
    """What makes a wrapper with this layout, where this is the default dtype; what it would be anyhow is left out."""
    options: dict[str, Any] = {}
    if prepass.dtype is not default_dtype:
        options["dtype"] = prepass.dtype
    if prepass.device.type != "cpu":
        options["device"] = prepass.device
    if prepass.stride != contiguous_strides(prepass.shape):
        options["strides"] = prepass.stride
    return partial(make_wrapper, Bridge.lazy_type, prepass.shape, **options)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor.

    >>> contiguous_strides((2, 3, 4))
    (12, 4, 1)
    """
    found, following = list[int](), 1
    for size in reversed(shape):
        found.append(following)
        following *= max(size, 1)
    return tuple(reversed(found))


# The matcher.


class _Pattern:
    """The arguments of a call, written as code that recognises them."""

    def __init__(self, func: Any, scan: Scan, epoch: int, same_as: int | None) -> None:
        self._slotted = slotted_by(func)
        self._varies = scan.varies
        self._scan, self._epoch = scan, epoch
        self._operands = iter(scan.operands)
        self._same_as = same_as
        self.returned = -1
        """Where the operand that the call returns itself is among what is captured; -1 if there is none."""
        self._lines: list[str] = []
        self._captured: list[str] = []
        self._names: list[tuple[int, str]] = []
        """(kind, name of the object) of each operand."""
        self.constants: list[Any] = []
        self.operands: list[tuple[int, int]] = []
        self.positions: list[int] = []
        self.slots: list[int] = []
        self._write()

    def compiled(self) -> _Code:
        """The code of the template."""
        return _code.get_or_add(self._source, lambda: _compile(self._source))

    def _write(self) -> None:
        args, kwargs = self._scan.args, self._scan.kwargs
        if any(iskeyword(key) for key in kwargs):
            raise _NoTemplate
        names, keys = [f"a{i}" for i in range(len(args))], [f"k{i}" for i in range(len(kwargs))]
        self._refuse_unless(f"len(args) == {len(args)}")
        if kwargs:
            self._refuse_unless(f"kwargs and tuple(kwargs) == {self._constant(tuple(kwargs))}")
            self._lines.append(f"{', '.join(keys)}, = kwargs.values()")
        else:
            self._refuse_unless("not kwargs")
        if names:
            self._lines.append(f"{', '.join(names)}, = args")
        given = [self._tree(item, name) for item, name in zip(args, names, strict=True)]
        named = [(key, *self._tree(item, name)) for (key, item), name in zip(kwargs.items(), keys, strict=True)]
        self._compare_operands()
        node_args = "".join(f"{node}, " for node, _ in given)
        node_kwargs = ", ".join(f"{key!r}: {node}" for key, node, _ in named)
        self.arguments = ", ".join([run for _, run in given] + [f"{key}={run}" for key, _, run in named])
        self._source = "\n".join([
            "def match(args, kwargs, c, base):",
            *(f"    {line}" for line in self._lines),
            f"    return ({''.join(f'{name}, ' for name in self._captured)})",
            f"rebuild = lambda c, v, s: (({node_args}), {{{node_kwargs}}})",
        ])  # fmt: skip

    def _constant(self, thing: Any) -> str:
        self.constants.append(thing)
        return f"c[{len(self.constants) - 1}]"

    def _refuse_unless(self, condition: str) -> None:
        self._lines.append(f"if not ({condition}): return None")

    def _capture(self, *names: str) -> int:
        self._captured += names
        return len(self._captured) - len(names)

    def _tree(self, tree: Any, name: str) -> tuple[str, str]:
        """Expressions for an argument: of a node, and of a run."""
        if isinstance(tree, (Value, torch.Tensor)):
            return self._operand(name)
        kind = type(tree)
        if kind is list or kind is tuple:
            return self._sequence(tree, name)
        if kind is slice:
            self._refuse_unless(f"type({name}) is slice")
            parts = [(part, f"{name}_{part}") for part in ("start", "stop", "step")]
            self._lines += [f"{own} = {name}.{part}" for part, own in parts]
            found = [self._tree(getattr(tree, part), own) for part, own in parts]
            return f"slice({', '.join(n for n, _ in found)})", f"slice({', '.join(r for _, r in found)})"
        return self._leaf(tree, name)

    def _sequence(self, tree: Any, name: str) -> tuple[str, str]:
        self._refuse_unless(f"type({name}) is {type(tree).__name__} and len({name}) == {len(tree)}")
        parts = [f"{name}_{i}" for i in range(len(tree))]
        if parts:
            self._lines.append(f"{', '.join(parts)}, = {name}")
        found = [self._tree(item, part) for item, part in zip(tree, parts, strict=True)]
        form = "[{}]" if type(tree) is list else "({})"
        return form.format("".join(f"{n}, " for n, _ in found)), form.format("".join(f"{r}, " for _, r in found))

    def _leaf(self, leaf: Any, name: str) -> tuple[str, str]:
        kind = type(leaf)
        if self._slotted and is_slot(leaf, self._slotted):
            self._refuse_unless(self._slot_condition(leaf, name))
            self.slots.append(self._capture(name))
            return f"s[{len(self.slots) - 1}]", f"{{g[{self.slots[-1]}]}}"
        if kind not in _LITERALS and kind not in _CONSTANTS:
            raise _NoTemplate
        constant = self._constant(leaf)
        same = f"{name} is {constant}"
        other = f"type({name}) is {self._constant(kind)} and {name} == {constant}"
        if kind in (float, complex) and not leaf:  # -0.0 equals 0.0, but is another number.
            other += f" and repr({name}) == {self._constant(repr(leaf))}"
        self._refuse_unless(same if kind in _LITERALS else f"{same} or {other}")
        return constant, f"{{{constant}}}"

    def _slot_condition(self, leaf: Any, name: str) -> str:
        """What is a slot here is one in the other call, too; where the call depends on it, it is the same number."""
        if self._varies or self._slotted == ANY_FLOAT:
            return f"type({name}) is {type(leaf).__name__} and {name} == {self._constant(leaf)}"
        return f"type({name}) is {type(leaf).__name__} and is_slot({name}, {self._slotted})"

    def _operand(self, name: str) -> tuple[str, str]:
        operand = next(self._operands)
        index = len(self.operands)
        if not isinstance(operand, Value):
            place = self._real(operand, name)
            run, kind, position = f"{{g[{place}]}}", REAL, -1
        elif operand.node is not None:
            kind, position = PENDING, self._position(operand)
            self._refuse_unless(f"type({name}) is LT and {name}._name - base == {self._constant(position)}")
            place, run = self._capture(name), f"{{e[{index}]}}"
        else:
            place = self._bound(operand, name)
            run, kind, position = f"{{g[{place + 1}]}}", BOUND, -1
        self.operands.append((kind, place))
        self.positions.append(position)
        if index == self._same_as:
            self.returned = self._returned(kind, place, name)
        self._names.append((kind, name if kind != BOUND else f"v{place}"))
        return f"v[{index}]", run

    def _returned(self, kind: int, place: int, name: str) -> int:
        if kind == REAL:
            raise _NoTemplate
        return place if kind == PENDING else self._capture(name)

    def _position(self, value: Value) -> int:
        if value.position[0] != self._epoch:
            raise _NoTemplate
        return value.position[1]

    def _bound(self, value: Value, name: str) -> int:
        real, place = value.real, len(self._captured)
        if real is None or real.is_inference() or value.storage.with_grad:
            raise _NoTemplate
        own, data = f"v{place}", f"r{place}"
        self._refuse_unless(f"type({name}) is LT and {name}._name < base")
        self._lines += [f"{own} = {name}._held", f"if {own} is None: return None", f"{data} = {own}.real"]
        self._refuse_unless(
            f"{data} is not None and {own}.prepass is {self._constant(value.prepass)} and "
            f"{data}.requires_grad is {real.requires_grad} and {data}.is_leaf is {real.is_leaf} and "
            f"not {own}.storage.with_grad"
        )
        return self._capture(own, data, f"{data}._version", f"{data}.data_ptr()", f"{data}.requires_grad")

    def _real(self, real: torch.Tensor, name: str) -> int:
        if type(real) not in _TYPES or real.layout is not torch.strided or real.is_nested or real.is_inference():
            raise _NoTemplate
        place = len(self._captured)
        grad, last = f"g{place}", self._constant(weakref.ref(real))
        layout = [
            f"{name} is {last}()", f"{name}.shape == {self._constant(real.shape)}",
            f"{name}.stride() == {self._constant(real.stride())}", f"{name}.dtype is {self._constant(real.dtype)}",
            f"{grad} is {real.requires_grad}", f"{name}.is_leaf is {real.is_leaf}",
            f"{name}.is_neg() is {real.is_neg()}",
        ]  # fmt: skip
        if real.is_complex():
            layout.append(f"{name}.is_conj() is {real.is_conj()}")
        prepass = self._constant(prepass_of(real))
        self._refuse_unless(f"type({name}) in TYPES")
        self._lines.append(f"{grad} = {name}.requires_grad")
        # A tensor that is another one than in the first step is asked for everything.
        self._refuse_unless(f"({' and '.join(layout)}) or is_like({name}, {prepass}, {real.is_leaf})")
        return self._capture(name, f"{name}._version", f"{name}.data_ptr()", grad)

    def _compare_operands(self) -> None:
        """Which operands are the same object, or share a storage; of values of the program their names tell."""
        for kind in (BOUND, REAL):
            self._compare([number for number, (each, _) in enumerate(self._names) if each == kind], kind)

    def _compare(self, numbers: list[int], kind: int) -> None:
        """Compare operands of one kind; where all of them differ, as mostly, at once."""
        operands, names = [self._scan.operands[number] for number in numbers], [self._names[n][1] for n in numbers]
        self._compare_things(operands, names)
        if kind == BOUND:
            storages = [operand.storage for operand in operands if isinstance(operand, Value)]
            self._compare_things(storages, [f"{name}.storage" for name in names])

    def _compare_things(self, things: Sequence[object], names: Sequence[str]) -> None:
        if len(things) > 2 and len({id(thing) for thing in things}) == len(things):
            self._refuse_unless(f"len({{{', '.join(f'id({name})' for name in names)}}}) == {len(names)}")
            return
        for number, thing in enumerate(things):
            for earlier, other in enumerate(things[:number]):
                self._refuse_unless(f"({names[number]} is {names[earlier]}) is {thing is other}")


def is_like(tensor: torch.Tensor, prepass: PrePass, is_leaf: bool) -> bool:
    """Whether a plain tensor has this layout."""
    return prepass_of(tensor) is prepass and tensor.is_leaf is is_leaf and not tensor.is_nested


_code: Cache[_Code] = Cache("matcher_cache", 4096)


def _compile(source: str) -> _Code:
    names: dict[str, Any] = {
        "LT": Bridge.lazy_type, "TYPES": frozenset(_TYPES), "is_like": is_like, "is_slot": is_slot,
    }  # fmt: skip
    exec(compile(source, "<koila matcher>", "exec"), names)
    return names["match"], names["rebuild"]
