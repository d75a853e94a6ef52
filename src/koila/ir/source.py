"""Where in the user's code an operation was recorded.

*Takes* the running frames. *Gives* a `Site`: a code object and an instruction offset, turned to text only when asked.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType

import torch

_INTERNAL = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
internal_codes: dict[CodeType, bool] = {}
"""Whether code that was seen belongs to torch or koila; see `is_internal`."""
MAX_CODES = 10_000
"""How many code objects are remembered, so that generated code does not stay alive for good."""


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


def is_internal(code: CodeType) -> bool:
    """Whether code belongs to torch or koila, or was generated."""
    known = internal_codes.get(code)
    if known is None:
        if len(internal_codes) >= MAX_CODES:
            internal_codes.clear()
        known = internal_codes[code] = code.co_filename.startswith((*_INTERNAL, "<"))
    return known


def user_site() -> Site:
    """The innermost frame outside torch and koila."""
    frame = sys._getframe(1)
    while internal_codes.get(frame.f_code, True) and is_internal(frame.f_code) and frame.f_back is not None:
        frame = frame.f_back
    return Site(frame.f_code, frame.f_lasti)
