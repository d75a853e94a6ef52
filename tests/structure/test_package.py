"""The package as people install it: a wheel with everything in it, a command, and metadata that hold."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import koila_command
from koila._torch import SUPPORTED, check_version
from koila.cli.doctor import TESTED_PYTHON
from koila.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built with what is installed, from a copy, so that nothing is left behind in the repository."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    build = "from setuptools import build_meta; print(build_meta.build_wheel('..'))"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (found,) = folder.glob("koila-*.whl")
    return zipfile.ZipFile(found)


def test_the_wheel_holds_every_module_and_its_data(wheel: zipfile.ZipFile) -> None:
    files = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "koila").rglob("*.py")}
    assert files | {"koila_command.py", "koila/py.typed", "koila/reporting/page.html"} <= set(wheel.namelist())


def test_the_wheel_has_the_command_and_the_metadata(wheel: zipfile.ZipFile) -> None:
    (info,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "koila = koila_command:main" in wheel.read(info).decode()
    metadata = wheel.read(info.replace("entry_points.txt", "METADATA")).decode()
    for extra in PROJECT["optional-dependencies"]:
        assert f"Provides-Extra: {extra}" in metadata
    assert "Project-URL: Changelog, " in metadata and "Description-Content-Type: text/markdown" in metadata


def test_the_command_is_the_one_that_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PROJECT["scripts"] == {"koila": f"{koila_command.__name__}:{koila_command.main.__name__}"}
    monkeypatch.setattr(sys, "argv", ["koila"])
    assert koila_command.main() == main([])


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (
            lambda: check_version("2.12.0"),
            "koila: koila supports PyTorch 2.13.x, and this is PyTorch 2.12.0\n  try: ",
        ),
        (
            lambda: __import__("no_such_torch"),
            "koila: No module named 'no_such_torch'\n  try: pip",
        ),
    ],
)
def test_a_koila_that_cannot_be_imported_is_one_sentence(
    raised: Callable[[], Any], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken(ModuleType):
        def __getattr__(self, name: str) -> Any:
            return raised()

    monkeypatch.setitem(sys.modules, "koila.cli.main", Broken("koila.cli.main"))
    assert koila_command.main() == 1
    assert capsys.readouterr().err.startswith(said)


def test_every_extra_installs_something() -> None:
    assert all(PROJECT["optional-dependencies"].values())


def test_the_versions_that_are_tested_are_the_same_everywhere() -> None:
    python = ".".join(map(str, TESTED_PYTHON))
    assert PROJECT["requires-python"] == f">={python}"
    assert f"Programming Language :: Python :: {python}" in PROJECT["classifiers"]
    (torch,) = PROJECT["dependencies"]
    assert torch.startswith(f"torch>={SUPPORTED[0]},<")
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert f"Python {python}" in text and all(f"PyTorch {release}" in text for release in SUPPORTED)
