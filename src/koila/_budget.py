"""Budgets and their scopes.

*Takes* what the user says a run may use. *Gives* the `Budget` in force: the innermost scope at run time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from koila.errors import BudgetError


@dataclass(frozen=True, slots=True)
class Budget:
    """What a run may use."""

    chunk_size: int | None = None
    """Samples per chunk; None runs the batch whole."""


class _Scopes(threading.local):
    def __init__(self) -> None:
        self.stack: list[Budget] = [Budget()]


_scopes = _Scopes()


def current_budget() -> Budget:
    """The budget of the innermost scope."""
    return _scopes.stack[-1]


@contextmanager
def budget(allowed: object = None, *, chunk_size: int | None = None) -> Iterator[Budget]:
    """A scope (or decorator) in which runs keep to a budget.

    Args:
        allowed: Bytes; refused until the planner can keep them.
        chunk_size: Cut the batch into chunks of this many samples; the last one may be smaller.

    Yields:
        The budget in force.

    Raises:
        BudgetError: A byte budget, or a chunk size below one.

    >>> with budget(chunk_size=2) as scope:
    ...     scope.chunk_size
    2
    """
    refuse_bytes(allowed)
    if chunk_size is not None and (isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1):
        raise BudgetError(f"chunk_size must be a whole number of at least 1, got {chunk_size!r}", hint="chunk_size=1")
    scope = Budget(chunk_size)
    _scopes.stack.append(scope)
    try:
        yield scope
    finally:
        _scopes.stack.pop()


def result_bytes() -> int:
    """How much a split run may keep of values that nobody asked for but the user still holds: a quarter of what is
    free."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    except (ValueError, OSError, AttributeError):
        return 1 << 30


def refuse_bytes(allowed: object) -> None:
    """Byte budgets need the planner of bytes."""
    if allowed is not None:
        raise BudgetError(
            f"a budget in bytes ({allowed!r}) cannot be kept yet: this version plans chunk sizes only",
            hint="with koila.budget(chunk_size=n): ...",
        )
