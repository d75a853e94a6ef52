"""The exported names: a change here is a change that users see, and stands in the changelog."""

from __future__ import annotations

import inspect
import pydoc
import re
import tomllib
from pathlib import Path

import pytest

import koila
import koila.parts

ROOT = Path(__file__).resolve().parents[2]

NAMES = [
    "budget",
    "errors",
    "explain",
    "last_report",
    "lazy",
    "metrics",
    "plan",
    "run",
]

SELDOM = [
    "eager",
    "graph",
    "keep",
    "loader",
    "log_to",
    "measure",
    "progress",
    "pure",
    "reports",
    "rule",
    "settle",
    "stream",
]
"""What users call now and then: the docstring of koila names them, `help(koila)` does not explain them one by one."""

ATTRIBUTES = [
    "AnalysisError",
    "BatchInfo",
    "BudgetError",
    "CaptureError",
    "DelegateError",
    "EagerTensor",
    "Evaluation",
    "ExecutionError",
    "KoilaError",
    "KoilaWarning",
    "LazyFunction",
    "LazyTensor",
    "PlannedRun",
    "PrePass",
    "Report",
    "Runnable",
    "RunnableTensor",
    "StaleInputError",
    "TensorMixin",
    "add_step_closure",
    "compile_program",
    "dump_ir",
    "gpus",
    "lazy_forward",
    "lookup_function",
    "lookup_method",
    "mark_step",
    "structural_hash",
]
"""Names that programs may use with `koila.` before them, although nobody calls them every day."""


def test_the_exported_names_are_these() -> None:
    assert koila.__all__ == NAMES


@pytest.mark.parametrize("module", [koila, koila.parts])
def test_they_are_sorted_and_there(module: object) -> None:
    names: list[str] = module.__all__  # type: ignore[attr-defined]
    assert sorted(names) == names
    assert [name for name in names if not hasattr(module, name)] == []


def test_the_other_names_are_there() -> None:
    assert [name for name in (*SELDOM, *ATTRIBUTES) if not hasattr(koila, name)] == []


def test_the_docstring_names_what_is_called_seldom() -> None:
    assert [name for name in SELDOM if not re.search(rf"\b{name}\b", koila.__doc__ or "")] == []


def test_every_function_and_class_says_what_it_does() -> None:
    assert [name for name in (*NAMES, *SELDOM, *ATTRIBUTES) if not getattr(koila, name).__doc__] == []


def test_the_parts_of_the_documents_are_in_the_table_of_their_module() -> None:
    table = inspect.getdoc(koila.parts) or ""
    assert [name for name in koila.parts.__all__ if f"`{name}`" not in table] == []


def test_help_fits_three_screens() -> None:
    """Screens of sixty lines."""
    assert len(pydoc.render_doc(koila).splitlines()) <= 180


def test_the_version_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert koila.__version__ == project["project"]["version"]
