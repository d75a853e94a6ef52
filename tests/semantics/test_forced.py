"""S1: a value is computed exactly where data is asked for; `repr` shows it once it is there, and computes nothing."""

from __future__ import annotations

import copy
import io
import operator
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import koila
from tests.semantics.compare import chunked

pytestmark = pytest.mark.semantics("S1")

FORCED: dict[str, Callable[[Any], Any]] = {
    "item": lambda t: t.sum().item(),
    "bool": lambda t: bool(t.sum()),
    "not": lambda t: not t.sum(),
    "if": lambda t: 1 if t.sum() > 0 else 2,
    "and": lambda t: t.sum() and 1,
    "int": lambda t: int(t.sum()),
    "float": lambda t: float(t.sum()),
    "complex": lambda t: complex(t.sum()),
    "index": lambda t: [10, 20, 30][t.long().amin()],
    "range": lambda t: len(range(t.long().amax())),
    "round": lambda t: round(t.sum().item()),
    "str": str,
    "print": lambda t: print(t, file=io.StringIO()),
    "format": lambda t: f"{t.sum():.2f}",
    "percent": lambda t: "%.2f" % t.sum(),  # noqa: UP031
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy().sum(),
    "asarray": lambda t: np.asarray(t).sum(),
    "pickle": lambda t: pickle.loads(pickle.dumps(t)).shape,
    "save": lambda t: torch.save(t, io.BytesIO()),
    "deepcopy": lambda t: copy.deepcopy(t).shape,
    "data_ptr": lambda t: t.data_ptr() > 0,
    "in": lambda t: 2.0 in t,
    "equal": lambda t: torch.equal(t, t),
    "allclose": lambda t: torch.allclose(t, t + 1),
    "nonzero": lambda t: t.nonzero().shape,
    "mask": lambda t: t[t > 1].shape,
    "unique": lambda t: t.unique().shape,
    "masked_select": lambda t: t.masked_select(t > 1).shape,
    "repeat_interleave": lambda t: torch.repeat_interleave(t[0], t[0].long()).shape,
    "bincount": lambda t: torch.bincount(t.flatten().long()).shape,
    "run": lambda t: t.run().shape,
    "koila.run": lambda t: koila.run([t])[0].shape,
    "settle": lambda t: koila.settle(),
}

QUIET: dict[str, Callable[[Any], Any]] = {
    "repr": repr,
    "html": lambda t: t._repr_html_(),
    "shape": lambda t: (t.shape, t.size(), t.size(-1), t.numel(), t.nelement(), t.ndim, t.dim(), len(t)),
    "stride": lambda t: (t.stride(), t.storage_offset(), t.is_contiguous()),
    "dtype": lambda t: (t.dtype, t.element_size(), t.itemsize, t.nbytes, t.is_floating_point(), t.is_complex()),
    "device": lambda t: (t.device, t.is_cuda, t.is_cpu, t.get_device(), t.layout, t.is_sparse, t.is_quantized),
    "autograd": lambda t: (t.requires_grad, t.is_leaf, t.grad),
    "isinstance": lambda t: (isinstance(t, torch.Tensor), torch.is_tensor(t), type(t)),
    "hash": lambda t: ({t: 1}, t in {t}),
    "identity": lambda t: (t is t, id(t)),
    "copy": lambda t: copy.copy([t]),
    "operators": lambda t: (t + 1, 1 - t, t @ t.T, -t, abs(t), t**2, t // 2, t % 2, t > 1, t == t, ~(t > 1), t / 3),
    "methods": lambda t: (t.sum(), t.mean(0), t.softmax(-1), t.sort().values, t.topk(1).indices, t.view(-1), t.T),
    "functions": lambda t: (
        torch.stack([t, t]),
        torch.cat([t, t]),
        torch.where(t > 1, t, 0.0),
        torch.einsum("ij->ji", t),
    ),
    "indexing": lambda t: (t[0], t[-1, :1], t[..., None], t[[0, 1]], t[:, torch.tensor([0])], t[1:][::2]),
    "unpacking": lambda t: [*t],
    "casts": lambda t: (t.long(), t.half(), t.to(torch.float64), t.cpu(), t.type(torch.int32), t.bool()),
    "detach": lambda t: (t.detach(), t.clone(), t.contiguous()),
    "in place": lambda t: (t + 0).mul_(2).add_(1),
    "no_grad": torch.no_grad()(lambda t: t * 2),
}


def pending() -> Any:
    value = koila.lazy(torch.arange(6.0).view(3, 2) + 1) * 2
    koila.metrics.reset()
    return value


def runs() -> int:
    return koila.metrics.counter_value("runs")


@pytest.mark.parametrize(
    "chunk_size", [pytest.param(None, marks=pytest.mark.asks_laziness("it counts runs of what is pending")), 2]
)
@pytest.mark.parametrize("name", FORCED)
def test_data_that_is_asked_for_is_computed_once(name: str, chunk_size: int | None) -> None:
    with chunked(chunk_size):
        value = pending()
        FORCED[name](value)
        assert runs() > 0, "it was computed"


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("name", FORCED)
def test_data_that_is_asked_for_is_eagers(name: str, chunk_size: int | None) -> None:
    eager = torch.arange(6.0).view(3, 2).add(1).mul(2)
    expected = torch.Size([3, 2]) if "run" in name else FORCED[name](eager)
    with chunked(chunk_size):
        found = FORCED[name](pending())
        assert not isinstance(found, koila.LazyTensor) or name == "and"
        assert repr(found) == repr(expected)


@pytest.mark.asks_laziness("it asks whether the value is pending still")
@pytest.mark.parametrize("name", QUIET)
def test_what_needs_no_data_computes_nothing(name: str) -> None:
    value = pending()
    QUIET[name](value)
    assert runs() == 0
    assert [each for each in koila.metrics.counter_names() if each.startswith("forced::")] == []
    assert repr(value).endswith("pending)")


OWN = ("repr", "html", "isinstance", "hash", "identity", "copy")
"""What says something about the object itself."""


@pytest.mark.parametrize("name", [name for name in QUIET if name not in OWN])
def test_what_needs_no_data_is_said_as_eager_says_it(name: str) -> None:
    eager = QUIET[name](torch.arange(6.0).view(3, 2).add(1).mul(2))
    found = koila.run(QUIET[name](pending()))
    for mine, theirs in zip(*((t if isinstance(t, (tuple, list)) else (t,)) for t in (found, eager)), strict=True):
        assert torch.equal(mine, theirs) if isinstance(theirs, torch.Tensor) else mine == theirs


@pytest.mark.asks_laziness("it shows a value that is pending")
def test_repr_shows_the_value_once_it_is_there() -> None:
    value = pending()
    assert repr(value) == "LazyTensor([3, 2], dtype=torch.float32, device=cpu, pending)"
    koila.run(value)
    assert repr(value) == (
        "LazyTensor(tensor([[ 2.,  4.],\n                   [ 6.,  8.],\n                   [10., 12.]]), ready)"
    )


@pytest.mark.asks_laziness("it shows a value that is pending")
def test_repr_of_a_value_with_a_gradient_or_a_pending_write() -> None:
    weight = torch.ones(2, requires_grad=True)
    value = koila.lazy(torch.ones(2)) * weight
    assert repr(value) == "LazyTensor([2], dtype=torch.float32, device=cpu, requires_grad=True, pending)"
    value.run()
    assert repr(value).startswith("LazyTensor(tensor([1., 1.], grad_fn=<") and repr(value).endswith(">), ready)")
    module = torch.nn.BatchNorm1d(2)
    statistics = koila.lazy(module.running_mean)
    module(koila.lazy(torch.ones(3, 2)))
    koila.metrics.reset()
    repr(statistics)
    assert runs() == 0


@pytest.mark.asks_laziness("it shows a value that is pending")
def test_a_notebook_shows_what_repr_shows() -> None:
    value = koila.lazy(torch.ones(2)) > 0
    assert value._repr_html_() == "<pre>LazyTensor([2], dtype=torch.bool, device=cpu, pending)</pre>"
    value.run()
    assert value._repr_html_() == "<pre>LazyTensor(tensor([True, True]), ready)</pre>"
    escaped = koila.lazy(torch.ones(2, requires_grad=True)) * 2
    escaped.run()
    assert "&lt;" in escaped._repr_html_() and "<M" not in escaped._repr_html_()


@pytest.mark.asks_laziness("it counts runs of what is pending")
def test_two_questions_are_one_run() -> None:
    value = pending()
    total = value.sum()
    assert (operator.index(total.long()), total.item(), float(total)) == (42, 42.0, 42.0)
    assert runs() == 1, "what is held beside it is computed with it"
