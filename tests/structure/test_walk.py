"""The newcomer's walk of CONTRIBUTING.md: its functions exist, and a real step passes through them in that order."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import koila
from koila.ir.cache import clear_all

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "koila"
STOP = re.compile(r"^\d+\. `(?P<file>[\w/]+\.py)` · `(?P<function>[\w.]+)`")


def stops(title: str) -> list[tuple[str, str]]:
    """(file, qualified name) of each stop of a walk."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.split(f"### {title}\n", 1)[1].split("\n#", 1)[0]
    found = [STOP.match(line) for line in section.splitlines() if line[:1].isdigit()]
    assert found and all(found), section
    return [(match["file"], match["function"]) for match in found if match]


def first_calls(names: set[tuple[str, str]], program: Any) -> list[tuple[str, str]]:
    """Which of these functions a program enters, in the order of their first calls."""
    seen: dict[tuple[str, str], None] = {}

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(SOURCE)):
            file = str(Path(frame.f_code.co_filename).relative_to(SOURCE))
            if (file, frame.f_code.co_qualname) in names:
                seen.setdefault((file, frame.f_code.co_qualname))

    sys.setprofile(profile)
    try:
        program()
    finally:
        sys.setprofile(None)
    return list(seen)


def test_the_walks_have_twelve_stops_at_most() -> None:
    assert len(stops("Recording a call")) + len(stops("A backward pass in chunks")) <= 12


@pytest.mark.parametrize("title", ["Recording a call", "A backward pass in chunks"])
def test_a_real_step_walks_that_way(title: str) -> None:
    clear_all()
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
    expected = stops(title)

    def step() -> None:
        model.zero_grad()
        model(koila.lazy(torch.randn(64, 16), budget="40KiB")).square().mean().backward()

    found = first_calls(set(expected), step)
    assert koila.last_report().how == "split"
    assert found == expected
