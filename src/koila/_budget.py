"""Budgets and their scopes.

*Takes* what the user says a run may use. *Gives* the `Budget` in force: the smallest that the inputs were given by
`koila.lazy`, else the innermost scope at run time, else `KOILA_BUDGET`. Without any of them runs are not limited.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from koila._bytes import parse_bytes
from koila.errors import BudgetError

ACCEPTED = 'bytes as an int, a text such as "512MiB" (2^20) or "512MB" (10^6), or a share of what is free such as 0.5'


@dataclass(frozen=True, slots=True)
class Budget:
    """What a run may use."""

    chunk_size: int | None = None
    """Samples per chunk, if the user forces it."""
    allowed_bytes: int | None = None
    """Bytes that a run may allocate: gradients, results, merges, kept values, transients. None is no limit."""

    @property
    def limits(self) -> bool:
        """Whether it says anything."""
        return self.chunk_size is not None or self.allowed_bytes is not None


class _Scopes(threading.local):
    def __init__(self) -> None:
        self.stack: list[Budget] = []


_scopes = _Scopes()


def current_budget(given: Iterable[int] = ()) -> Budget:
    """The budget in force for a program whose inputs were given these byte budgets."""
    smallest = min(given, default=None)
    if smallest is not None:
        return Budget(allowed_bytes=smallest)
    if _scopes.stack:
        return _scopes.stack[-1]
    text = os.environ.get("KOILA_BUDGET")
    return Budget(allowed_bytes=read_bytes(text, "KOILA_BUDGET")) if text else Budget()


@contextmanager
def budget(
    allowed: int | str | float | None = None, *, chunk_size: int | None = None, reserved: int | str = 0
) -> Iterator[Budget]:
    """A scope (or decorator) in which runs keep to a budget.

    Args:
        allowed: What a run may allocate: bytes as an int, a text such as "512MiB", or a share of what is free.
        chunk_size: Cut the batch into chunks of this many samples instead; the last one may be smaller.
        reserved: Bytes of `allowed` to leave alone, for what koila cannot see.

    Yields:
        The budget in force.

    Raises:
        BudgetError: A budget that is not one.

    >>> with budget("2KiB") as scope:
    ...     scope.allowed_bytes
    2048
    """
    if chunk_size is not None and (isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1):
        raise BudgetError(f"chunk_size must be a whole number of at least 1, got {chunk_size!r}", hint="chunk_size=1")
    if allowed is not None and chunk_size is not None:
        raise BudgetError(
            f"both a chunk size ({chunk_size}) and a byte budget ({allowed!r}): koila picks the chunk size itself",
            hint='koila.budget("512MiB") or koila.budget(chunk_size=4)',
        )
    kept = read_bytes(reserved, "reserved") if reserved else 0
    scope = Budget(chunk_size, None if allowed is None else _less(read_bytes(allowed, "budget"), kept))
    _scopes.stack.append(scope)
    try:
        yield scope
    finally:
        _scopes.stack.pop()


def _less(allowed: int, reserved: int) -> int:
    if reserved >= allowed:
        raise BudgetError(f"{reserved} bytes reserved of {allowed} allowed leave nothing", hint="reserve less")
    return allowed - reserved


def read_bytes(value: object, name: str) -> int:
    """A byte count from what users write."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise BudgetError(f"{name}={value!r} is not a number of bytes", hint=ACCEPTED)
    if isinstance(value, float):
        if not 0 < value <= 1:
            raise BudgetError(f"{name}={value!r} is not a share in (0, 1]", hint=ACCEPTED)
        return int(value * free_bytes())
    try:
        found = parse_bytes(value)
    except ValueError as error:
        raise BudgetError(f"{name}={value!r} cannot be read: {error}", hint=ACCEPTED) from error
    if found <= 0:
        raise BudgetError(f"{name}={value!r} leaves nothing to run in", hint=ACCEPTED)
    return found


def free_bytes() -> int:
    """Memory that is free on this machine."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 1 << 32


def result_bytes() -> int:
    """How much a split run may keep of values that nobody asked for but the user still holds."""
    return free_bytes() // 4
