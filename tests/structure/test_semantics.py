"""Every line of the list of semantics has a test that carries its number (`tests/semantics/listed.py`).

The check is a function over source text, so that it is also shown to catch what it is there for.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.semantics.listed import SEMANTICS

TESTS = Path(__file__).resolve().parents[1]


def marks(source: str) -> set[str]:
    """The numbers that the tests of a module carry: by a decorator of a test or of a class of tests, or by the module's
    `pytestmark`."""
    return {number for node in ast.walk(ast.parse(source)) for call in _carried(node) for number in _numbers(call)}


def _carried(node: ast.AST) -> Iterator[ast.AST]:
    """Expressions in which a test, a class of tests or a module is given marks."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name.lower().startswith("test"):
        yield from node.decorator_list
    elif isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "pytestmark" for t in node.targets):
        yield node.value


def _numbers(expression: ast.AST) -> Iterator[str]:
    for node in ast.walk(expression):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.semantics":
            yield from (argument.value for argument in node.args if isinstance(argument, ast.Constant))


def carried_numbers() -> dict[str, set[str]]:
    """Each file of tests that carries numbers, with them."""
    found = {path: marks(path.read_text()) for path in sorted(TESTS.rglob("test_*.py"))}
    return {str(path.relative_to(TESTS)): numbers for path, numbers in found.items() if numbers}


def test_every_line_of_the_list_has_a_test() -> None:
    shown = set().union(*carried_numbers().values())
    missing = [f"{number}: {text}" for number, text in SEMANTICS.items() if number not in shown]
    assert not missing, "no test carries\n" + "\n".join(missing)


def test_every_mark_names_a_line_of_the_list() -> None:
    unknown = {file: rest for file, numbers in carried_numbers().items() if (rest := numbers - SEMANTICS.keys())}
    assert not unknown


def test_the_list_is_complete() -> None:
    assert list(SEMANTICS) == [f"S{number}" for number in range(1, 23)]


def test_a_mark_is_seen_and_a_removed_one_is_missed() -> None:
    decorated = '@pytest.mark.semantics("S1", "S2")\n@pytest.mark.slow\ndef test_a(): pass\n'
    assert marks(decorated) == {"S1", "S2"}
    assert marks(decorated.replace(', "S2"', "")) == {"S1"}
    assert marks('pytestmark = [pytest.mark.slow, pytest.mark.semantics("S3")]') == {"S3"}
    assert marks(
        '@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.semantics("S4"))])\ndef test_b(n): pass'
    )
    assert marks('@pytest.mark.semantics("S5")\ndef helper(): pass') == set()
    assert marks('"""@pytest.mark.semantics("S6")"""\n# @pytest.mark.semantics("S7")') == set()
