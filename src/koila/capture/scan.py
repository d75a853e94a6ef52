"""Taking a call apart: its operands, its static arguments, and the keys under which it is looked up.

*Takes* a function and its arguments. *Gives* a `Scan`, and from it the key of the trie (operands named by their
position in the program) and the key of the shape cache (operands named by what is known about them).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from koila.capture.bridge import Bridge
from koila.ir.node import Value
from koila.ir.owned import function_key, static_key
from koila.ir.prepass import PLAIN_TYPES, PrePass, prepass_of
from koila.ir.replay import Context
from koila.ir.slots import ANY_FLOAT, is_slot, slotted_by
from koila.ir.tree import map_leaves, rebuild


class Scan:
    """A call's arguments, taken apart."""

    __slots__ = ("args", "foreign", "function", "kwargs", "operands", "originals", "slots", "statics", "varies")

    def __init__(self, func: Any) -> None:
        self.function = function_key(func)
        """What stands for the function in keys."""
        self.args: Any = ()
        """Arguments with every LazyTensor replaced by its Value."""
        self.kwargs: Any = {}
        self.operands: list[Value | torch.Tensor] = []
        """All tensors among the arguments, in order: Values and real tensors."""
        self.originals: list[torch.Tensor] = []
        """The same as the user gave them."""
        self.statics: list[Any] = []
        """What the call depends on besides its operands, in order."""
        self.slots: list[float] = []
        """Numbers that may vary between steps."""
        self.varies = False
        """Whether what is known about the call depends on them: dropout draws with its probability."""
        self.foreign: str | None = None
        """The class of an operand whose meaning is not its data alone: a subclass of tensors, or a nested tensor."""

    @property
    def numbers(self) -> tuple[float, ...]:
        """The slots that what is known about the call depends on."""
        return tuple(self.slots) if self.varies else ()

    def take(self, real: torch.Tensor) -> None:
        """A real tensor is an operand."""
        self.operands.append(real)
        self.originals.append(real)
        if type(real) not in PLAIN_TYPES or real.is_nested:
            self.foreign = type(real).__name__ if type(real) not in PLAIN_TYPES else "nested tensor"


class Unhashable(Exception):
    """An argument that cannot be part of a key."""


def _scan_leaf(leaf: Any, scan: Scan, slotted: int) -> Any:
    kind = type(leaf)
    if kind is Bridge.lazy_type:
        scan.operands.append(leaf._value)
        scan.originals.append(leaf)
        scan.statics.append(_TENSOR)
        return leaf._value
    if isinstance(leaf, torch.Tensor):
        real: torch.Tensor = leaf.run() if kind is Bridge.eager_type else leaf  # type: ignore[attr-defined]
        scan.take(real)
        scan.statics.append(_TENSOR)
        return real
    if slotted and is_slot(leaf, slotted):
        scan.slots.append(leaf)
        scan.statics.append(_SLOTS[kind])
        return leaf
    if kind in _NUMBERS:
        # -0.0 equals 0.0, but is another number.
        scan.statics.append((kind, leaf) if leaf or kind is int else (repr(leaf), kind))
    elif kind in _CONSTANTS:
        scan.statics.append(leaf)
    else:
        try:
            scan.statics.append(static_key(leaf))
        except TypeError as error:
            raise Unhashable from error
    return leaf


_TENSOR, _SLOTS = object(), {float: object(), int: object()}
_NUMBERS = frozenset({bool, int, float, complex})
_CONSTANTS = frozenset(
    {type(None), str, type(...), torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout}
)


def _scan_tree(tree: Any, scan: Scan, slotted: int) -> Any:
    if isinstance(tree, torch.Tensor):
        return _scan_leaf(tree, scan, slotted)
    if isinstance(tree, (list, tuple)) and not isinstance(tree, torch.Size):
        scan.statics.append((type(tree), len(tree)))
        return rebuild(type(tree), [_scan_tree(item, scan, slotted) for item in tree])
    if isinstance(tree, dict):
        scan.statics.append((dict, tuple(tree)))
        return {name: _scan_tree(item, scan, slotted) for name, item in tree.items()}
    if isinstance(tree, slice):
        scan.statics.append(slice)
        return slice(*[_scan_tree(item, scan, slotted) for item in (tree.start, tree.stop, tree.step)])
    return _scan_leaf(tree, scan, slotted)


def scan_call(func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Scan, bool]:
    """Take a call apart; the flag says whether it can be cached."""
    scan, slotted = Scan(func), slotted_by(func)
    scan.varies = slotted == ANY_FLOAT
    try:
        scan.args = tuple([_scan_tree(item, scan, slotted) for item in args])
        for name, item in kwargs.items():
            scan.statics.append(name)
            scan.kwargs[name] = _scan_tree(item, scan, slotted)
        return scan, True
    except Unhashable:
        scan = Scan(func)
        take = lambda leaf: _take_operand(leaf, scan)  # noqa: E731
        scan.args, scan.kwargs = map_leaves(args, take), map_leaves(kwargs, take)
        return scan, False


def _take_operand(leaf: Any, scan: Scan) -> Any:
    if not isinstance(leaf, torch.Tensor):
        # NumPy's arrays are read when the call runs; what is written to them until then is not meant for it.
        return leaf.copy() if hasattr(leaf, "__array_interface__") and hasattr(leaf, "copy") else leaf
    if type(leaf) is Bridge.lazy_type:
        scan.operands.append(leaf._value)  # type: ignore[attr-defined]
        scan.originals.append(leaf)
    else:
        scan.take(leaf.run() if isinstance(leaf, Bridge.eager_type) else leaf)
    return scan.operands[-1]


def _operand_meta(operand: Value | torch.Tensor) -> tuple[PrePass, bool]:
    if isinstance(operand, Value):
        prepass = operand.prepass
        if operand.requires_grad != prepass.requires_grad:
            prepass = prepass.with_grad(operand.requires_grad)
        return prepass, operand.real is not None and operand.real.is_leaf
    return prepass_of(operand), operand.is_leaf


def _trie_operand(operand: Value | torch.Tensor, epoch: int) -> Any:
    if isinstance(operand, Value) and operand.position[0] == epoch:
        return operand.position[1] if not operand.is_view else (operand.position[1], operand.requires_grad)
    return _operand_meta(operand)


def _sharing(operands: list[Value | torch.Tensor]) -> tuple[Any, ...]:
    """Which operands are the same tensor, or share a storage."""
    first: dict[int, int] = {}
    pattern = []
    for index, operand in enumerate(operands):
        storage = operand.storage if isinstance(operand, Value) else operand
        pattern.append((first.setdefault(id(operand), index), first.setdefault(id(storage), index)))
    return tuple(pattern)


def trie_key(scan: Scan, context: Context, epoch: int) -> tuple[Any, ...]:
    """The call after the calls before it: its operands are named by their position in the program of this epoch."""
    operands = tuple([_trie_operand(operand, epoch) for operand in scan.operands])
    sharing = _sharing(scan.operands) if len(scan.operands) > 1 else ()
    return scan.function, context, tuple(scan.statics), operands, sharing


def shape_key(key: tuple[Any, ...], scan: Scan) -> tuple[Any, ...]:
    """The call for itself: the trie's key with the layouts of the operands instead of their positions."""
    function, context, statics, _, sharing = key
    metas = tuple([_operand_meta(operand) for operand in scan.operands])
    return function, context, statics, metas, sharing, scan.numbers
