"""A folder with one file per entry that is done: several processes share the work, and a stopped run goes on.

*Takes* verdicts of entries. *Gives* them back, in whichever process asks.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.conformance.table import Row, Step
from tests.conformance.trial import Verdict


def commit() -> str:
    """The commit of the code that runs; `+` where files differ from it, other than the results themselves."""
    git = ("git", "-C", str(Path(__file__).parent))

    def said(*arguments: str) -> str:
        return subprocess.run((*git, *arguments), capture_output=True, text=True, check=False).stdout.strip()

    changed = said("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(exclude,top)tests/results")
    found = said("rev-parse", "--short=12", "HEAD")
    return found + ("+" if changed else "") if found else "unknown"


@dataclass
class Outcome:
    """What was found out about one entry."""

    verdicts: list[Verdict] = field(default_factory=list)
    apart: str | None = None
    """Why the entry cannot be compared."""
    cut_short: str | None = None
    """How far it came before its time was over."""
    row: Row | None = None
    """What the cut buys, where the suite measures it."""
    unmeasured: str | None = None
    """Why that could not be measured."""
    seconds: float = 0.0
    commit: str = ""


class Record:
    """The entries of one run, done and being done."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def claim(self, name: str) -> bool:
        """Whether this process may do an entry; the claim of a process that died is void."""
        if self._folder is None:
            return True
        if self._path(name).exists():
            return False
        path = self._folder / f"{name}.claim"
        if path.exists() and not _lives(path.read_text()):
            path.unlink(missing_ok=True)
        try:
            with path.open("x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            return False
        return True

    def write(self, name: str, outcome: Outcome) -> None:
        """Store a finished entry."""
        if self._folder is not None:
            path = self._folder / f"{name}.part"
            path.write_text(json.dumps(asdict(outcome)))
            path.rename(self._path(name))
            (self._folder / f"{name}.claim").unlink(missing_ok=True)

    def read(self, name: str) -> Outcome | None:
        """A finished entry."""
        if self._folder is None or not self._path(name).exists():
            return None
        found = json.loads(self._path(name).read_text())
        verdicts = [Verdict(**{k: tuple(v) if isinstance(v, list) else v for k, v in one.items()})
                    for one in found.pop("verdicts")]  # fmt: skip
        steps = found.pop("row", None)
        row = (
            None
            if steps is None
            else Row(*(Step(**{**step, "whole": tuple(step["whole"])}) for step in steps.values()))
        )
        return Outcome(verdicts, row=row, **found)

    def _path(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{name}.json"


def _lives(number: str) -> bool:
    return not number or Path(f"/proc/{number}").exists()
