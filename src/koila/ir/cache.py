"""A bounded cache that says why it missed.

*Takes* hashable keys. *Gives* what was stored, and counts `<name>::hit`, `<name>::miss::<reason>`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from koila import events

V = TypeVar("V")


class Cache(Generic[V]):
    """Least recently used entries are dropped beyond `max_size`.

    >>> squares = Cache("squares", max_size=2)
    >>> squares.get_or_add(3, lambda: 9), squares.get_or_add(3, lambda: 0)
    (9, 9)
    """

    def __init__(self, name: str, max_size: int) -> None:
        self.name = name
        self.max_size = max_size
        self._entries: OrderedDict[Hashable, V] = OrderedDict()
        self._dropped = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> V | None:
        """The entry, or None; counted."""
        found = self._entries.get(key)
        if found is None:
            events.count(f"{self.name}::miss::{'new' if not self._dropped else 'new or dropped'}")
            return None
        self._entries.move_to_end(key)
        events.count(f"{self.name}::hit")
        return found

    def add(self, key: Hashable, entry: V) -> V:
        """Store an entry."""
        self._entries[key] = entry
        while len(self._entries) > self.max_size:
            self._entries.popitem(last=False)
            self._dropped += 1
        return entry

    def get_or_add(self, key: Hashable, make: Callable[[], V]) -> V:
        """The entry; made and stored if it is not there."""
        found = self.get(key)
        return self.add(key, make()) if found is None else found

    def clear(self) -> None:
        self._entries.clear()
        self._dropped = 0
