"""What forces a value, and what does not."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import koila


@pytest.fixture
def scalar() -> Any:
    koila.metrics.reset()
    return koila.lazy(torch.tensor([1.0, 2.0])).sum()


@pytest.fixture
def matrix() -> Any:
    koila.metrics.reset()
    return koila.lazy(torch.arange(6.0).view(3, 2)) * 2


def forced() -> list[str]:
    return [name for name in koila.metrics.counter_names() if name.startswith("forced::")]


QUIET: dict[str, Callable[[Any], Any]] = {
    "repr": repr,
    "shape": lambda t: t.shape,
    "size": lambda t: (t.size(), t.size(0)),
    "dtype": lambda t: t.dtype,
    "device": lambda t: t.device,
    "len": len,
    "requires_grad": lambda t: t.requires_grad,
    "ndim": lambda t: (t.ndim, t.dim()),
    "numel": lambda t: t.numel(),
    "stride": lambda t: t.stride(),
    "is_contiguous": lambda t: t.is_contiguous(),
    "isinstance": lambda t: isinstance(t, torch.Tensor),
    "is_floating_point": lambda t: t.is_floating_point(),
    "element_size": lambda t: t.element_size(),
    "is_leaf": lambda t: t.is_leaf,
    "hash": hash,
    "grad": lambda t: t.grad,
    "batch": lambda t: t.batch,
    "graph": koila.graph,
    "explain": koila.explain,
    "arithmetic": lambda t: (t + 1) @ t.T,
    "indexing": lambda t: t[1:, 0],
    "unpacking": lambda t: [*t],
    "iteration": lambda t: [row.shape for row in t],
}


@pytest.mark.semantics("S1")
@pytest.mark.parametrize("name", QUIET)
def test_these_do_not_force(name: str, matrix: Any) -> None:
    QUIET[name](matrix)
    assert forced() == []
    assert "pending" in repr(matrix)
    assert koila.metrics.counter_value("runs") == 0


@pytest.mark.semantics("S1")
def test_sizes_are_plain_ints(matrix: Any) -> None:
    assert [type(size) for size in matrix.shape] == [int, int]
    assert matrix.view(matrix.shape[0] * matrix.shape[1]).shape == (6,)


FORCING: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "item": (lambda t: t.item(), 3.0),
    "bool": (bool, True),
    "int": (int, 3),
    "float": (float, 3.0),
    "str": (str, "tensor(3.)"),
    "format": (lambda t: f"{t:.1f}", "3.0"),
    "tolist": (lambda t: t.tolist(), 3.0),
    "numpy": (lambda t: float(t.numpy()), 3.0),
    "pickle": (lambda t: pickle.loads(pickle.dumps(t)).item(), 3.0),
    "deepcopy": (lambda t: copy.deepcopy(t).item(), 3.0),
    "data_ptr": (lambda t: t.data_ptr() > 0, True),
    "dlpack": (lambda t: torch.from_dlpack(t).item(), 3.0),
    "run": (lambda t: t.run().item(), 3.0),
    "koila.run": (lambda t: koila.run(t).item(), 3.0),
}


@pytest.mark.semantics("S1")
@pytest.mark.parametrize("name", FORCING)
def test_these_force_once(name: str, scalar: Any) -> None:
    function, expected = FORCING[name]
    assert function(scalar) == expected
    assert koila.metrics.counter_value("runs") == 1
    assert "ready" in repr(scalar)
    assert function(scalar) == expected
    assert koila.metrics.counter_value("runs") == 1, "the second time it is there"


@pytest.mark.semantics("S1")
def test_forced_values_name_the_line(scalar: Any) -> None:
    scalar.item()
    (site,) = koila.metrics.counter_sites("forced::item")
    assert "test_forcing.py:" in site


@pytest.mark.semantics("S7")
def test_torch_save_writes_a_real_tensor(scalar: Any) -> None:
    file = io.BytesIO()
    torch.save(scalar, file)
    file.seek(0)
    assert torch.load(file).item() == 3.0


@pytest.mark.semantics("S7")
def test_numpy_conversion(matrix: Any) -> None:
    numpy = pytest.importorskip("numpy")
    assert numpy.asarray(matrix).sum() == 30.0


@pytest.mark.semantics("S8")
@pytest.mark.parametrize(
    "function",
    [
        lambda t: t.nonzero(),
        lambda t: t[t > 4],
        lambda t: t.unique(),
        lambda t: torch.masked_select(t, t > 4),
    ],
)
def test_data_dependent_shapes_force_their_operands_and_go_on(function: Callable[[Any], Any], matrix: Any) -> None:
    found = function(matrix)
    assert isinstance(found, koila.LazyTensor)
    assert torch.equal(koila.run(found + 0), function(torch.arange(6.0).view(3, 2) * 2) + 0)
    assert forced() != []


@pytest.mark.semantics("S8")
def test_a_lazy_condition_is_decided(matrix: Any) -> None:
    assert (matrix > 3).any()
    assert forced() == ["forced::__bool__"]


@pytest.mark.semantics("S1")
def test_a_print_shows_the_numbers(matrix: Any, capsys: pytest.CaptureFixture[str]) -> None:
    print(matrix.sum())
    assert capsys.readouterr().out == "tensor(30.)\n"
