"""One idiom for scopes: what is in force between the entry and the exit of a `with` block.

*Takes* what a scope sets. *Gives* what the innermost scope set, or all of them. Each thread, and each task of an event
loop, has scopes of its own: a scope that one of them enters is not seen by the others.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Generic, TypeVar

T = TypeVar("T")

moments = itertools.count()
"""A number for each thing that happens in order: a call that is recorded, a scope that opens or closes."""


class Mark:
    """Stands for something that goes on, as long as the frame that holds it is alive."""

    __slots__ = ("__weakref__",)


class Scopes(Generic[T]):
    """A stack of scopes. Each is open as long as whoever entered it holds its mark: an interrupt may come before the
    line that closes it.

    >>> sizes = Scopes[int]("sizes")
    >>> with sizes.inside(3), sizes.inside(4):
    ...     sizes.innermost, sizes.all
    (4, (3, 4))
    >>> sizes.innermost is None
    True
    """

    def __init__(self, name: str) -> None:
        self._stack: ContextVar[tuple[tuple[weakref.ref[Mark], T], ...]] = ContextVar(name, default=())
        self.open: Callable[[], tuple[object, ...]] = self._stack.get
        """Empty outside of all scopes; an interrupt may have left one there that is closed."""

    @property
    def all(self) -> tuple[T, ...]:
        """What every open scope set, the outermost first."""
        stack = self._stack.get()
        return tuple([item for mark, item in stack if mark() is not None]) if stack else ()

    @property
    def innermost(self) -> T | None:
        """What the innermost open scope set; None outside all of them."""
        stack = self._stack.get()
        if not stack:
            return None
        if stack[-1][0]() is not None:
            return stack[-1][1]
        return self.all[-1] if self.all else None

    def enter(self, item: T) -> Mark:
        """Open a scope; for scopes that are classes of their own, which hold the mark, else use `inside`."""
        mark = Mark()
        self._stack.set((*self._others(None), (weakref.ref(mark), item)))
        return mark

    def leave(self, mark: Mark) -> None:
        """Close a scope."""
        self._stack.set(self._others(mark))

    def _others(self, closing: Mark | None) -> tuple[tuple[weakref.ref[Mark], T], ...]:
        """The open scopes without one of them."""
        stack = self._stack.get()
        if not stack or (len(stack) == 1 and stack[0][0]() is closing):
            return ()
        return tuple([entry for entry in stack if entry[0]() is not None and entry[0]() is not closing])

    @contextmanager
    def inside(self, item: T) -> Iterator[T]:
        """A scope that sets `item`."""
        mark = self.enter(item)
        try:
            yield item
        finally:
            self.leave(mark)


class Ongoing:
    """What goes on in a thread, one inside the other.

    An interrupt may come before any line, also before the one that ends something. So whoever begins something holds
    a mark: what nobody holds any more has ended.

    >>> runs = Ongoing()
    >>> mark = runs.begin()
    >>> bool(runs)
    True
    >>> del mark
    >>> bool(runs)
    False
    """

    def __init__(self) -> None:
        self._marks: dict[int, weakref.ref[Mark]] = {}

    def __bool__(self) -> bool:
        marks = self._marks
        if not marks:
            return False
        if any(reference() is not None for reference in marks.values()):
            return True
        marks.clear()
        return False

    def begin(self) -> Mark:
        """Something begins; the caller holds the mark until it ends."""
        mark = Mark()
        self._marks[id(mark)] = weakref.ref(mark)
        return mark

    def end(self, mark: Mark) -> None:
        """It has ended."""
        self._marks.pop(id(mark), None)
