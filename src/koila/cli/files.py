"""Names of files that a command is told to write.

*Takes* the endings that make sense. *Gives* a type for argparse, so that a wrong name is found before a script has run
for hours.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path


def file_ending_in(*endings: str) -> Callable[[str], str]:
    """A name that ends in one of these, in a folder that is there.

    >>> file_ending_in(".json", ".html")("run.json")
    'run.json'
    """

    def check(name: str) -> str:
        path = Path(name)
        if path.suffix.lower() not in endings:
            raise argparse.ArgumentTypeError(f"{name!r} does not end in {' or '.join(endings)}")
        if not path.parent.is_dir():
            raise argparse.ArgumentTypeError(f"{str(path.parent)!r} is not a folder")
        return name

    return check
