"""A call that shows neither results nor writes on fake tensors is never dropped: it is made at once, and counted."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
import torch
from torch.overrides import handle_torch_function, has_torch_function

import koila

ENTRIES: list[list[float]] = []


def log(x: torch.Tensor) -> None:
    """A library's function: overridable, called for what it does."""
    if has_torch_function((x,)):
        return handle_torch_function(log, (x,), x)
    if not isinstance(x, torch._subclasses.FakeTensor):
        ENTRIES.append(x.tolist())


def double_behind_the_back(x: torch.Tensor) -> None:
    """Writes as collectives and C++ extensions do: nothing that PyTorch counts."""
    if has_torch_function((x,)):
        return handle_torch_function(double_behind_the_back, (x,), x)
    if not isinstance(x, torch._subclasses.FakeTensor):
        x.numpy()[:] *= 2


def is_large(x: torch.Tensor) -> bool:
    if has_torch_function((x,)):
        return handle_torch_function(is_large, (x,), x)
    return isinstance(x, torch._subclasses.FakeTensor) or bool(x.sum() > 100)


def test_a_function_without_results_is_called_each_time() -> None:
    ENTRIES.clear()
    x = koila.lazy(torch.arange(3.0))
    for step in range(3):
        log(x + step)
    assert ENTRIES == [[0, 1, 2], [1, 2, 3], [2, 3, 4]]
    assert koila.metrics.counter_value("eager::log") == 3


@pytest.mark.parametrize("chunk_size", [None, 1, 2])
def test_an_unseen_write_comes_after_pending_reads(chunk_size: int | None) -> None:
    with koila.budget(chunk_size=chunk_size):
        x = koila.lazy(torch.arange(3.0))
        y = x + 1
        before, row = (x * 10, y * 10), y[1:]
        for tensor in (x, y):
            double_behind_the_back(tensor)
        assert [v.tolist() for v in (*before, x, y, row)] == [[0, 10, 20], [10, 20, 30], [0, 2, 4], [2, 4, 6], [4, 6]]
    assert koila.metrics.counter_value("eager_because::a function that is not PyTorch's own") == 2


def test_a_users_question_is_answered_by_data() -> None:
    assert not is_large(koila.lazy(torch.arange(3.0)) * 2)


def test_an_operator_without_results() -> None:
    seen: list[Any] = []
    name = f"koila_test::log_{uuid.uuid4().hex}"

    @torch.library.custom_op(name, mutates_args=())
    def operator(x: torch.Tensor) -> None:
        seen.append(x.tolist())

    operator.register_fake(lambda x: None)
    x = koila.lazy(torch.arange(3.0)) * 2
    operator(x)
    operator(x)
    assert seen == [[0, 2, 4], [0, 2, 4]]


def test_an_assertion_is_not_forgotten() -> None:
    with pytest.raises(RuntimeError, match="all of them"):
        torch._assert_async((koila.lazy(torch.arange(3.0)) > 0).all(), "all of them")


def test_questions_about_the_layout_need_no_data() -> None:
    x, y = koila.lazy(torch.arange(3.0), torch.arange(3))
    z = x * 2
    assert torch.is_same_size(z, y) and torch.result_type(z, y) is torch.float32
    assert z.type() == "torch.FloatTensor" and z._base is None and not z.is_conj()
    assert "pending" in repr(z) and koila.metrics.counter_value("runs") == 0
