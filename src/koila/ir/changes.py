"""Where tensors were changed that pending calls read, as far as koila saw it.

*Takes* tensors that are about to be changed, and the line that does it. *Gives* that line to the error that names a
stale input (Rule 5). Most changes are seen afterwards only, by a tensor's version; then there is no line to name.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from koila.ir.source import Site

_changes: dict[int, tuple[weakref.ref[torch.Tensor], Site]] = {}
"""By the identity of a tensor, which ends with it."""


def note_change(tensors: Iterable[torch.Tensor], site: Site) -> None:
    """These tensors are changed by a line of the user's."""
    for tensor in tensors:
        key = id(tensor)
        _changes[key] = (weakref.ref(tensor, lambda _, key=key: _changes.pop(key, None)), site)  # type: ignore[misc]


def changed_at(tensor: torch.Tensor | None) -> Site | None:
    """Where a tensor was changed last, if that is known."""
    found = _changes.get(id(tensor))
    return found[1] if found is not None and found[0]() is tensor else None
