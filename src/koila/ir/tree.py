"""Walking arguments and results: lists, tuples, named tuples, dicts; everything else is a leaf.

*Takes* a nested structure. *Gives* the same structure with leaves replaced, or its leaves in order. Unlike a pytree
with a registry this never opens a user's class, which is what a recorded call needs: what torch itself would not
look into, koila does not look into either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def rebuild(kind: type, items: list[Any]) -> Any:
    """A list or tuple of the same kind: named tuples and torch's result types included."""
    if kind is list or kind is tuple:
        return kind(items)
    return kind(*items) if hasattr(kind, "_make") else kind(items)


def map_leaves(tree: Any, function: Callable[[Any], Any]) -> Any:
    """The structure with `function` applied to each leaf, slices' members included.

    >>> map_leaves([1, (2, {"a": 3})], lambda leaf: leaf + 1)
    [2, (3, {'a': 4})]
    """
    if isinstance(tree, (list, tuple)):
        return rebuild(type(tree), [map_leaves(item, function) for item in tree])
    if isinstance(tree, dict):
        return {name: map_leaves(item, function) for name, item in tree.items()}
    if isinstance(tree, slice):
        return slice(*(map_leaves(item, function) for item in (tree.start, tree.stop, tree.step)))
    return function(tree)


def leaves(tree: Any) -> Iterator[Any]:
    """The leaves, in order."""
    found: list[Any] = []
    _collect(tree, found)
    return iter(found)


def _collect(tree: Any, found: list[Any]) -> None:
    if isinstance(tree, (list, tuple)):
        for item in tree:
            _collect(item, found)
    elif isinstance(tree, dict):
        for item in tree.values():
            _collect(item, found)
    elif isinstance(tree, slice):
        found += (tree.start, tree.stop, tree.step)
    else:
        found.append(tree)
