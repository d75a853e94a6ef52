"""The notebook runs from top to bottom, and its cells show what its text says.

A small runner instead of a Jupyter kernel: the cells run in one namespace, and the value of a cell's last expression is
asked for what a notebook would show, `_repr_html_` before `repr`.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "tour.ipynb"


def run_cell(source: str, names: dict[str, Any]) -> str:
    """What a notebook would show below a cell."""
    tree = ast.parse(source)
    last = tree.body[-1]
    if not isinstance(last, ast.Expr):
        exec(compile(tree, NOTEBOOK.name, "exec"), names)
        return ""
    exec(compile(ast.Module(tree.body[:-1], []), NOTEBOOK.name, "exec"), names)
    value = eval(compile(ast.Expression(last.value), NOTEBOOK.name, "eval"), names)
    if value is None:
        return ""
    return value._repr_html_() if hasattr(value, "_repr_html_") else repr(value)


def test_the_notebook_runs_and_shows_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    book = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert book["nbformat"] == 4 and all(not cell.get("outputs") for cell in book["cells"])
    sources = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]
    names: dict[str, Any] = {"__name__": "__main__"}
    shown = {source: run_cell(source, names) for source in sources}
    pending, ready = (text for source, text in shown.items() if source.splitlines()[-1] == "loss")
    assert "pending" in pending and "ready" in ready
    assert "<svg" in shown["koila.explain(loss, backward=True)"]
    assert "<svg" in next(text for source, text in shown.items() if source.endswith("koila.last_report()"))
    assert float(next(text for source, text in shown.items() if source.startswith("gradients = "))) < 1e-5
    assert (tmp_path / "explain.html").exists()
