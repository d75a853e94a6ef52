"""The architecture, enforced: imports point backwards, no cycles, no hidden imports (DESIGN.md, section 2).

The checks are functions over source text, so that each is also shown to catch what it is there for.
"""

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "src"

LAYERS: tuple[frozenset[str], ...] = (
    frozenset(
        {"errors", "events", "_torch", "_bytes", "_budget", "_free", "_malloc", "_scopes", "_warnings", "interfaces"}
    ),
    frozenset({"ir"}),
    frozenset({"capture"}),
    frozenset({"analysis"}),
    frozenset({"planning"}),
    frozenset({"execution"}),
    frozenset({"delegates"}),
    frozenset({"reporting"}),
    frozenset({"_api"}),
    frozenset({"integrations"}),
    frozenset({"parts", "gpus", "lazy_core"}),
    frozenset({"__init__"}),
    frozenset({"selfcheck", "calibrate"}),
    frozenset({"cli"}),
    frozenset({"__main__"}),
)
RANKS = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
LEAVES = ("koila.errors", "koila.events")


@dataclass(frozen=True)
class Module:
    """A source file by its dotted name."""

    name: str
    source: str
    is_package: bool = False

    @property
    def part(self) -> str:
        """The file or folder right below `koila` to which this module belongs."""
        return self.name.split(".")[1] if "." in self.name else "__init__"

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.source, self.name)


def load_modules() -> dict[str, Module]:
    modules = {}
    for path in sorted((ROOT / "koila").rglob("*.py")):
        names = path.relative_to(ROOT).with_suffix("").parts
        is_package = names[-1] == "__init__"
        name = ".".join(names[:-1] if is_package else names)
        modules[name] = Module(name, path.read_text(encoding="utf-8"), is_package)
    return modules


def imported_names(module: Module, node: ast.AST) -> Iterator[str]:
    """The dotted names that an import statement asks for; `from a import b` gives `a.b`."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = _base(module, node)
        yield from (f"{base}.{alias.name}" for alias in node.names)


def _base(module: Module, node: ast.ImportFrom) -> str:
    if node.level == 0:
        assert node.module is not None
        return node.module
    package = module.name.split(".") if module.is_package else module.name.split(".")[:-1]
    anchor = package[: len(package) - node.level + 1]
    return ".".join([*anchor, node.module] if node.module else anchor)


def internal_imports(module: Module, modules: Mapping[str, Module]) -> set[str]:
    """The modules of koila that a module imports, for types only or not."""
    found = set()
    for node in ast.walk(module.tree):
        for name in imported_names(module, node):
            if name.split(".")[0] == "koila":
                found.add(_longest_known(name, modules))
    return found


def _longest_known(name: str, modules: Mapping[str, Module]) -> str:
    while name not in modules and "." in name:
        name = name.rpartition(".")[0]
    return name


def forward_imports(modules: Mapping[str, Module]) -> list[str]:
    wrong = []
    for module in modules.values():
        for target in sorted(internal_imports(module, modules)):
            part = modules[target].part if target in modules else "__init__"
            if part != module.part and RANKS[part] > RANKS[module.part]:
                wrong.append(f"{module.name} ({module.part}) imports {target} ({part}), which comes after it")
    return wrong


def find_cycle(modules: Mapping[str, Module]) -> list[str]:
    """A cycle of imports as a list of names that ends where it began; empty when there is none."""
    imports = {name: sorted(internal_imports(module, modules) - {name}) for name, module in modules.items()}
    done: set[str] = set()
    for start in imports:
        path = [start]
        waiting = [iter(imports[start])]
        while waiting:
            following = next(waiting[-1], None)
            if following is None:
                waiting.pop()
                done.add(path.pop())
            elif following in path:
                return [*path[path.index(following) :], following]
            elif following not in done and following in imports:
                path.append(following)
                waiting.append(iter(imports[following]))
    return []


def hidden_imports(module: Module) -> list[str]:
    """Imports inside functions of anything but an optional third-party package."""
    required = {"koila", "torch", *sys.stdlib_module_names}
    wrong = []
    for function in ast.walk(module.tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                for name in imported_names(module, node):
                    if name.split(".")[0] in required:
                        wrong.append(f"{module.name}:{node.lineno} imports {name} inside {function.name}()")  # type: ignore[attr-defined]
    return wrong


MODULES = load_modules()


def test_every_part_has_a_place() -> None:
    unknown = sorted({module.part for module in MODULES.values()} - set(RANKS))
    assert not unknown, f"give {unknown} a place in LAYERS, in the order in which a program passes through it"


def test_imports_point_backwards() -> None:
    assert forward_imports(MODULES) == []


def test_there_is_no_import_cycle() -> None:
    assert find_cycle(MODULES) == []


def test_no_import_hides_in_a_function() -> None:
    assert [line for module in MODULES.values() for line in hidden_imports(module)] == []


@pytest.mark.parametrize("name", LEAVES)
def test_leaves_import_the_standard_library_only(name: str) -> None:
    own = [module for found, module in MODULES.items() if found == name or found.startswith(name + ".")]
    names = {found for module in own for node in ast.walk(module.tree) for found in imported_names(module, node)}
    outside = {found.split(".")[0] for found in names if not found.startswith(name + ".")}
    assert outside <= sys.stdlib_module_names


# The checks themselves, on modules made by hand.


def _modules(**sources: str) -> dict[str, Module]:
    """`ir__graph="..."` is the module koila.ir.graph; a folder needs its own `ir=""`."""
    names = {"koila", *("koila." + name.replace("__", ".") for name in sources if name != "root")}
    packages = {name.rpartition(".")[0] for name in names}
    texts = {"koila." + name.replace("__", "."): text for name, text in sources.items() if name != "root"}
    texts["koila"] = sources.get("root", "")
    return {name: Module(name, texts[name], name in packages) for name in sorted(names)}


@pytest.mark.parametrize(
    "statement",
    [
        "from koila.planning import Plan",
        "import koila.planning",
        "from koila import planning",
        "from ..planning import Plan",
        "from koila import lazy",
        "import koila",
        "if TYPE_CHECKING:\n    from koila.planning import Plan",
        "def f():\n    from koila.planning import Plan",
    ],
)
def test_forward_imports_are_caught(statement: str) -> None:
    modules = _modules(ir="", ir__graph=statement, planning="Plan = 1")
    assert len(forward_imports(modules)) == 1


@pytest.mark.parametrize("statement", ["from koila.ir import Graph", "from koila import ir", "from . import chunk", ""])
def test_backward_imports_are_fine(statement: str) -> None:
    modules = _modules(ir="Graph = 1", planning="", planning__plan=statement, planning__chunk="")
    assert forward_imports(modules) == []
    assert find_cycle(modules) == []


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("from koila.ir import node", "from koila.ir.graph import Graph"),
        ("from .node import Node", "from . import graph"),
        ("import koila.ir.node", "import koila.ir.graph"),
    ],
)
def test_cycles_are_caught(first: str, second: str) -> None:
    cycle = find_cycle(_modules(ir="", ir__graph=first, ir__node=second))
    assert cycle == ["koila.ir.graph", "koila.ir.node", "koila.ir.graph"]


def test_a_module_that_imports_from_its_own_package_is_a_cycle() -> None:
    modules = _modules(ir="from koila.ir.graph import Graph", ir__graph="from koila.ir import Node")
    assert find_cycle(modules) == ["koila.ir", "koila.ir.graph", "koila.ir"]


@pytest.mark.parametrize(
    ("statement", "num_hidden"),
    [
        ("import rich", 0),
        ("from transformers import Trainer", 0),
        ("import torch", 1),
        ("from torch.fx import Graph", 1),
        ("import json", 1),
        ("from koila.ir import Graph", 1),
        ("from . import node", 1),
    ],
)
def test_hidden_imports_are_caught(statement: str, num_hidden: int) -> None:
    assert len(hidden_imports(Module("koila.ir.graph", f"def f():\n    {statement}"))) == num_hidden
    assert hidden_imports(Module("koila.ir.graph", statement)) == []
