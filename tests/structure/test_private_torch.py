"""PyTorch that is not public API is used in `koila._torch` only (CONTRIBUTING.md).

The check is a function over source text, so that it is also shown to catch what it is there for. It knows a private
name of PyTorch by where it comes from (a path that starts at an import from torch) or, on a value whose origin the
source text does not show, by the attribute's name.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from koila._torch import SUPPORTED, check_version
from koila._torch.operators import PRIVATE_OPERATORS, check_operators

ROOT = Path(__file__).resolve().parents[2] / "src"

ATTRIBUTES = frozenset(
    {
        # Tensors and storages.
        "_base", "_cdata", "_version", "_is_view", "_typed_storage", "_make_subclass", "_make_wrapper_subclass",
        "_backward_hooks", "_view_func",
        # Operators.
        "_schema", "_overloadname", "_overload_names", "_op_dk", "_defined_in_python",
        # Autograd's nodes.
        "_saved_", "_input_metadata", "_sequence_nr", "_raw_saved_tensors", "_saved_tensors", "_forward_cls",
        # Graphs and traces.
        "_root", "_codegen", "_input_nodes", "_erased", "_find_nodes_lookup_table",
        # Modules, and the functions that koila replaces.
        "_parameters", "_buffers", "_modules", "_call_impl", "_find_tensors",
    }
)  # fmt: skip
"""Private attributes of PyTorch's objects, whatever the object is called."""
OWN = frozenset({"self", "cls"})
"""Their attributes are koila's own."""
UNSTABLE = ("torch.fx.experimental", "torch.fx.passes")
"""Modules without a promise, although no underscore says so."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def origins(tree: ast.Module) -> dict[str, str]:
    """Names of a module that stand for something of PyTorch, with its path: imports, and `aten = torch.ops.aten`."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    found[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "torch":
            found.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            path = dotted(node.value, found)
            if path is not None:
                found.setdefault(node.targets[0].id, path)
    return found


def dotted(node: ast.AST, names: Mapping[str, str]) -> str | None:
    """`torch.ops.aten.add` of an expression that starts at PyTorch, None of any other."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        base = dotted(node.value, names)
        return None if base is None else f"{base}.{node.attr}"
    return None


def private_uses(source: str) -> list[str]:
    """Each use of PyTorch in a module that is not public API, as `line: name`."""
    tree = ast.parse(source)
    names = origins(tree)
    found = {(node.lineno, name) for node in ast.walk(tree) for name in _private_in(node, names)}  # type: ignore[attr-defined]
    return [f"{line}: {name}" for line, name in sorted(found)]


def _private_in(node: ast.AST, names: Mapping[str, str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if _is_private_path(alias.name))
    elif isinstance(node, ast.ImportFrom) and node.level == 0:
        yield from (path for alias in node.names if _is_private_path(path := f"{node.module}.{alias.name}"))
    elif isinstance(node, ast.Attribute):
        yield from _private_attribute(node, names)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        # The name of an attribute for `getattr`, of a logger or of a module.
        if node.value in ATTRIBUTES or (" " not in node.value and _is_private_path(node.value)):
            yield repr(node.value)
    elif isinstance(node, ast.Call) and (dotted(node.func, names) or "").startswith("torch"):
        yield from (f"{word.arg}=" for word in node.keywords if word.arg is not None and is_private(word.arg))


def _private_attribute(node: ast.Attribute, names: Mapping[str, str]) -> Iterator[str]:
    path = dotted(node, names)
    if path is None:
        is_own = isinstance(node.value, ast.Name) and node.value.id in OWN
        if node.attr in ATTRIBUTES and not is_own:
            yield node.attr
    elif _is_private_path(path) and _operator(path) is None:
        yield path


def _is_private_path(path: str) -> bool:
    parts = path.split(".")
    unstable = any(path == module or path.startswith(f"{module}.") for module in UNSTABLE)
    return parts[0] == "torch" and (unstable or any(map(is_private, parts)))


def _operator(path: str) -> str | None:
    """The listed operators `_softmax.default` to which `torch.ops.aten._softmax.default`, or a part of it, belongs."""
    name = path.removeprefix("torch.ops.aten.")
    packets = {operator.partition(".")[0] for operator in PRIVATE_OPERATORS}
    listed = path != name and (name in packets or ".".join(name.split(".")[:2]) in PRIVATE_OPERATORS)
    return name if listed else None


def _sources() -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / "koila").rglob("*.py")):
        name = path.relative_to(ROOT / "koila").as_posix()
        if not name.startswith("_torch/"):
            yield name, path.read_text(encoding="utf-8")


def test_private_names_of_torch_stand_in_one_place() -> None:
    wrong = [f"{name}:{use}" for name, source in _sources() for use in private_uses(source)]
    assert wrong == [], "give these a name in koila._torch, with the reason and what to look at when PyTorch changes"


def test_private_operators_are_listed_and_used() -> None:
    used = set()
    for _, source in _sources():
        tree = ast.parse(source)
        names = origins(tree)
        paths = (dotted(node, names) for node in ast.walk(tree) if isinstance(node, ast.Attribute))
        used |= {path.removeprefix("torch.ops.aten.") for path in paths if path and path.startswith("torch.ops.aten._")}
    assert {name for name in used if "." in name} == PRIVATE_OPERATORS


@pytest.mark.parametrize("path", sorted((ROOT / "koila" / "_torch").glob("*.py")), ids=lambda path: path.name)
def test_every_name_says_what_to_look_at(path: Path) -> None:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    for node, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef) and not is_private(node.name) and path.name == "__init__.py":
            assert "Look at: " in (ast.get_docstring(node) or ""), node.name
        if isinstance(node, ast.Assign | ast.AnnAssign) and path.name in ("__init__.py", "delegates.py", "inductor.py"):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            assert isinstance(target, ast.Name)
            text = following.value.value if _is_text(following) else ""  # type: ignore[union-attr]
            assert is_private(target.id) or "Look at: " in text, target.id


def _is_text(node: ast.stmt | None) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


# The check itself, on source text made by hand.


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch\ntorch._C._get_mkldnn_enabled()", "torch._C._get_mkldnn_enabled"),
        ("import torch\nisinstance(x, torch._ops.OpOverload)", "torch._ops.OpOverload"),
        ("import torch as t\nt._C.DispatchKey", "torch._C.DispatchKey"),
        ("import torch._higher_order_ops", "torch._higher_order_ops"),
        ("import torch.utils._pytree as pytree", "torch.utils._pytree"),
        ("from torch._ops import OpOverload", "torch._ops.OpOverload"),
        ("from torch.fx.graph import _BoxedCodeGen", "torch.fx.graph._BoxedCodeGen"),
        ("from torch.utils import _pytree", "torch.utils._pytree"),
        ("from torch.fx.experimental.proxy_tensor import make_fx", "torch.fx.experimental.proxy_tensor.make_fx"),
        ("def f():\n    from torch._dynamo import exc", "torch._dynamo.exc"),
        ("from torch.nn import parallel as p\np._find_tensors = f", "torch.nn.parallel._find_tensors"),
        ("import torch\nT = torch.Tensor\nT._is_view", "torch.Tensor._is_view"),
        ("import torch\ntorch._neg_view(x)", "torch._neg_view"),
        ("import torch\naten = torch.ops.aten\naten._no_such.default", "torch.ops.aten._no_such"),
        ("import torch\naten = torch.ops.aten\naten._softmax.quick", "torch.ops.aten._softmax.quick"),
        ("import torch\ntorch.ops.mkldnn._is_mkldnn_bf16_supported()", "torch.ops.mkldnn._is_mkldnn_bf16_supported"),
        ("target._schema.is_mutable", "_schema"),
        ("f(x).untyped_storage()._cdata", "_cdata"),
        ("tensor._version", "_version"),
        ("node.meta['val']._is_view()", "_is_view"),
        ("self.graph._root", "_root"),
        ("getattr(target, '_schema')", "'_schema'"),
        ("logging.getLogger('torch._subclasses.fake_tensor')", "'torch._subclasses.fake_tensor'"),
        ("import torch\ntorch.compile(f, _private=1)", "_private="),
    ],
)  # fmt: skip
def test_private_names_are_caught(source: str, name: str) -> None:
    found = [use.split(": ")[1] for use in private_uses(source)]
    assert name in found


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.Tensor.__add__\ntorch.__version__",
        "import torch\naten = torch.ops.aten\naten._softmax.default\naten._softmax\naten._softmax.default.name()",
        "from koila._torch import OpOverload, schema_of\nschema_of(target).arguments",
        "from koila._torch.delegates import pytree\npytree.tree_flatten(x)",
        "self._version = 1\nself._root",
        "lazy._value\nLazyTensor._wrap(value)",
        "'''Runs below torch._C, as torch._ops does.'''",
        "import sys\nsys._getframe(1)",
    ],
)
def test_public_and_own_names_are_fine(source: str) -> None:
    assert private_uses(source) == []


# What happens on another PyTorch.


@pytest.mark.parametrize("version", ["2.13.0", "2.13.0+cpu", "2.13.4", "2.13.1+cu130"])
def test_supported_versions_are_accepted(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["2.12.1", "2.1.3", "2.130.0", "2.14.0", "3.0.0", "2.14.0a0+git0123abc"])
def test_other_versions_are_refused(version: str) -> None:
    with pytest.raises(ImportError) as error:
        check_version(version)
    text = f"koila supports PyTorch 2.13.x, and this is PyTorch {version}\n  try: pip install torch==2.13.0"
    assert str(error.value) == text


def test_importing_koila_checks_the_version_first() -> None:
    """Before anything private is touched: here the private modules are not even there."""
    program = (
        "import sys, torch\n"
        "torch.__version__ = '2.14.0'\n"
        "sys.modules['torch._subclasses.fake_tensor'] = None\n"
        "import koila\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    last = run.stderr.strip().splitlines()[-2:]
    assert last[0].startswith(f"ImportError: koila supports PyTorch {SUPPORTED[0]}.x, and this is PyTorch 2.14.0")
    assert last[1] == "  try: pip install torch==2.13.0"


def test_missing_operators_are_named() -> None:
    with pytest.raises(ImportError, match=r"the operators aten\._no_such\.default, aten\._softmax\.quick, on which"):
        check_operators(["_softmax.quick", "_softmax.default", "_no_such.default"])
