"""Parts that the documents name, as users meet them: conversions, protocols, constructor, events, large results."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import koila
from koila import events


@pytest.mark.parametrize("how", ["set_tensor", "update_from_tensor"])
def test_a_lazy_tensor_may_become_another_lazy_one(how: str) -> None:
    x = koila.lazy(torch.zeros(3))
    getattr(x, how)(koila.lazy(torch.ones(3)) * 2)
    assert "pending" in repr(x), "nothing was run for it"
    assert len(koila.graph(x + 1).nodes) == 2
    with koila.budget(chunk_size=1):
        assert (x * 2).sum().item() == 12.0
    assert type(x.run()) is torch.Tensor and type(koila.run(x)) is torch.Tensor


def test_update_from_a_lazy_tensor_with_sync_copies_now() -> None:
    source = torch.ones(3)
    x, y = koila.lazy(torch.zeros(3)), koila.lazy(source)
    x.update_from_tensor(y, sync=True)
    source.add_(1)
    assert x.run().tolist() == [1.0] * 3


def test_an_eager_tensor_is_taken_as_the_tensor_it_wraps() -> None:
    x = koila.lazy(torch.zeros(3))
    x.set_tensor(koila.eager(torch.ones(3)))
    assert type(x.run()) is torch.Tensor and x.run().tolist() == [1.0] * 3


@pytest.mark.parametrize("how", ["update_from_tensor", "set_tensor"])
def test_batch_and_budget_survive_another_tensor(how: str) -> None:
    weight = torch.randn(256, 256, requires_grad=True)
    x = koila.lazy(torch.randn(512, 256), budget="900KiB")
    getattr(x, how)(torch.randn(512, 256))
    assert x.batch == koila.BatchInfo(0, 512)
    with koila.measure() as measured:
        ((x @ weight).relu() @ weight).square().mean().backward()
    report = measured.reports[-1]
    assert report.how == "split" and report.allowed_bytes == 900 * 1024
    assert report.measured_bytes is not None and report.measured_bytes <= 900 * 1024


def test_a_pending_tensor_that_takes_another_keeps_the_budget_of_its_program() -> None:
    x = koila.lazy(torch.randn(8, 4), budget="1MiB") * 2
    x.set_tensor(torch.randn(8, 4))
    assert koila.graph(x + 1).budgets == [1 << 20]


def test_a_batch_that_the_other_tensor_lacks_is_forgotten() -> None:
    x = koila.lazy(torch.randn(2, 3, 4), batch=2)
    x.set_tensor(torch.randn(3))
    assert x.batch is None


@pytest.mark.semantics("S7")
def test_a_deep_copy_keeps_batch_and_budget() -> None:
    x = copy.deepcopy(koila.lazy(torch.randn(8, 4), budget="1MiB"))
    assert x.batch == koila.BatchInfo(0, 8) and koila.graph(x + 1).budgets == [1 << 20]


def test_a_result_of_a_call_that_ran_eagerly_keeps_the_budget() -> None:
    x = koila.lazy(torch.randn(8, 4), budget="1MiB") * 2
    found = torch.nonzero(x > 0)
    assert koila.metrics.counter_value("eager::nonzero") == 1
    assert koila.graph(found + 1).budgets == [1 << 20]


def test_every_holder_of_a_value_counts() -> None:
    module = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    out = module(koila.lazy(torch.ones(4, 3)))
    expected = module(torch.ones(4, 3))
    other = koila.lazy(torch.zeros(4, 3))
    out.shallow_copy_to(other)
    del other
    out.square().mean().backward()
    optimizer.step()
    assert torch.equal(out.run(), expected)


def test_a_value_is_held_until_its_last_holder_is_gone() -> None:
    source, first, second = koila.lazy(torch.ones(3)) + 1, koila.lazy(torch.ones(1)), koila.lazy(torch.ones(1))
    value = source.data_value()
    source.shallow_copy_to(first)
    source.shallow_copy_to(second)
    del source, first
    assert value.is_held
    second.set_tensor(torch.ones(3))
    assert not value.is_held, "a tensor that became another value no longer holds this one"


@pytest.mark.parametrize("batch", [0, None])
def test_isinstance_never_traces_or_raises(batch: int | None) -> None:
    pending = koila.lazy(torch.ones(3, 2), batch=batch) + 1
    for tensor in (pending, koila.eager(torch.ones(3))):
        assert isinstance(tensor, koila.Runnable)
        assert isinstance(tensor, koila.TensorMixin)
        assert isinstance(tensor, koila.RunnableTensor)
    assert isinstance(torch.ones(3), koila.TensorMixin) and not isinstance(torch.ones(3), koila.Runnable)
    assert not isinstance(3, koila.TensorMixin) and not isinstance("run", koila.Runnable)
    assert koila.metrics.metric_names() == []
    assert pending.batch == (None if batch is None else koila.BatchInfo(0, 3))


def test_a_user_s_own_class_satisfies_a_protocol_by_its_attributes() -> None:
    class Job:
        def __init__(self) -> None:
            self.dtype, self.device, self.shape = torch.float32, torch.device("cpu"), torch.Size([2])

        def dim(self) -> int:
            return 1

        def numel(self) -> int:
            return 2

        def run(self) -> int:
            return 7

    assert isinstance(Job(), koila.Runnable) and isinstance(Job(), koila.TensorMixin)
    assert not isinstance(Job(), koila.RunnableTensor)


def test_the_class_makes_lazy_tensors_as_koila_lazy_does() -> None:
    x = koila.LazyTensor(torch.ones(3, 2))
    assert type(x) is koila.LazyTensor and x.shape == (3, 2) and x.batch == koila.BatchInfo(0, 3)
    assert "ready" in repr(x) and (x + 1).sum().item() == 12.0
    assert koila.LazyTensor(torch.ones(3, 2), batch=-1).batch == koila.BatchInfo(1, 2)
    assert koila.LazyTensor(torch.ones(3, 2), batch=None).batch is None
    assert koila.LazyTensor(torch.ones(())).batch is None
    assert koila.LazyTensor(x) is x
    with pytest.raises(koila.CaptureError, match="LazyTensor takes a tensor, got a list"):
        koila.LazyTensor([1.0])  # type: ignore[arg-type]


def test_what_forces_a_value_is_an_event() -> None:
    seen: list[Any] = []
    unsubscribe = events.subscribe(seen.append)
    try:
        (koila.lazy(torch.ones(3)) + 1).sum().item()
        torch.nonzero(koila.lazy(torch.ones(3)) + 1)
    finally:
        unsubscribe()
    forced = [event for event in seen if isinstance(event, events.Forced)]
    assert [event.why.split(":")[0] for event in forced] == ["item", "not inferable"]
    assert all(event.site is not None and "test_documents.py:" in event.site for event in forced)
    assert koila.metrics.counter_value("forced::item") == 1


def _large(eager: Any) -> dict[str, Any]:
    numbers, image = eager(torch.arange(100)), eager(torch.randn(1, 1, 8, 8))
    return {
        "one_hot": F.one_hot(numbers, 20000),
        "repeat": image.repeat(1, 1, 200, 200),
        "interpolate": F.interpolate(image, scale_factor=200),
        "new_zeros": image.new_zeros(1 << 19),
        "expand": image.expand(10000, 1, 8, 8) + 1,
        "one element": eager(torch.ones(1)).repeat(1 << 20),
        "outer of three": torch.einsum("i,j,k->ijk", *[eager(torch.ones(70)) for _ in range(3)]),
        "size as a list": image.new_full([1, 1 << 19], 2.0),
    }


def test_results_are_foreseen_whose_size_comes_from_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(koila.EagerTensor, "large_bytes", 1 << 20)
    found = _large(koila.eager)
    assert {name: type(tensor).__name__ for name, tensor in found.items()} == dict.fromkeys(found, "LazyTensor")
    small = koila.eager(torch.ones(4))
    assert type(small * 1000.0) is koila.EagerTensor and type(small.repeat(1000)) is koila.EagerTensor


def test_positional_allow_unused() -> None:
    used, unused = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    loss = (koila.lazy(torch.ones(3)) * used).sum()
    found = torch.autograd.grad(loss, (used, unused), None, True, False, True, True)
    assert koila.run(found[0]).tolist() == [1.0] * 3 and found[1] is None
    zeros = torch.autograd.grad(
        (koila.lazy(torch.ones(3)) * used).sum(), (used, unused), None, None, False, True, True, False, True
    )
    assert koila.run(zeros[1]).tolist() == [0.0] * 3
