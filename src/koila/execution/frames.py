"""Frames: an error that leaves koila shows the user's lines, not a screen of koila's.

*Takes* an exception on its way out. *Gives* the same exception with koila's own frames taken out of its traceback, but
for the innermost. `KOILA_TRACEBACK=full` keeps all of them.
"""

from __future__ import annotations

import os
from types import TracebackType

from koila._torch import CONTEXT_MODULE

VARIABLE = "KOILA_TRACEBACK"
NUM_FRAMES = 12
"""So many frames are kept at most, the innermost ones."""


class few_frames:
    """Errors of the body of a `with` statement leave it with few frames.

    A class, because `contextlib` puts the traceback back that an error had when it entered a generator.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: TracebackType | None) -> None:
        if isinstance(error, Exception):
            shorten(error.with_traceback(traceback))


def wants_all_frames() -> bool:
    """Whether the user asked to see koila's own frames."""
    return os.environ.get(VARIABLE) == "full"


def shorten(error: Exception) -> None:
    """Let an error leave with few frames."""
    if not wants_all_frames():
        error.__traceback__ = trimmed(error.__traceback__)


def trimmed(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback without koila's frames, except for the innermost frame of all."""
    frames: list[TracebackType] = []
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    shown = [each for each in frames[:-1] if not _is_own(each)] + frames[-1:]
    found: TracebackType | None = None
    for each in reversed(shown[-NUM_FRAMES:]):
        found = TracebackType(found, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return found


def _is_own(traceback: TracebackType) -> bool:
    name = str(traceback.tb_frame.f_globals.get("__name__", ""))
    return name.split(".")[0] == "koila" or name in ("contextlib", CONTEXT_MODULE)
