"""Commands run in this process: what a script sees of how it was started is put back after each test."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from koila.reporting.report import reports

Write = Callable[[str], str]


@pytest.fixture(autouse=True)
def own_process() -> Iterator[None]:
    main, argv, path = sys.modules["__main__"], sys.argv, list(sys.path)
    reports.clear()  # A command tells of all runs of its process.
    yield
    sys.modules["__main__"], sys.argv, sys.path[:] = main, argv, path


@pytest.fixture
def script(tmp_path: Path) -> Write:
    """Writes a script, and gives its path."""

    def write(text: str) -> str:
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return str(path)

    return write
