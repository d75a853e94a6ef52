"""What belongs to the user, in keys: known by identity, and not kept alive.

*Takes* a module, an `autograd.Function`, or any object that a call was given. *Gives* `Identity`, which stands for it
in the keys of caches, and `OwnedCall`, a recorded function that its node keeps alive and its keys do not.
"""

from __future__ import annotations

import weakref
from types import MethodType
from typing import Any


class Identity:
    """One object, for as long as it lives; equal to nothing else afterwards."""

    __slots__ = ("_hash", "_reference")

    def __init__(self, thing: Any) -> None:
        self._reference = weakref.ref(thing)  # The same reference for the same object, as long as one is alive.
        self._hash = id(thing)

    def __eq__(self, other: object) -> bool:
        return type(other) is Identity and self._reference is other._reference

    def __hash__(self) -> int:
        return self._hash


class OwnedCall:
    """A call of something that the user owns: the node keeps it alive until it has run, the caches do not."""

    __slots__ = ("__name__", "__qualname__", "key", "owner")

    def __init__(self, owner: Any, name: str) -> None:
        self.owner = owner
        self.key: tuple[Any, ...] = (type(self), Identity(owner))
        """What stands for the function in keys."""
        self.__name__ = self.__qualname__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("each kind of call says what it does")

    def rebound(self) -> str | None:
        """A name that the user's code reads and that was rebound since the call was recorded; None: there is none."""
        return None


def function_key(func: Any) -> Any:
    """What stands for a function in keys."""
    return func.key if isinstance(func, OwnedCall) else func


def static_key(leaf: Any) -> Any:
    """What stands for an argument that is no tensor in keys.

    An object that compares by value stands for itself, with its class: NumPy's 2 equals its 2.0. One that compares by
    identity is known by it and not kept alive.

    Raises:
        TypeError: It cannot be hashed.
    """
    if isinstance(leaf, MethodType):
        return static_key(leaf.__self__), leaf.__func__
    hash(leaf)
    kind: Any = type(leaf)
    compares_by_identity = kind.__hash__ is object.__hash__ and kind.__eq__ is object.__eq__
    return Identity(leaf) if compares_by_identity and kind.__weakrefoffset__ else (kind, leaf)
