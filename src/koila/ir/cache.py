"""Bounded caches that say why they missed, and the list of all of them.

*Takes* hashable keys. *Gives* what was stored, and counts `<name>::hit`, `<name>::miss::<reason>`. `clear_all` empties
every cache of the process, so that a test starts with nothing known.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, Protocol, TypeVar

from koila import events

V = TypeVar("V")


class Clearable(Protocol):
    """Something that remembers, and can forget."""

    def clear(self) -> None: ...


_all: weakref.WeakSet[Any] = weakref.WeakSet()


def register(cache: Clearable) -> None:
    """Let `clear_all` know of a cache; the caches of this module are known by themselves."""
    _all.add(cache)


def clear_all() -> None:
    """Empty every cache: shapes, programs, plans, and the tries of all threads."""
    for cache in list(_all):
        cache.clear()


class HashedOnce:
    """A key that knows its hash: that of a whole program takes as long as hundreds of look-ups.

    >>> HashedOnce((1, 2)) == HashedOnce((1, 2)), HashedOnce((1, 2)) == (1, 2)
    (True, False)
    """

    __slots__ = ("_hash", "key")

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self._hash = hash(key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, HashedOnce) and self._hash == other._hash and self.key == other.key


_MOST = 10
_MAX_GONE = 256


class Cache(Generic[V]):
    """A cache that drops its least recently used entries, for any number of threads.

    Args:
        name: The name of its counters.
        max_size: How much it holds: the number of entries, or their weight in all.
        weigh: What an entry weighs, in bytes, say; each weighs one if not given.
        always: So many entries are held whatever they weigh: the latest. Without any, an entry that weighs more than
            `max_size` alone is not stored. One more is held for each entry that was dropped and had to be made again,
            as those of a loop are that goes through more of them in turn, until they weigh ten times `max_size`.

    >>> squares = Cache("squares", max_size=2)
    >>> squares.get_or_add(3, lambda: 9), squares.get_or_add(3, lambda: 0)
    (9, 9)
    """

    def __init__(self, name: str, max_size: int, weigh: Callable[[V], int] | None = None, always: int = 0) -> None:
        self.name = name
        self.max_size = max_size
        self.always = always
        self.weight = 0
        """What the entries weigh in all."""
        self._weigh = weigh
        self.entries: OrderedDict[Hashable, tuple[V, int]] = OrderedDict()
        """Each with its weight, the least recently used first; the same dictionary for good."""
        self._dropped = 0
        self._missed = 0
        """How many entries were dropped and made again."""
        self._gone: OrderedDict[int, None] = OrderedDict()
        """The latest keys that were dropped, by their hash; of no use if no number of entries is held in any case."""
        self._lock = threading.RLock()  # Dropping an entry may run finalizers, which may look something up here.
        register(self)

    def __len__(self) -> int:
        return len(self.entries)

    def get(self, key: Hashable) -> V | None:
        """The entry, or None; counted."""
        with self._lock:
            found = self.entries.get(key)
            if found is not None:
                self.entries.move_to_end(key)
        if found is None:
            events.count(f"{self.name}::miss::{'new' if not self._dropped else 'new or dropped'}")
            return None
        events.count(f"{self.name}::hit")
        return found[0]

    def add(self, key: Hashable, entry: V) -> V:
        """Store an entry."""
        weight = 1 if self._weigh is None else self._weigh(entry)
        with self._lock:
            self._drop(key)
            self.entries[key] = entry, weight
            self.weight += weight
            if self.always and hash(key) in self._gone and self.weight < _MOST * self.max_size:
                self._missed += 1
            while self.weight > self.max_size and len(self.entries) > self.always + self._missed:
                oldest, (_, lost) = self.entries.popitem(last=False)
                self.weight -= lost
                self._dropped += 1
                if self.always:
                    self._note_gone(oldest)
        return entry

    def _note_gone(self, key: Hashable) -> None:
        self._gone[hash(key)] = None
        if len(self._gone) > _MAX_GONE:
            self._gone.popitem(last=False)

    def get_or_add(self, key: Hashable, make: Callable[[], V]) -> V:
        """The entry; made and stored if it is not there. Two threads may make it at once: both get what they made."""
        found = self.get(key)
        return self.add(key, make()) if found is None else found

    def clear(self) -> None:
        """Forget every entry."""
        with self._lock:
            self.entries.clear()
            self._gone.clear()
            self.weight = self._dropped = self._missed = 0

    def _drop(self, key: Hashable) -> None:
        dropped = self.entries.pop(key, None)
        if dropped is not None:
            self.weight -= dropped[1]
