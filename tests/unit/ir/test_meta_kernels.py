"""What is said about an operator without asking PyTorch is what PyTorch says, and what real tensors show."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from koila._torch import OpOverload
from koila.ir.meta_kernels import KERNELS, known_result
from koila.ir.tree import map_leaves

aten = torch.ops.aten
SHAPES = ((6, 5), (4, 1), (1, 7), (3, 4, 5), (2, 1, 6), (1, 1, 3), (2, 3, 4, 5))


def _calls(func: OpOverload, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Arguments of an operator, on real tensors."""
    for shape in SHAPES:
        x = torch.rand(shape, dtype=dtype)
        weight = torch.rand(shape[-1:], dtype=dtype)
        if func is aten.addmm.default:
            if x.ndim != 2:
                continue
            other = torch.rand(shape[-1], 3, dtype=dtype)
            for bias in (torch.rand(3, dtype=dtype), torch.rand(shape[0], 3, dtype=dtype)):
                yield from ((bias, first, other) for first in (x, x.t().contiguous().t()))
        elif func is aten.native_layer_norm.default:
            yield from ((x, list(shape[-1:]), scale, scale, 1e-5) for scale in (weight, None))
            yield x, list(shape), None, None, 1e-5
        elif func is aten.native_layer_norm_backward.default:
            _, mean, rstd = aten.native_layer_norm(x, shape[-1:], weight, weight, 1e-5)
            for wanted in ([True, True, True], [False, True, False]):
                yield x, x, list(shape[-1:]), mean, rstd, weight, weight, wanted
        elif func in (aten._log_softmax.default, aten._safe_softmax.default):
            yield from ((x, dim, *([False] if func is aten._log_softmax.default else [])) for dim in (0, -1))
        elif func in (aten._log_softmax_backward_data.default, aten._softmax_backward_data.default):
            yield x, x, -1, dtype
        elif func is aten.nll_loss_forward.default:
            yield from ((x, torch.zeros(shape[0], dtype=torch.int64), None, how, -100) for how in (1, 2) if x.ndim == 2)
        elif func is aten.native_batch_norm.default:
            scale = torch.rand(shape[1], dtype=dtype)
            if x.numel() > shape[1]:
                yield x, scale, scale, scale.clone(), scale.clone(), True, 0.1, 1e-5
                yield x, None, None, None, None, True, 0.1, 1e-5
        else:
            assert func is aten.native_dropout.default, f"{func} has no samples here"
            yield x, 0.5, True


def _meta(value: Any) -> Any:
    made = lambda leaf: torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")  # noqa: E731
    return map_leaves(value, lambda leaf: made(leaf) if isinstance(leaf, torch.Tensor) else leaf)


def _layout(value: Any) -> Any:
    said = lambda leaf: (tuple(leaf.shape), leaf.stride(), leaf.dtype)  # noqa: E731
    return map_leaves(value, lambda leaf: said(leaf) if isinstance(leaf, torch.Tensor) else leaf)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("func", KERNELS, ids=str)
def test_an_operator_gives_what_pytorch_gives(func: OpOverload, dtype: torch.dtype) -> None:
    answered = 0
    for args in _calls(func, dtype):
        said = known_result(func, _meta(args), {})
        if said is not None:
            answered += 1
            assert _layout(said) == _layout(func(*_meta(args))) == _layout(func(*args)), _layout(args)
    assert (answered > 0) == (dtype != torch.bfloat16)


POINTWISE = (
    (aten.add.Tensor, 2), (aten.mul.Tensor, 2), (aten.gelu.default, 1), (aten.atan2.default, 2),
    (aten.relu.default, 1), (aten.tanh.default, 1), (aten.lt.Tensor, 2), (aten.isnan.default, 1),
    (aten.pow.Tensor_Tensor, 2), (aten.sigmoid_backward.default, 2),
)  # fmt: skip


@pytest.mark.parametrize(("func", "num_operands"), POINTWISE, ids=lambda each: str(each))
def test_a_pointwise_operator_gives_what_pytorch_gives(func: OpOverload, num_operands: int) -> None:
    answered = 0
    for shape in (*SHAPES, ()):
        others = [torch.rand(other) for other in (shape, shape[1:], shape[-1:], (), (1, *shape))]
        others += [torch.rand(shape[::-1]).permute(tuple(range(len(shape)))[::-1]), torch.rand(shape).double()]
        for other in others if num_operands == 2 else [None]:
            args = (torch.rand(shape),) if other is None else (torch.rand(shape), other)
            said = known_result(func, _meta(args), {})
            if said is not None:
                answered += 1
                assert _layout(said) == _layout(func(*_meta(args))) == _layout(func(*args)), _layout(args)
    assert answered > len(SHAPES)


@pytest.mark.parametrize("number", [2, 2.0, True])
def test_a_pointwise_operator_with_a_number(number: Any) -> None:
    for func in (aten.mul.Tensor, aten.pow.Tensor_Scalar, aten.gt.Scalar):
        for shape in SHAPES:
            args = (torch.rand(shape), number)
            assert _layout(known_result(func, _meta(args), {})) == _layout(func(*args))


def test_wrong_shapes_are_for_pytorch() -> None:
    wide, narrow = torch.empty(4, 3, device="meta"), torch.empty(2, 5, device="meta")
    assert known_result(aten.addmm.default, (wide, wide, narrow), {}) is None
    assert known_result(aten.add.Tensor, (wide, narrow), {}) is None
    assert known_result(aten.native_layer_norm.default, (wide, [4], None, None, 1e-5), {}) is None
    assert known_result(aten._log_softmax.default, (wide, 2, False), {}) is None
