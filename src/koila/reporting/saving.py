"""Files that reports are saved to.

*Takes* a path and a way to make the text for each ending. *Gives* the file, or an error that names the endings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path

from koila.errors import KoilaError


def write_text(path: str | PathLike[str], makers: Mapping[str, Callable[[], str]]) -> None:
    """Write the text that belongs to the ending of a path.

    Raises:
        KoilaError: No text belongs to it.
    """
    target = Path(path)
    make = makers.get(target.suffix.lower())
    if make is None:
        raise KoilaError(
            f"cannot save to {str(target)!r}: the name must end in {' or '.join(makers)}",
            hint=f"save({str(target.with_suffix(next(iter(makers))))!r})",
        )
    target.write_text(make(), encoding="utf-8")
