"""Budgets and their scopes.

*Takes* what the user says a run may use. *Gives* the `Budget` in force: the smallest that the inputs were given by
`koila.lazy`, else the innermost scope at run time, else `KOILA_BUDGET`, else what is free (`default_bytes`).
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ContextDecorator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, TypeAlias, TypeVar

import torch

from koila._bytes import format_bytes, parse_bytes
from koila._free import alive_bytes, default_bytes, free_bytes, held_by_process, result_bytes
from koila._scopes import Mark, Scopes, moments
from koila._warnings import warn_once
from koila.errors import BudgetError

__all__ = [
    "Budget",
    "alive_bytes",
    "budget",
    "current_budget",
    "default_bytes",
    "free_bytes",
    "read_bytes",
    "result_bytes",
]

Function = TypeVar("Function", bound=Callable[..., Any])
Amount: TypeAlias = int | float | str
"""An amount of memory as users write it."""
VARIABLE = "KOILA_BUDGET"
ACCEPTED = 'bytes as an int, a text such as "512MiB" (2^20) or "512MB" (10^6), or a share of what is free such as 0.5'
MOST_BYTES = 2**63 - 1
ORDINARY_GROWTH_BYTES = 32 << 20
"""What libraries, code and plans of any program take of a process, and what no budget counts."""
_TEXT = re.compile(r"(?P<sign>-?)\s*(?P<number>\d+(?:\.\d+)?)?\s*(?P<unit>.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Budget:
    """What a run may use."""

    chunk_size: int | None = None
    """Samples per chunk, if the user forces it."""
    allowed_bytes: int | None = None
    """Bytes that a run may allocate: gradients, results, merges, kept values, transients. None is no limit."""
    total_bytes: int | None = None
    """Bytes that these and what is alive on the device may reach together. None is no limit."""
    reserved_bytes: int = 0
    """Bytes of the above to leave alone, for what koila cannot see."""
    offload: str | None = None
    """The directory for values that are kept in files, or None if none are."""
    tune: bool = True
    """Whether measuring may change later plans."""
    process: bool = False
    """Whether what the process itself grows by counts, too."""
    is_default: bool = False
    """Whether nobody named a size: `default_bytes` says what is free, for whoever needs to know."""
    allowed_share: float | None = None
    """The share of what is free, if `allowed_bytes` was named as one: on an accelerator it is one of its own memory."""
    total_share: float | None = None
    """The share of what is free and alive, if `total_bytes` was named as one."""
    most_bytes: int | None = None
    """What a plan may take all the same if none fits into `allowed_bytes`; None is no more than that."""
    held_at_entry: tuple[int, ...] = field(default=(), compare=False)
    """What the process held when the scope was entered, as `held_by_process` tells it, where that counts."""

    @property
    def limits(self) -> bool:
        """Whether it names a size."""
        return self.chunk_size is not None or self.allowed_bytes is not None or self.total_bytes is not None

    @property
    def has_shares(self) -> bool:
        """Whether a size was named as a share, which on an accelerator is one of what is free when a run begins."""
        return self.allowed_share is not None or self.total_share is not None

    def limit(self, device: torch.device | None = None) -> int | None:
        """Bytes that a run may allocate now, or None if no bytes were named.

        Args:
            device: Where the run allocates, for `total_bytes`; the CPU is the default.

        Raises:
            BudgetError: What is alive or reserved leaves nothing.

        >>> Budget(allowed_bytes=2048, reserved_bytes=48).limit()
        2000
        """
        named = self._on(device)
        left = None if named.allowed_bytes is None else named._left_of_allowed(named.allowed_bytes)
        if named.total_bytes is None:
            return left
        beside = named._left_of_total(named.total_bytes, device)
        return beside if left is None else min(left, beside)

    def _on(self, device: torch.device | None) -> Budget:
        """The same budget with shares of this device's memory; those of the host were taken when it was named."""
        if device is None or device.type == "cpu" or not self.has_shares:
            return self
        free, found = free_bytes(device), self
        if self.allowed_share is not None:
            found = replace(found, allowed_bytes=int(self.allowed_share * free))
        if self.total_share is not None:
            found = replace(found, total_bytes=int(self.total_share * (free + alive_bytes(device))))
        return found

    def _left_of_allowed(self, allowed: int) -> int:
        if allowed <= self.reserved_bytes:
            fact = f"reserved={format_bytes(self.reserved_bytes)} of {format_bytes(allowed)} allowed"
            raise BudgetError(f"{fact} leaves nothing to run in", hint="reserve less, or allow more")
        return allowed - self.reserved_bytes

    def less_growth(self, limit: int) -> int:
        """What is left of so many bytes without what the process has grown by, beyond what every process does.

        At least half is left; in steps of a sixteenth, so that not every new page asks for another plan.
        """
        grown = [now - then for now, then in zip(held_by_process(), self.held_at_entry, strict=False)]
        num_steps = -(-(max(grown, default=0) - ORDINARY_GROWTH_BYTES) // max(1, limit // 16))
        return limit - min(max(0, num_steps), 8) * (limit // 16)

    def _left_of_total(self, total: int, device: torch.device | None) -> int:
        alive = alive_bytes(device)
        taken = alive + self.reserved_bytes
        if total <= taken:
            raise BudgetError(
                f"total={format_bytes(total)} leaves nothing to run in: {format_bytes(alive)} are alive on "
                f"{device or 'cpu'} and {format_bytes(self.reserved_bytes)} reserved",
                hint=f"a total of more than {format_bytes(taken)}, or allowed=, which does not count what is alive",
            )
        return total - taken


_scopes = Scopes[Budget]("budget")
open_scopes = _scopes.open
"""True if a scope is open; it may be so a little longer after an interrupt. For hot paths."""


def current_budget(given: Iterable[int] = ()) -> Budget:
    """The budget in force for a program whose inputs were given these byte budgets.

    Of the innermost scope these take what is reserved, where to offload and whether to tune, but no size.
    """
    scope = _scopes.innermost or Budget()
    smallest = min(given, default=None)
    if smallest is not None:
        return replace(
            scope, chunk_size=None, allowed_bytes=smallest, total_bytes=None, allowed_share=None, total_share=None
        )
    if scope.limits:
        return scope
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return replace(scope, is_default=True)
    return replace(scope, allowed_bytes=_read_variable(text), allowed_share=_share(literal(text)))


def variable(name: str) -> Callable[[], object]:
    """What gives something true if an environment variable is set, and not empty.

    It asks the dict behind `os.environ`, whose own `get` raises and catches two errors for a variable that is not set:
    every run asks, and every call of `koila.lazy`.
    """
    variables: Any = getattr(os.environ, "_data", os.environ)
    key: Any = os.environ.encodekey(name) if variables is not os.environ else name
    return partial(variables.get, key)


_is_set = variable(VARIABLE)


def is_any_named() -> bool:
    """Whether a scope is open, or the variable names a budget: else `current_budget` is what is free."""
    return bool(_is_set()) or (bool(open_scopes()) and _scopes.innermost is not None)


@dataclass(frozen=True, slots=True)
class Closed:
    """A scope that named a size and is closed."""

    opened: int
    """The moment at which it was entered."""
    closed: int
    """The moment at which it was left."""
    place: str
    """Where it was written: file:line."""


_opened = Scopes[int]("opened")
"""The moments at which the open scopes were entered."""
_closed: ContextVar[Closed | None] = ContextVar("closed", default=None)


def last_closed() -> Closed | None:
    """The scope with a size that this thread left last; None if there was none."""
    return _closed.get()


class _Scope(ContextDecorator):
    """Makes its budget once when it is written, so that a mistake is reported there, and again whenever it is entered:
    a share is one of what is free then."""

    _is_used = True
    """Whether it was ever entered, or decorates something; one that could not even be made needs no second word."""

    def __init__(self, make: Callable[[], Budget], file: str, line: int) -> None:
        self._make = make
        self._file, self._line = file, line
        self._marks: list[tuple[Mark, Mark]] = []
        """Those of the scopes that it opened and has not closed."""
        make()
        self._is_used = False

    def __call__(self, func: Function) -> Function:
        self._is_used = True
        return super().__call__(func)

    def __enter__(self) -> Budget:
        self._is_used = True
        scope, outer = self._make(), _scopes.innermost
        if outer is not None and not scope.limits:
            scope = replace(
                outer,
                reserved_bytes=scope.reserved_bytes or outer.reserved_bytes,
                offload=scope.offload,
                tune=scope.tune,
                process=scope.process or outer.process,
            )
            _check_reserved(scope)
        if scope.process and not scope.held_at_entry:
            scope = replace(scope, held_at_entry=held_by_process())
        self._marks.append((_scopes.enter(scope), _opened.enter(next(moments))))
        return scope

    def __exit__(self, *_: object) -> None:
        left, opened = _scopes.innermost, _opened.innermost
        scope, moment = self._marks.pop()
        _scopes.leave(scope)
        _opened.leave(moment)
        if left is not None and opened is not None and left.limits:
            _closed.set(Closed(opened, next(moments), f"{self._file}:{self._line}"))

    def __del__(self) -> None:
        if not self._is_used:
            warn_once(
                "a budget without a scope",
                "koila.budget(...) was written but never entered: it limits nothing",
                "with koila.budget(...): around the lines that run, backward() included; or koila.lazy(x, budget=...)",
                self._file,
                self._line,
            )


def budget(
    allowed: Amount | None = None,
    *,
    total: Amount | None = None,
    reserved: Amount = 0,
    offload: bool | str | os.PathLike[str] | None = None,
    chunk_size: int | None = None,
    tune: bool = True,
    process: bool = False,
) -> _Scope:
    """A scope (or decorator) in which runs keep to a budget.

    The innermost scope holds; one that names no size keeps the size of the scope around it. An amount is bytes as an
    int, a text such as "512MiB", or a share of what is free when the scope is entered; for a program on an accelerator,
    of what is free there when it runs.

    Args:
        allowed: What a run may allocate.
        total: What a run may allocate and what is alive on the device, together; a share is one of what is free and
            alive. With `allowed`, the smaller one holds.
        reserved: Leave this much of them alone, for what koila cannot see.
        offload: Keep values in files where that is needed: in the temporary directory (True) or in this one.
        chunk_size: Cut the batch into chunks of this many samples instead; the last one may be smaller.
        tune: Whether measuring may change later plans: smaller after a peak above its projection, or a faster one.
        process: Keep the process small, too (glibc, slower): its growth beyond 32 MiB counts, up to half of `allowed`.

    Raises:
        BudgetError: A budget that is not one.

    >>> with budget("2KiB") as scope:
    ...     scope.allowed_bytes
    2048
    """
    caller = sys._getframe(1)
    make = lambda: make_budget(allowed, total, reserved, offload, chunk_size, tune, process=process)  # noqa: E731
    return _Scope(make, caller.f_code.co_filename, caller.f_lineno)


def make_budget(
    allowed: object = None, total: object = None, reserved: object = 0, offload: object = None,
    chunk_size: object = None, tune: object = True, name: str = "allowed", process: object = False,
) -> Budget:  # fmt: skip
    """A budget from what users write; `name` is what they call the bytes that a run may allocate.

    Raises:
        BudgetError: It is not one.
    """
    size = _read_chunk_size(chunk_size)
    for called, amount in ((name, allowed), ("total", total)):
        if size is not None and amount is not None:
            raise BudgetError(
                f"both a chunk size ({size}) and a byte budget ({called}={_shown(amount)}): with bytes, koila picks "
                "the chunk size itself",
                hint='koila.budget("512MiB") or koila.budget(chunk_size=4)',
            )
    if not isinstance(tune, bool):
        raise BudgetError(f"tune={_shown(tune)} is neither True nor False", hint="tune=False keeps plans as they are")
    if not isinstance(process, bool):
        raise BudgetError(
            f"process={_shown(process)} is neither True nor False", hint="process=True keeps the process small"
        )
    made = Budget(
        size,
        None if allowed is None else read_bytes(allowed, name),
        None if total is None else read_bytes(total, "total", lambda: free_bytes() + alive_bytes()),
        read_bytes(reserved, "reserved", smallest=0),
        _read_offload(offload),
        tune,
        process,
        allowed_share=_share(allowed),
        total_share=_share(total),
    )
    _check_reserved(made)
    return made


def _check_reserved(made: Budget) -> None:
    for name, most in (("allowed", made.allowed_bytes), ("total", made.total_bytes)):
        if most is not None and made.reserved_bytes >= most:
            raise BudgetError(
                f"reserved={made.reserved_bytes} of {name}={most} bytes leaves nothing to run in",
                hint=f"reserve less than {format_bytes(most)}, or allow more",
            )


# What users write.


def read_bytes(
    value: object, name: str, whole: Callable[[], int] = free_bytes, smallest: int = 1, quoted: bool = True
) -> int:
    """A byte count from what users write.

    Args:
        value: An amount of memory, or anything else.
        name: What the user calls it.
        whole: What a share is a share of.
        smallest: The smallest amount that makes sense, in bytes.
        quoted: Whether a text stands in quotes where the user writes it.

    Raises:
        BudgetError: It is not an amount, or too small or too large.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        kind = "None" if value is None else f"of type {type(value).__name__}"
        raise _refused(name, f"{name} is not a number of bytes but {kind}", quoted)
    if isinstance(value, float):
        if not 0 < value <= 1:
            raise _refused(name, f"{name}={value!r} is not a share in (0, 1]", quoted)
        found = int(value * whole())
    else:
        found = _read_text(value, name, quoted) if isinstance(value, str) else value
    if found < smallest:
        fact = "is less than nothing" if smallest == 0 else "leaves nothing to run in"
        raise _refused(name, f"{name}={_shown(value)} {fact}", quoted)
    if found > MOST_BYTES:
        raise _refused(name, f"{name}={_shown(value)} is more than any device has (2^63 bytes)", quoted)
    return found


def _read_text(text: str, name: str, quoted: bool) -> int:
    match = _TEXT.fullmatch(text.strip())
    assert match is not None  # Every text matches.
    number, unit = match["number"], match["unit"]
    if match["sign"] and number:
        return -1
    if number is None:
        fault = "it does not begin with a number" if text.strip() else "it is empty"
    elif not unit:
        fault = "it has no unit"
    else:
        try:
            return parse_bytes(text)
        except ValueError:
            fault = f"{_shown(unit)} is not a unit of memory"
    raise _refused(name, f"{name}={_shown(text)} cannot be read: {fault}", quoted, number or "512", _meant(unit))


_ABBREVIATED = re.compile(r"[kmgtp](i?[bo]?$|ilo|eg|ig|er|et)", re.IGNORECASE)


def _meant(unit: str) -> str:
    """The unit that somebody has in mind who writes another: `G`, `gig` and `GO` are GiB."""
    return f"{unit[0].upper()}iB" if _ABBREVIATED.match(unit or "") else "MiB"


def _refused(name: str, fact: str, quoted: bool, number: str = "512", unit: str = "MiB") -> BudgetError:
    amount = f"{number[:20]}{unit}"
    example = f'{name}="{amount}"' if quoted else f"{name}={amount}"
    return BudgetError(fact, hint=f"{example}; accepted are {ACCEPTED}")


def _shown(value: object) -> str:
    """A value in a message: on one line, and not all of a large one."""
    if isinstance(value, int) and abs(value) > MOST_BYTES:
        return f"{'-' if value < 0 else ''}2^{value.bit_length() - 1} or more"
    if isinstance(value, (int, float, str, os.PathLike)) or value is None:
        text = repr(value)
        return text if len(text) <= 60 else text[:60] + "…"
    return f"<{type(value).__name__}>"


@lru_cache(maxsize=1)
def _read_variable(text: str) -> int:
    """The variable's text is read like a literal: 1073741824, 0.5, 512MiB. Kept, so that a share does not change from
    run to run."""
    return read_bytes(literal(text), VARIABLE, quoted=False)


def literal(text: str) -> int | float | str:
    """What a text outside of a program means: `1073741824` is a number of bytes, `0.5` a share, `512MiB` stays a text.

    >>> literal("0.5"), literal("512MiB")
    (0.5, '512MiB')
    """
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _share(value: object) -> float | None:
    """The share that was named, if an amount was named as one."""
    return value if isinstance(value, float) else None


def _read_chunk_size(value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BudgetError(
            f"chunk_size must be a whole number of at least 1, got {_shown(value)}",
            hint='chunk_size=1, or a byte budget such as "512MiB", for which koila picks the chunk size',
        )
    return value


def _read_offload(value: object) -> str | None:
    if value is None or value is False:
        return None
    if value is not True and not isinstance(value, (str, os.PathLike)):
        raise _not_offload(value, f"is neither True, False nor a directory but of type {type(value).__name__}")
    path = tempfile.gettempdir() if value is True else os.fsdecode(value)
    if not os.path.isdir(path):
        raise _not_offload(value, "is not a directory" if os.path.exists(path) else "does not exist")
    if not os.access(path, os.W_OK | os.X_OK):
        raise _not_offload(value, "is a directory that koila may not write to")
    return os.path.abspath(path)


def _not_offload(value: object, fault: str) -> BudgetError:
    return BudgetError(
        f"offload={_shown(value)} {fault}",
        hint=f"offload=True, which is {tempfile.gettempdir()}; accepted are True, False and a directory to write to",
    )
