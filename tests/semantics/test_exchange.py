"""S7: NumPy, DLPack, pickle, save and load, deepcopy, pinned and shared memory of lazy tensors."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import koila
from tests.semantics import script

pytestmark = pytest.mark.semantics("S7")
BUDGETS: list[dict[str, Any]] = [{}, {"chunk_size": 2}, {"allowed": "1MiB"}]


def data() -> torch.Tensor:
    return torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def saved_and_loaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


EXCHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "numpy": lambda t: t.numpy(),
    "numpy with force": lambda t: t.numpy(force=True),
    "asarray": numpy.asarray,
    "astype": lambda t: numpy.asarray(t).astype(numpy.float32),
    "ufunc": lambda t: numpy.exp(t.numpy()),
    "from_dlpack": torch.from_dlpack,
    "numpy.from_dlpack": numpy.from_dlpack,
    "to_dlpack": lambda t: torch.from_dlpack(torch.utils.dlpack.to_dlpack(t)),
    "torch.to_dlpack": lambda t: torch.from_dlpack(torch.to_dlpack(t)),
    "__dlpack__": lambda t: torch.from_dlpack(t.__dlpack__()),
    "__dlpack__ with a version": lambda t: torch.from_dlpack(t.__dlpack__(max_version=(1, 0))),
    "__dlpack_device__": lambda t: int(t.__dlpack_device__()[0]),
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "pickle in a list": lambda t: pickle.loads(pickle.dumps([t, {"a": t}]))[1]["a"],
    "save and load": saved_and_loaded,
    "save and load a state": lambda t: saved_and_loaded({"value": t, "number": 3})["value"],
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "deepcopy in a module": lambda t: copy.deepcopy(nn.ParameterDict({"w": nn.Parameter(koila.run(t))}))["w"],
    "clone": lambda t: t.clone(),
    "storage": lambda t: list(t.untyped_storage())[:16],
    "tolist": lambda t: t.tolist(),
    "bytes": lambda t: t.numpy().tobytes(),
    "share_memory_": lambda t: t.share_memory_(),
    "is_shared": lambda t: t.is_shared(),
    "is_pinned": lambda t: t.is_pinned(),
    "buffer protocol": lambda t: bytes(memoryview(t.numpy())),
    "default_collate": lambda t: torch.utils.data.default_collate([t, t + 1]),
    "shares memory with NumPy": lambda t: (t.numpy().fill(2.0), t + 1)[1],
}


def plain(value: Any) -> Any:
    value = koila.run(value)
    if isinstance(value, numpy.ndarray):
        return value.dtype, value.tolist()
    return (value.dtype, value.tolist()) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", EXCHANGES)
def test_equal_to_eager(name: str, budget: dict[str, Any]) -> None:
    expected = plain(EXCHANGES[name](data() * 2))
    with koila.budget(**budget):
        found = plain(EXCHANGES[name](koila.lazy(data()) * 2))
        again = plain(EXCHANGES[name](koila.lazy(data().clone()) * 2))
    assert found == again == expected


def test_values_that_need_a_gradient_are_refused_with_eagers_words() -> None:
    weight = torch.ones(4, dtype=torch.float64, requires_grad=True)
    value = koila.lazy(data()) * weight
    for read in (lambda t: t.numpy(), numpy.asarray):
        with pytest.raises(RuntimeError, match="Can't call numpy"):
            read(value)
    with pytest.raises(BufferError, match="Can't export tensors that require gradient"):
        torch.from_dlpack(value)


@pytest.mark.asks_laziness("the copy is lazy; that of a value which is there is a plain tensor")
def test_a_deep_copy_is_lazy() -> None:
    assert isinstance(copy.deepcopy(koila.lazy(data())), koila.LazyTensor)


def test_a_deep_copy_is_apart() -> None:
    x = koila.lazy(data().clone())
    twin = copy.deepcopy(x)
    x.add_(1.0)
    assert torch.equal(koila.run(twin), data()) and torch.equal(koila.run(x), data() + 1)


def test_a_model_is_copied_while_values_on_it_are_pending() -> None:
    model = nn.Linear(4, 2).double()
    expected = model(data()).detach()
    found = model(koila.lazy(data()))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.weight.zero_()
    torch.testing.assert_close(found.run().detach(), expected)


def test_code_in_c_that_asks_for_the_data_gets_an_error_and_no_crash() -> None:
    """`to_dlpack` imported before koila, or an extension: the wrapper has no data, and says so."""
    done = script.run(
        """
        from torch._C import _to_dlpack
        import torch, koila
        x = koila.lazy(torch.ones(7, 3)) * 2
        try:
            _to_dlpack(x)
        except RuntimeError as error:
            print(str(error)[:26])
        """
    )
    assert done == "Cannot access data pointer"
