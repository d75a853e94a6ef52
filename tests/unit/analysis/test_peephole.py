"""The gradient of a cross-entropy, rewritten: eager's numbers, and no tensor of zeros."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

import koila
from koila import events
from koila.analysis.decompositions import decompositions
from koila.analysis.peephole import simplify_losses

aten = torch.ops.aten
REDUCTIONS = ("mean", "sum", "none")


def traced(dtype: torch.dtype, **options: float) -> fx.GraphModule:
    def gradient(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(F.cross_entropy(x, y, **options), [x])[0]

    x, y = torch.randn(5, 7, dtype=dtype), torch.randint(0, 7, (5,))
    return make_fx(gradient, decomposition_table=decompositions(), tracing_mode="fake")(x, y)


def targets(module: fx.GraphModule) -> set[object]:
    return {node.target for node in module.graph.nodes}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_it_is_rewritten(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = traced(dtype)
    x, y = torch.randn(5, 7, dtype=dtype), torch.tensor([0, -100, 6, 3, 3])
    expected = module(x, y)
    simplify_losses(module.graph)
    module.recompile()
    assert aten.scatter_add.default in targets(module)
    assert not {aten._log_softmax_backward_data.default, aten.scatter.src} & targets(module)
    torch.testing.assert_close(module(x, y), expected, rtol=1e-6, atol=1e-9)


def test_half_precision_keeps_the_kernel_that_rounds_once() -> None:
    module = traced(torch.bfloat16)
    simplify_losses(module.graph)
    assert aten._log_softmax_backward_data.default in targets(module)


def test_a_gradient_for_all_classes_keeps_the_kernel() -> None:
    module = traced(torch.float64, label_smoothing=0.1)
    simplify_losses(module.graph)
    assert aten._log_softmax_backward_data.default in targets(module)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", [(7, 5), (7, 5, 4), (7, 5, 2, 3)], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("size", [1, 3, 6])
def test_losses_in_chunks(shape: tuple[int, ...], reduction: str, weighted: bool, size: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64)
    y = torch.randint(0, 5, (shape[0], *shape[2:]))
    y[1] = 2
    weight = torch.rand(5, dtype=torch.float64) if weighted else None
    scale = torch.randn(5, *(1 for _ in shape[2:]), dtype=torch.float64, requires_grad=True)

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x * scale, y, weight, reduction=reduction, ignore_index=2).square().sum()

    (expected,) = torch.autograd.grad(loss(x, y), [scale])
    before = events.counters().get("executed::aten.scatter_add.default", 0)
    with koila.budget(chunk_size=size):
        loss(*koila.lazy(x, y)).backward()
    torch.testing.assert_close(scale.grad, expected)
    rewritten = events.counters().get("executed::aten.scatter_add.default", 0) > before
    assert rewritten == (len(shape) != 3)  # With one more dimension, eager has a view between loss and softmax.


def test_a_loss_in_less_precision_than_its_logits_keeps_the_kernel() -> None:
    def gradient(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(F.cross_entropy(x.float().reshape(5, 7), y), [x])[0]

    for dtype, keeps in ((torch.float64, True), (torch.float32, False), (torch.bfloat16, False)):
        given = torch.randn(35, dtype=dtype), torch.randint(0, 7, (5,))
        module = make_fx(gradient, decomposition_table=decompositions(), tracing_mode="fake")(*given)
        simplify_losses(module.graph)
        assert (aten._log_softmax_backward_data.default in targets(module)) == keeps
