"""`koila.lazy`: structures in, the same structures with lazy tensors out, and one batch size."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

import koila


@dataclass
class Sample:
    image: torch.Tensor
    label: torch.Tensor
    name: str


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def is_lazy(value: Any) -> bool:
    return type(value) is koila.LazyTensor


def test_one_value_in_one_value_out() -> None:
    x = koila.lazy(torch.ones(4, 2))
    assert is_lazy(x) and isinstance(x, torch.Tensor)
    assert isinstance(koila.lazy(torch.ones(4), torch.ones(4)), tuple)


@pytest.mark.parametrize("kind", [list, tuple])
def test_sequences(kind: type) -> None:
    found = koila.lazy(kind([torch.ones(4), 3, [torch.zeros(4)]]))
    assert type(found) is kind and found[1] == 3
    assert is_lazy(found[0]) and is_lazy(found[2][0])


def test_named_tuples_dataclasses_and_dicts() -> None:
    pair = koila.lazy(Pair(torch.ones(4), torch.ones(4)))
    assert type(pair) is Pair and is_lazy(pair.x)
    sample = koila.lazy(Sample(torch.ones(4, 2), torch.ones(4), "a"))
    assert type(sample) is Sample and is_lazy(sample.label) and sample.name == "a"
    found = koila.lazy(OrderedDict(x=torch.ones(4), n=None))
    assert type(found) is OrderedDict and is_lazy(found["x"]) and found["n"] is None


def test_a_mapping_of_a_library_is_copied_with_lazy_members() -> None:
    class Encoding(UserDict[str, Any]):
        pass

    given = Encoding(ids=torch.ones(4, 2), text="a")
    found = koila.lazy(given)
    assert type(found) is Encoding and is_lazy(found["ids"]) and found["text"] == "a"
    assert type(given["ids"]) is torch.Tensor


def test_a_batch_encoding_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    given = transformers.BatchEncoding({"input_ids": torch.ones(4, 2, dtype=torch.long)})
    found = koila.lazy(given)
    assert type(found) is transformers.BatchEncoding and is_lazy(found["input_ids"]) and is_lazy(found.input_ids)


def test_what_is_no_tensor_or_lazy_already_passes_through() -> None:
    assert koila.lazy("text") == "text"
    assert koila.lazy(None, 3) == (None, 3)
    x = koila.lazy(torch.ones(2))
    assert koila.lazy(x) is x


def test_an_eager_tensor_becomes_lazy() -> None:
    assert koila.lazy(koila.eager(torch.ones(2))).sum().item() == 2.0


def batches(*values: Any, batch: Any) -> list[koila.BatchInfo | None]:
    found = koila.lazy(*values, batch=batch)
    return [tensor.batch for tensor in (found if isinstance(found, tuple) else (found,))]


def test_batch_as_an_int_a_negative_int_and_none() -> None:
    assert batches(torch.ones(4, 2), torch.ones(4), batch=0) == [koila.BatchInfo(0, 4), koila.BatchInfo(0, 4)]
    assert batches(torch.ones(2, 4), torch.ones(4), batch=-1) == [koila.BatchInfo(1, 4), koila.BatchInfo(0, 4)]
    assert batches(torch.ones(4, 2), torch.ones(3), batch=None) == [None, None]


def test_a_tensor_without_the_dimension_is_lazy_without_a_batch() -> None:
    assert batches(torch.tensor(2.0), torch.ones(4, 2), batch=0) == [None, koila.BatchInfo(0, 4)]
    assert batches(torch.ones(3, 4), torch.ones(7), batch=1) == [koila.BatchInfo(1, 4), None]


def test_batch_as_a_prefix() -> None:
    assert batches(torch.ones(4, 2), torch.ones(3), batch=(0, None)) == [koila.BatchInfo(0, 4), None]
    found = koila.lazy(
        {"x": torch.ones(2, 4), "labels": torch.ones(4), "table": torch.ones(9)}, batch={"x": 1, "labels": 0}
    )
    assert found["x"].batch == koila.BatchInfo(1, 4) and found["labels"].batch == koila.BatchInfo(0, 4)
    assert is_lazy(found["table"]) and found["table"].batch is None
    nested = koila.lazy((torch.ones(4), {"a": torch.ones(2, 4)}), batch=(0, {"a": 1}))
    assert nested[1]["a"].batch == koila.BatchInfo(1, 4)


def test_different_batch_sizes_are_refused_with_both_shapes_and_the_prefix() -> None:
    with pytest.raises(
        koila.CaptureError, match=r"batch sizes differ: \[4, 2\] has 4 samples, \[3\] has 3 in dim 0"
    ) as found:
        koila.lazy(torch.ones(4, 2), torch.ones(3))
    assert "batch=(0, None)" in str(found.value)
    assert "test_lazy.py" in str(found.value)


@pytest.mark.parametrize("batch", [True, 0.5, "first"])
def test_a_batch_that_is_no_dimension_is_refused(batch: Any) -> None:
    with pytest.raises(koila.CaptureError, match="batch must be an int, None, or a structure of them"):
        koila.lazy(torch.ones(2), batch=batch)


def test_a_prefix_that_is_too_short_is_refused() -> None:
    with pytest.raises(koila.CaptureError, match=r"batch=\(0,\) has no entry for member 1"):
        koila.lazy(torch.ones(2), torch.ones(2), batch=(0,))


def test_a_budget_that_cannot_be_met_is_refused_before_anything_runs() -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    loss = (koila.lazy(torch.ones(4, 2), budget=8) @ weight).square().sum()
    with pytest.raises(koila.BudgetError, match="at the smallest, allowed 8") as found:
        loss.backward()
    assert isinstance(found.value, MemoryError)
    assert found.value.needed_bytes > found.value.allowed_bytes == 8
    assert weight.grad is None


def test_the_batch_is_followed_through_the_program() -> None:
    x = koila.lazy(torch.ones(4, 6))
    assert x.t().batch == koila.BatchInfo(1, 4)
    assert x.sum().batch is None
    assert (x.view(4, 2, 3).transpose(0, 2) + 1).batch == koila.BatchInfo(2, 4)


def test_methods_that_write_in_place_are_recorded() -> None:
    """They are PyTorch's own, although koila watches them."""
    value = koila.lazy(torch.ones(3)) * 2
    value.mul_(2).add_(1)
    value[0] = 0
    assert not any(name.startswith("eager") for name in koila.metrics.counter_names())
    assert value.tolist() == [0, 5, 5]
