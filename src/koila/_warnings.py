"""Warnings: what a line of the user's did not do, and what to write instead, once per place.

*Takes* a kind of mistake, the fact, a way out, and the place in the user's code. *Gives* one `KoilaWarning` for each
kind and place, through Python's `warnings`, so that filters and `-W error` work as always; counted as `warned::<kind>`
(Rule 6).
"""

from __future__ import annotations

import warnings

from koila import events
from koila.errors import KoilaWarning, compose_message

MAX_PLACES = 10_000
"""How many places are remembered; generated code has new ones all the time."""
_said: set[tuple[str, str, int]] = set()


def warn_once(kind: str, fact: str, hint: str, file: str, line: int) -> None:
    """Warn about a place in the user's code, unless it was warned about in the same way before.

    Args:
        kind: What sort of mistake it is, for the counter.
        fact: What happened.
        hint: What to write instead.
        file: The user's file.
        line: The line in it.
    """
    place = (kind, file, line)
    if place in _said:
        return
    if len(_said) >= MAX_PLACES:
        _said.clear()
    _said.add(place)
    events.count(f"warned::{kind}", site=f"{file}:{line}")
    warnings.warn_explicit(compose_message(fact, hint=hint), KoilaWarning, file, line)


def forget_warnings() -> None:
    """Every place may be warned about again."""
    _said.clear()
