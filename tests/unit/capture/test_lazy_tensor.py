"""LazyTensor's conversions, named after PyTorch's lazy core, and the lookup of implementations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import koila
from koila.ir.node import Value


def pending() -> Any:
    return koila.lazy(torch.arange(4.0)) * 2


def test_to_tensor_gives_the_real_tensor_and_a_detached_copy() -> None:
    weight = torch.ones(4, requires_grad=True)
    lazy = koila.lazy(torch.arange(4.0)) * weight
    real = lazy.to_tensor()
    assert type(real) is torch.Tensor and real.grad_fn is not None
    assert lazy.to_tensor() is real
    copy = lazy.to_tensor(detached=True)
    assert copy.grad_fn is None and copy.data_ptr() != real.data_ptr() and torch.equal(copy, real)


def test_run_binds_the_value_and_can_detach() -> None:
    weight = torch.ones(4, requires_grad=True)
    lazy = koila.lazy(torch.arange(4.0)) * weight
    assert lazy.run() is lazy.run()
    assert lazy.run(detach=True).grad_fn is None
    lazy.run().sum().backward()
    assert torch.equal(weight.grad, torch.arange(4.0))


def test_set_tensor_replaces_the_value() -> None:
    lazy = pending()
    lazy.set_tensor(torch.ones(2, 2))
    assert lazy.shape == (2, 2)
    assert (lazy + 1).sum().item() == 8.0


def test_update_from_tensor_with_and_without_sync() -> None:
    source, synced, shared = torch.zeros(4), pending(), pending()
    synced.update_from_tensor(source, sync=True)
    shared.update_from_tensor(source)
    source.add_(1)
    assert synced.run().tolist() == [0.0] * 4
    assert shared.run().tolist() == [1.0] * 4


def test_update_from_tensor_out_writes_into_the_value_and_its_views() -> None:
    lazy = pending()
    view = lazy[:2]
    lazy.update_from_tensor_out(torch.full((4,), 7.0))
    assert view.run().tolist() == [7.0, 7.0]
    with pytest.raises(koila.CaptureError, match=r"cannot write \[3\] into a lazy tensor of shape \[4\]") as found:
        lazy.update_from_tensor_out(torch.ones(3))
    assert "set_tensor" in str(found.value)


def test_shallow_copy_to_shares_the_value() -> None:
    source, destination = pending(), koila.lazy(torch.zeros(9))
    source.shallow_copy_to(destination)
    assert destination.shape == (4,)
    assert destination.run() is source.run()


def test_size_shape_and_data() -> None:
    lazy = pending()
    assert lazy.size(0) == lazy.size(-1) == 4
    assert isinstance(lazy.data_value(), Value)
    assert lazy.prepass().shape == (4,) and lazy.prepass().dtype is torch.float32
    assert lazy.prepass().num_bytes == 16


@pytest.mark.semantics("S5")
def test_assigning_data_is_refused_with_a_way_out() -> None:
    with pytest.raises(koila.CaptureError, match=r"assigning \.data is not possible on a lazy tensor") as found:
        pending().data = torch.ones(4)
    assert "set_tensor" in str(found.value)


def test_lookup_function_finds_a_handler_or_records() -> None:
    x = koila.lazy(torch.ones(4))
    assert koila.lookup_function(torch.add)(x, 1).run().tolist() == [2.0] * 4
    assert koila.lookup_function(torch.Tensor.item) is not koila.lookup_function(torch.Tensor.tolist)
    assert koila.lookup_function(F.relu)(-x).run().tolist() == [0.0] * 4


def test_lookup_method_finds_by_name() -> None:
    x = koila.lazy(torch.ones(4))
    assert koila.lookup_method("sum")(x).item() == 4.0
    assert koila.lookup_method("item")(x.sum()) == 4.0
    assert koila.lookup_method("size")(x, 0) == 4
    with pytest.raises(AttributeError, match="no_such_method"):
        koila.lookup_method("no_such_method")


def test_lazy_forward_records_a_call() -> None:
    x = koila.lazy(torch.ones(4, 2))
    out = koila.lazy_forward(torch.add, x, 1.0, alpha=2)
    assert isinstance(out, koila.LazyTensor) and koila.graph(out).nodes[-1].func is torch.add
    assert out.run().tolist() == [[3.0, 3.0]] * 4


def test_results_with_several_tensors_keep_their_type() -> None:
    x = koila.lazy(torch.tensor([[3.0, 1.0], [2.0, 5.0]]))
    found = x.max(dim=1)
    assert found.values.tolist() == [3.0, 5.0] and found.indices.tolist() == [0, 1]


def test_the_protocols_hold_for_both_kinds_of_tensor() -> None:
    for tensor in (koila.lazy(torch.ones(2)), koila.eager(torch.ones(2))):
        assert isinstance(tensor, koila.Runnable)
        assert isinstance(tensor, koila.TensorMixin)
        assert isinstance(tensor, koila.RunnableTensor)


def test_batch_info_moves_to_another_dimension() -> None:
    assert koila.BatchInfo(0, 4).map(2) == koila.BatchInfo(2, 4)


@pytest.mark.semantics("S13")
def test_custom_autograd_functions_keep_their_backward() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return 5 * gradient

    weight = torch.ones(3, requires_grad=True)
    Double.apply(koila.lazy(torch.ones(3)) * weight).sum().backward()
    assert weight.grad.tolist() == [5.0] * 3


@pytest.mark.semantics("S12")
def test_hooks_on_lazy_values_are_called_once_with_the_whole_gradient() -> None:
    weight, seen = torch.ones(3, requires_grad=True), []
    for chunk_size in (None, 1):
        with koila.budget(chunk_size=chunk_size):
            h = koila.lazy(torch.ones(4, 3)) * weight
            h.register_hook(lambda gradient: seen.append(gradient.shape))
            assert seen == []
            h.square().sum().backward()
        assert seen == [(4, 3)]
        seen.clear()
