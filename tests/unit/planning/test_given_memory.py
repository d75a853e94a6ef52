"""Results in given memory: the same bits as in memory of their own, whatever the memory held before."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode

from koila.planning.forms import Form
from koila.planning.given_memory import _WRITTEN_HERE, can_fill, filler_of, needs_own_operands
from koila.planning.operation import Operation, OperatorWork, Ref
from koila.planning.step import Kind, Step

aten = torch.ops.aten
NUM_SAMPLES = 4
OPERATORS = {
    operator.full_name: operator
    for operator in op_db
    if torch.float32 in operator.dtypes and not operator.name.startswith("jiterator")
}


class Comparing(TorchDispatchMode):
    """Runs every call that can write into given memory a second time, into memory in which every bit is set."""

    def __init__(self) -> None:
        super().__init__()
        self.compared: Counter[Any] = Counter()
        self.differing: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        filler = filler_of(func)
        if filler is None or not self._is_plain(result):
            return result
        form = Form.of(result)
        memory = torch.full((form.num_bytes,), 255, dtype=torch.uint8)
        given = memory.view(form.dtype).as_strided(form.shape, form.stride)
        there = filler.target(*args, **(kwargs or {}), **{filler.out: given})
        self.compared[func] += 1
        stays = memory.untyped_storage().nbytes() == form.num_bytes and there.data_ptr() == memory.data_ptr()
        if not stays or Form.of(there) != form or not same_bits(there, result):
            self.differing.append(f"{func} {form}")
        return result

    @staticmethod
    def _is_plain(result: Any) -> bool:
        if not isinstance(result, torch.Tensor) or result.layout != torch.strided or result.device.type != "cpu":
            return False
        form = Form.of(result)
        return form.is_dense and not form.is_conj and not form.is_neg and form.num_bytes > 0


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.dtype.is_complex:
        first, second = torch.view_as_real(first), torch.view_as_real(second)
    return torch.equal(first, second) or bool(((first == second) | ((first != first) & (second != second))).all())


@pytest.mark.filterwarnings("ignore")  # The database calls what torch deprecates.
@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_operators_give_the_same_bits(name: str) -> None:
    operator, mode = OPERATORS[name], Comparing()
    samples = operator.sample_inputs("cpu", torch.float32)
    for _, sample in zip(range(NUM_SAMPLES), samples, strict=False):
        with torch.no_grad(), mode:
            operator(sample.input, *sample.args, **sample.kwargs)
    assert not mode.differing


X = torch.arange(24.0).view(2, 3, 4)
WRITTEN_HERE: dict[Any, tuple[Any, ...]] = {
    aten.clone.default: (X.transpose(0, 1),),
    aten._to_copy.default: (X,),
    aten.select_backward.default: (X, [2, 5, 3, 4], 1, -2),
    aten.slice_backward.default: (X, [2, 9, 4], 1, 1, 7, 2),
    aten.embedding.default: (X[0], torch.tensor([[2, 0], [1, 1], [0, 0]])),
    aten.masked_fill.Scalar: (X[:, :1], X > 7, -1.0),
    aten.masked_fill.Tensor: (X, X[0] > 7, torch.tensor(2.0)),
    aten.full.default: ([2, 3], 1.5),
    aten.full_like.default: (X, 2),
    aten.zeros.default: ([4, 5],),
    aten.zeros_like.default: (X,),
    aten.new_zeros.default: (X, [3, 3]),
}


@pytest.mark.parametrize("target", _WRITTEN_HERE, ids=str)
def test_what_is_written_here_gives_the_same_bits(target: Any) -> None:
    with Comparing() as mode:
        target(*WRITTEN_HERE[target])
    assert mode.compared[target] == 1 and not mode.differing


def test_casts_are_copies() -> None:
    with Comparing() as mode:
        aten._to_copy.default(X, dtype=torch.bfloat16)
    assert mode.compared[aten._to_copy.default] == 1 and not mode.differing


@pytest.mark.parametrize(
    "target",
    [
        aten.view.default,
        aten.native_layer_norm.default,  # Its `out` form computes and copies.
        aten.convolution.default,
        aten._fft_c2c.default,  # So does this one, although it has a kernel of its own.
        aten.mse_loss.default,  # It would enlarge the memory.
        aten.bernoulli.p,
        aten.add_.Tensor,
        len,
    ],
    ids=str,
)
def test_others_have_memory_of_their_own(target: Any) -> None:
    assert filler_of(target) is None


def step(target: Any, form: Any, *places: Any, **fields: Any) -> Step:
    return Step(1, (0,), places, work=OperatorWork(Operation(target, (Ref(0),), {}), form), **fields)


FORM = Form((4, 4), (4, 1), torch.float32)


def test_a_result_fills_its_memory() -> None:
    assert can_fill(step(aten.exp.default, FORM, 64))
    assert not can_fill(step(aten.exp.default, Form((4, 4), (8, 1), torch.float32), 112))
    assert not can_fill(step(aten.exp.default, FORM, 128)), "its storage is larger"
    assert not can_fill(step(aten.exp.default, FORM, 64, retained_bytes=8))
    assert not can_fill(step(aten.exp.default, FORM, 64, kind=Kind.FETCH))
    assert not can_fill(step(aten.t.default, FORM, (0, 0), is_view=True))


def test_who_needs_own_operands_what_it_reads() -> None:
    assert not needs_own_operands(step(aten.exp.default, FORM, 64))
    assert not needs_own_operands(step(aten.view.default, FORM, (0, 0), is_view=True)), (
        "that shares its storage, and says so"
    )
    assert needs_own_operands(step(aten.reshape.default, FORM, 64)), "sizes alone do not tell"
    assert needs_own_operands(step(len, FORM, 64))
    assert needs_own_operands(step(aten.slice_scatter.default, FORM, 64)), "it copies the whole storage"
    assert needs_own_operands(step(aten.as_strided.default, FORM, (0, 0), is_view=True)), "it counts from its start"
    assert needs_own_operands(step(aten.exp.default, FORM, 64, holds_operands=True))
