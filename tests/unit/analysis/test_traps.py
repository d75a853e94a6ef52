"""Traps that were met: equal sizes, chunks of one, merges that are not linear, slices that disagree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._ops import OpOverload

from koila.analysis.chunk_rule import ChunkRule
from koila.analysis.monoids import Extreme, Sum
from koila.analysis.rules import rule_for
from koila.analysis.types import WHOLE, Merged, Sliced, SplitType
from tests.unit.analysis.harness import Place, call_of, prove, run

aten = torch.ops.aten
SUM = Merged(Sum())


def real(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def ruled(types: dict[str, SplitType], batch: int, target: OpOverload, *args: Any, **kwargs: Any) -> ChunkRule | None:
    """The ruling, proved."""
    places: dict[Place, SplitType] = {(name, None): kind for name, kind in types.items()}
    return prove(run(target, *args, **kwargs), places, batch)


def test_all_sizes_equal_to_the_batch() -> None:
    value = real(4, 4, 4)
    for dim in range(3):
        ruling = ruled({"self": Sliced(dim)}, 4, aten.transpose.int, value, 0, 1)
        assert ruling is not None and ruling.result == Sliced({0: 1, 1: 0, 2: 2}[dim])
    ruling = ruled({"self": Sliced(1)}, 4, aten.view.default, value, [16, 4])
    assert ruling is not None and ruling.result == Sliced(0, outer=4)


def test_expand_rewrites_its_size_from_the_type() -> None:
    ruling = ruled({"self": Sliced(0)}, 3, aten.expand.default, real(3, 1), [3, 3])
    assert ruling is not None and ruling.sizes == ("size",)


@pytest.mark.parametrize("target", [aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims])
def test_squeeze_keeps_the_batch_of_a_chunk_of_one(target: OpOverload) -> None:
    args = {aten.squeeze.default: (), aten.squeeze.dim: (0,), aten.squeeze.dims: ([0, 1],)}[target]
    ruling = ruled({"self": Sliced(0)}, 3, target, real(3, 1, 2), *args)
    assert ruling is not None and isinstance(ruling.result, Sliced)


def test_granules() -> None:
    ruling = ruled({"self": Sliced(0)}, 8, aten.view.default, real(8, 3), [4, 2, 3])
    assert ruling is not None and ruling.result == Sliced(0, granule=2)
    assert ruled({"self": Sliced(0)}, 7, aten.view.default, real(7, 4), [4, 7]) is None


def test_a_merge_of_another_kind_is_not_kept() -> None:
    assert ruled({"self": Merged(Extreme())}, 3, aten.neg.default, real(3)) is None
    assert ruled({"self": SUM}, 3, aten.neg.default, real(3)) is not None


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        (aten.add.Scalar, (real(3), 1.0)),
        (aten.add.Tensor, (real(3), real(3))),
        (aten.exp.default, (real(3),)),
        (aten.div.Tensor_mode, (real(3), 2.0)),
        (aten.masked_fill.Scalar, (real(3), real(3) > 0, 1.0)),
        (aten.constant_pad_nd.default, (real(3), [1, 1], 1.0)),
        (aten.where.self, (real(3) > 0, real(3), real(3))),
        (aten.relu.default, (real(3),)),
    ],
)
def test_what_is_not_linear_finishes_the_sum(target: OpOverload, arguments: tuple[Any, ...]) -> None:
    kwargs = {"rounding_mode": "floor"} if target is aten.div.Tensor_mode else {}
    assert ruled({"self": SUM}, 3, target, *arguments, **kwargs) is None


def test_a_cast_to_a_narrower_dtype_finishes_the_sum() -> None:
    assert ruled({"self": SUM}, 3, aten._to_copy.default, real(3), dtype=torch.float32) is None
    assert ruled({"self": SUM}, 3, aten._to_copy.default, real(3), dtype=torch.int64) is None
    assert ruled({"self": SUM}, 3, aten._to_copy.default, real(3).float(), dtype=torch.float64) is not None


def test_a_sum_beside_a_slice_is_finished_first() -> None:
    ruling = ruled({"self": Sliced(0), "other": SUM}, 3, aten.mul.Tensor, real(3, 4), real(4))
    assert ruling is not None
    assert ruling.operands == {"self": Sliced(0), "other": WHOLE} and ruling.result == Sliced(0)


def test_slices_that_disagree() -> None:
    assert ruled({"self": Sliced(0), "other": Sliced(1)}, 3, aten.add.Tensor, real(3, 3), real(3, 3)) is None
    ruling = ruled({"self": Sliced(0), "mat2": Sliced(1)}, 4, aten.mm.default, real(4, 3), real(3, 4))
    assert ruling is not None and ruling.operands["mat2"] == WHOLE and ruling.result == Sliced(0)


def test_a_contraction_slices_the_whole_partner() -> None:
    ruling = ruled({"self": Sliced(1)}, 4, aten.mm.default, real(3, 4), real(4, 5))
    assert ruling is not None and ruling.operands["mat2"] == Sliced(0) and ruling.result == SUM


def test_an_embedding_gradient_scaled_by_frequency_runs_whole() -> None:
    args = (real(3, 4), torch.tensor([0, 1, 1]), 5, -1)
    types = {"grad_output": Sliced(0), "indices": Sliced(0)}
    assert ruled(types, 3, aten.embedding_dense_backward.default, *args, True) is None
    assert ruled(types, 3, aten.embedding_dense_backward.default, *args, False) is not None


def test_batches_side_by_side_and_apart_again() -> None:
    whole = torch.cat([real(3, 2), real(3, 2)])
    call = run(aten.cat.default, [whole[:3], whole[3:]])
    ruling = prove(call, {("tensors", 0): Sliced(0), ("tensors", 1): Sliced(0)}, 3)
    assert ruling is not None and ruling.result == Sliced(0, outer=2)
    ruling = ruled({"self": Sliced(0, outer=2)}, 3, aten.slice.Tensor, whole, 0, 3, 6)
    assert ruling is not None and ruling.result == Sliced(0)


def test_a_number_that_varies_is_not_baked_into_a_merge() -> None:
    class Varying(float):
        pass

    call = call_of(run(aten.addmm.default, real(5), real(3, 4), real(4, 5)), {("mat1", None): Sliced(1)}, 4)
    rule = rule_for(aten.addmm.default)
    assert rule is not None and rule(call) is not None
    varying = type(call)(call.target, {**call.arguments, "beta": Varying(0.5)}, call.results, 4)
    assert rule(varying) is None


def test_dropout_inside_attention_runs_whole() -> None:
    query = real(2, 2, 4, 8)
    call = call_of(
        run(aten._scaled_dot_product_flash_attention_for_cpu.default, query, query, query),
        {("query", None): Sliced(0)},
        2,
    )
    rule = rule_for(call.target)
    assert rule is not None and rule(call) is not None
    assert rule(type(call)(call.target, {**call.arguments, "dropout_p": 0.1}, call.results, 2)) is None


def test_zero_sized_dimensions() -> None:
    ruling = ruled({"self": Sliced(0)}, 3, aten.sum.dim_IntList, real(3, 0), [1])
    assert ruling is not None and ruling.result == Sliced(0)
    assert ruled({"self": Sliced(0)}, 3, aten.view.default, real(3, 0), [0]) is None
    assert ruled({"self": Sliced(0)}, 3, aten.mul.Scalar, real(3, 0), 2.0) is not None
