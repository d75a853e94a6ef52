"""Recorded results lie in memory as eager's do, whatever the layout of the operands is.

`KOILA_NIGHTLY=1` asks all of PyTorch's operators, else those whose fake kernels say otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.common_methods_invocations import op_db

import koila
from koila.ir.tree import leaves, map_leaves

WRONG_FAKES = {
    "copysign", "div", "floor_divide", "native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update",
    "nn.functional.pad", "nn.functional.max_unpool2d", "nn.functional.batch_norm", "nn.functional.channel_shuffle",
    "nn.functional.binary_cross_entropy", "xlogy", "special.xlog1py", "native_dropout_backward", "logaddexp",
    "heaviside", "logical_and", "logical_or", "logical_xor", "nn.functional.max_pool1d",
}  # fmt: skip
ALL = bool(os.environ.get("KOILA_NIGHTLY"))
UNDEFINED = ("empty", "new_empty", "sparse")
"""Operators whose results are no numbers, or have no strides."""
OPERATORS = [
    op
    for op in op_db
    if torch.float64 in op.dtypes and (ALL or op.name in WRONG_FAKES) and not op.name.startswith(UNDEFINED)
]


def _swapped(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, -1).contiguous().transpose(0, -1) if x.ndim > 1 else x


def _last_swapped(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(-1, -2).contiguous().transpose(-1, -2) if x.ndim > 1 else x


def _channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x


def _expanded(x: torch.Tensor) -> torch.Tensor:
    return x[:1].expand(x.shape) if x.ndim and len(x) else x


def _spread(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, x], -1)[..., 0] if x.ndim else x


LAYOUTS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "swapped": (_swapped, False), "all swapped": (_swapped, True), "channels last": (_channels_last, False),
    "expanded": (_expanded, False), "spread": (_spread, False), "last swapped": (_last_swapped, False),
}  # fmt: skip
"""What is done to the first operand, and whether to all of them."""


def _strides(tree: Any) -> list[tuple[int, ...]]:
    """Of each tensor with elements, the strides of dimensions that have more than one."""
    tensors = [leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.numel()]
    return [tuple(s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1) for t in tensors]


@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.formatted_name)
@pytest.mark.filterwarnings("ignore")
def test_results_have_the_strides_of_eager(op: Any) -> None:
    compared = 0
    for sample in list(op.sample_inputs("cpu", torch.float64))[:10]:
        for name, (change, everywhere) in LAYOUTS.items():
            changed = lambda leaf: change(leaf) if isinstance(leaf, torch.Tensor) else leaf  # noqa: B023, E731
            first = map_leaves(sample.input, changed)
            others = map_leaves(sample.args, changed) if everywhere else sample.args
            lazy = map_leaves(first, lambda leaf: koila.lazy(leaf) if isinstance(leaf, torch.Tensor) else leaf)
            try:
                torch.manual_seed(0)
                wanted = op.op(first, *others, **sample.kwargs)
            except Exception:
                continue
            torch.manual_seed(0)
            assert _strides(op.op(lazy, *others, **sample.kwargs)) == _strides(wanted), (name, sample)
            compared += 1
    assert compared


@pytest.mark.semantics("S19")
@pytest.mark.parametrize("size", [None, 1, 2])
def test_random_numbers_after_a_norm_of_a_transposed_input(size: int | None) -> None:
    """They are drawn in the order of memory; a BatchNorm gives a contiguous result, whatever it is given."""

    def run(lazy: Callable[[torch.Tensor], Any]) -> tuple[Any, Any]:
        torch.manual_seed(0)
        x, norm = torch.randn(5, 4, 3).double(), torch.nn.BatchNorm1d(3).double()
        dropped = F.dropout(norm(lazy(x).transpose(1, 2)), 0.3)
        dropped.square().sum().backward()
        return dropped.tolist(), norm.weight.grad

    with koila.budget(chunk_size=size):
        found = run(koila.lazy)
    torch.testing.assert_close(found, run(lambda x: x), rtol=1e-12, atol=1e-12)
