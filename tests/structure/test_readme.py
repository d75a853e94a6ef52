"""The README and the pages in docs/: their examples run, what they link to is there, and the README stays short."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))
MAX_LINES = 150


def blocks(page: Path) -> list[str]:
    """The examples of a page, in order."""
    found = re.findall(r"^( *)```python\n(.*?)^ *```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(text) for _, text in found]


def test_the_readme_is_short_and_has_examples() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= MAX_LINES
    assert len(blocks(README)) >= 3


@pytest.mark.parametrize("number", range(len(blocks(README))))
def test_an_example_of_the_readme_runs(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(blocks(README)[number], f"README.md block {number}", "exec"), {"__name__": "readme"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_examples_of_a_page_run_one_after_the_other(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": page.stem}
    for number, text in enumerate(blocks(page)):
        exec(compile(text, f"docs/{page.name} block {number}", "exec"), names)


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.stem)
def test_links_and_scripts_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("http")]
    scripts = re.findall(r"\./(scripts/\w+)", text)
    assert [path for path in scripts if not (ROOT / path).exists()] == []
    assert [link for link in links if not is_there(page, link)] == []


def is_there(page: Path, link: str) -> bool:
    """Whether a link leads to a file, and to a heading in it if it names one."""
    path, _, anchor = link.partition("#")
    target = page if not path else page.parent / path
    if not target.exists():
        return False
    return not anchor or anchor in {slug(line) for line in target.read_text(encoding="utf-8").splitlines()}


def slug(heading: str) -> str:
    """The anchor of a heading, as the site makes it."""
    words = re.sub(r"[^\w\s-]", "", heading.lstrip("# ")).strip().lower()
    return re.sub(r"[-\s]+", "-", words)


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:")[2]
    assert sorted(re.findall(r"[\w-]+\.md", navigation)) == [page.name for page in PAGES]


def test_messages_in_troubleshooting_are_koilas() -> None:
    """Each part of a quoted message stands in the source."""
    headings = re.findall(r'^### "(.+)"$', (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8"), flags=re.M)
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    parts = [part.strip() for heading in headings for part in heading.split("…")]
    assert len(headings) > 5 and [part for part in parts if part not in source] == []
