"""Where in the user's code an operation was recorded.

*Takes* the running frames. *Gives* a `Site`: a code object and an instruction offset, turned to text only when asked.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType

import torch

_INTERNAL = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
MAX_FILES = 10_000
"""How many names of files are remembered: generated code may have a new one all the time."""


_internal: set[str] = set()
"""Files that were seen and belong to torch or koila."""
_external: set[str] = set()
"""Files that were seen and are the user's."""


class Site:
    """A place in the user's code."""

    __slots__ = ("_code", "_offset")

    def __init__(self, code: CodeType, offset: int) -> None:
        self._code = code
        self._offset = offset

    @property
    def file(self) -> str:
        """The file's name, as Python knows it."""
        return self._code.co_filename

    @property
    def line(self) -> int:
        """The line number."""
        for start, stop, line in self._code.co_lines():
            if start <= self._offset < stop and line is not None:
                return line
        return self._code.co_firstlineno

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    __repr__ = __str__

    def __call__(self) -> str:
        """The text; counters take sites as callables and resolve them when they are shown."""
        return str(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Site) and self._code is other._code and self._offset == other._offset

    def __hash__(self) -> int:
        return hash((id(self._code), self._offset))


def _is_internal(file: str) -> bool:
    found = file.startswith((*_INTERNAL, "<"))
    known = _internal if found else _external
    if len(known) >= MAX_FILES:
        known.clear()
    known.add(file)
    return found


def user_frame(frame: FrameType) -> FrameType:
    """The innermost frame outside torch and koila, from a frame outwards; the outermost if there is none."""
    while True:
        file = frame.f_code.co_filename
        if file not in _internal and (file in _external or not _is_internal(file)):
            return frame
        outer = frame.f_back
        if outer is None:
            return frame
        frame = outer


def user_site() -> Site:
    """The innermost frame outside torch and koila."""
    frame = user_frame(sys._getframe(1))
    return Site(frame.f_code, frame.f_lasti)
