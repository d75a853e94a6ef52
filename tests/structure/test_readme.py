"""The examples in the README run, and what it links to is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


def test_there_are_examples() -> None:
    assert len(BLOCKS) >= 2


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_an_example_runs(number: int) -> None:
    names: dict[str, Any] = {"__name__": "readme"}
    exec(compile(BLOCKS[number], f"README.md block {number}", "exec"), names)


def test_links_and_scripts_exist() -> None:
    text = README.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if not link.startswith("http")]
    scripts = re.findall(r"\./(scripts/\w+)", text)
    assert links and scripts
    assert [path for path in (*links, *scripts) if not (ROOT / path).exists()] == []
