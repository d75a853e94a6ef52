"""The demo's training, at a size that takes a second: eager's numbers by the one line, and a report."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo.py"


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    specification = importlib.util.spec_from_file_location("demo", DEMO)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, "demo", module)
    specification.loader.exec_module(module)
    sizes = {"BATCH": 4, "CONTEXT": 16, "WIDTH": 32, "LAYERS": 1, "WORDS": 64, "STEPS": 2, "BUDGET": "512KiB"}
    for name, size in sizes.items():
        monkeypatch.setattr(module, name, size)
    return module


def test_the_one_line_gives_eagers_numbers(demo: ModuleType, tmp_path: Path) -> None:
    for name, with_koila in (("eager", False), ("koila", True)):
        (tmp_path / name).mkdir()
        demo.train(with_koila, 0, tmp_path / name)
    assert demo.difference(tmp_path / "koila", tmp_path / "eager") <= demo.TOLERANCE
    assert "allowed 512.0 KiB" in (tmp_path / "koila" / "report.html").read_text(encoding="utf-8")


def test_moments_are_counted_in_steps(demo: ModuleType) -> None:
    run = demo.Watched("koila", True, 0, seconds=[2.0], memory=[(10.0, 0), (11.0, 5), (12.0, 7), (13.0, 9)])
    assert run.moments([4.0, 4.0]) == [0.0, 0.5, 1.0, 1.25]
    assert run.peak == 9


def test_the_bar_has_the_limit_as_a_line(demo: ModuleType) -> None:
    assert demo.bar(5, 10, 20, width=8) == "██··│····"
