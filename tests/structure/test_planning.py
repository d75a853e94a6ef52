"""The planner works on lists: its core does not know torch, and nothing is noted on FX nodes but their values.

The checks are functions over source text, so that each is also shown to catch what it is there for.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

import pytest

from tests.structure.test_layers import MODULES, Module, imported_names, internal_imports

WITHOUT_TORCH = (
    "koila.planning.step",
    "koila.planning.aliasing",
    "koila.planning.arena",
    "koila.planning.schedule",
    "koila.planning.peak",
    "koila.planning.devices",
    "koila.planning.rates",
    "koila.planning.levers.order",
    "koila.planning.levers.offload",
    "koila.planning.levers.recompute",
)
KEYS = ("val", "recorded")
"""What FX metas may hold: the value of a node, and the recorded call that it comes from."""


def without_types(module: Module) -> Module:
    """The module without the imports that only type checkers see."""
    tree = module.tree
    tree.body = [
        node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
    ]
    return Module(module.name, ast.unparse(tree), module.is_package)


def torch_users(name: str, modules: Mapping[str, Module]) -> list[str]:
    """The modules that import torch among those that a module imports, and theirs."""
    found, seen, pending = list[str](), {name}, [name]
    while pending:
        module = without_types(modules[pending.pop()])
        names = (each for node in ast.walk(module.tree) for each in imported_names(module, node))
        found += [module.name] if any(each.split(".")[0] == "torch" for each in names) else []
        fresh = internal_imports(module, modules) - seen
        seen |= fresh
        pending += sorted(fresh)
    return found


def _is_meta(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "meta"


def _is_known(key: ast.AST | None) -> bool:
    return isinstance(key, ast.Constant) and key.value in KEYS


def _copies_a_meta(value: ast.AST) -> bool:
    return any(_is_meta(node) for node in ast.walk(value))


def _writes(node: ast.AST) -> Iterator[bool]:
    """For each write to a meta, whether it is allowed."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)) and _is_meta(node.value):
        yield _is_known(node.slice)
    if isinstance(node, ast.Assign) and any(map(_is_meta, node.targets)):
        yield _copies_a_meta(node.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_meta(node.func.value):
        if node.func.attr == "update":
            yield from (_is_known(ast.Constant(keyword.arg)) for keyword in node.keywords)
            for given in node.args:
                keys = given.keys if isinstance(given, ast.Dict) else None
                yield _copies_a_meta(given) if keys is None else all(map(_is_known, keys))
        elif node.func.attr in ("setdefault", "pop", "__setitem__"):
            yield bool(node.args) and _is_known(node.args[0])


def notes(module: Module) -> list[str]:
    """Lines that write anything but a value into the meta of an FX node."""
    nodes = (node for node in ast.walk(module.tree) if not all(_writes(node)))
    return [f"{module.name}:{node.lineno}" for node in nodes]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_the_core_of_the_planner_does_not_know_torch(name: str) -> None:
    assert torch_users(name, MODULES) == []


def test_nothing_is_noted_on_fx_nodes() -> None:
    assert [line for module in MODULES.values() for line in notes(module)] == []


def test_planning_does_not_know_who_runs_it() -> None:
    planning = [module for module in MODULES.values() if module.part == "planning"]
    imports = {name for module in planning for name in internal_imports(module, MODULES)}
    assert not [name for name in imports if name.startswith("koila.execution")]


# The checks themselves, on modules made by hand.


@pytest.mark.parametrize(
    "line",
    [
        'node.meta["alias"] = 1',
        'del node.meta["val2"]',
        'node.meta["seconds"] += 1',
        "node.meta[key] = 1",
        'node.meta.update(val=1, alias=2)',
        'node.meta.update({"alias": 2})',
        'node.meta.setdefault("fused", 1)',
        'node.meta = {"alias": 1}',
        "a.b.meta['again'] = True",
    ],
)  # fmt: skip
def test_notes_are_caught(line: str) -> None:
    assert notes(Module("koila.planning.x", f"def f(node, key):\n    {line}")) == ["koila.planning.x:2"]


@pytest.mark.parametrize(
    "line",
    [
        'node.meta["val"] = 1',
        'node.meta["recorded"] = 1',
        "node.meta.update(val=1)",
        "node.meta = copy(other.meta)",
        'node.meta.update({k: v for k, v in other.meta.items() if k != "val"})',
        'print(node.meta["alias"])',
    ],
)
def test_values_are_fine(line: str) -> None:
    assert notes(Module("koila.planning.x", f"def f(node, other):\n    {line}")) == []


@pytest.mark.parametrize("statement", ["import torch", "from torch import fx", "from koila.planning.other import x"])
def test_torch_is_caught(statement: str) -> None:
    modules = {
        "koila.planning.schedule": Module("koila.planning.schedule", statement),
        "koila.planning.other": Module("koila.planning.other", "import torch.fx"),
    }
    assert len(torch_users("koila.planning.schedule", modules)) == 1


def test_types_may_know_torch() -> None:
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n"
    modules = {"koila.planning.schedule": Module("koila.planning.schedule", source)}
    assert torch_users("koila.planning.schedule", modules) == []
