"""Letting go: a result in chunks goes when the user lets it go, without waiting for Python's collector.

*Takes* the values of a segment. *Gives* references that watch the lazy tensors of the user. A result that requires grad
holds its segment, the segment holds the program that it may have to run again, and the program holds the value that the
result is. Eager has no such circle: logits that nobody differentiates are gone with the variable.
"""

from __future__ import annotations

import weakref
from functools import partial
from sys import getrefcount
from typing import Any

from koila._torch import num_owners
from koila.ir.graph import Graph
from koila.ir.node import Value

_OWN_REFERENCES = 3
"""How often a tensor is referred to that only its value has: by it, a variable, and the argument of `getrefcount`."""


def watched(value: Value, program: Graph) -> list[weakref.ref[Any]]:
    """References to the lazy tensors that are a value; while they exist, its tensor goes with the last of these.

    Args:
        value: A result of a segment.
        program: What the segment may run again; it does not need the result.
    """
    gone = partial(_gone, weakref.ref(value), weakref.ref(program))
    return [weakref.ref(lazy, gone) for holder in value.holders if (lazy := holder()) is not None]


def _gone(of: weakref.ref[Value], by: weakref.ref[Graph], _: object) -> None:
    """A lazy tensor is gone: if nobody else has its tensor, nor reads it, the value lets go of it."""
    value, program = of(), by()
    if value is None or program is None or value.is_held or _is_read(value, program):
        return
    tensor = value.real
    if tensor is not None and getrefcount(tensor) == _OWN_REFERENCES and num_owners(tensor) == 1:
        value.real = None


def _is_read(value: Value, program: Graph) -> bool:
    """Whether a call outside of a program that is still there has read a value, or will."""
    readers = (reader() for reader in value.storage.readers)
    return any(reader is not None and reader not in program.positions for reader in readers)
