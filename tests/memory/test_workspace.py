"""The table of workspaces against the malloc hook: never under what is measured; where it was measured, not far over.

On a processor for which formulas are by reading (AVX-512), the same tests run and ask for the bound only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.calibrate import FAMILIES, SLACK_BYTES, Call, readings
from koila.planning import workspace
from koila.planning.workspace import Isa, Processor, processor, retained_bytes, this_processor, workspace_bytes

aten = torch.ops.aten
QUICK = ("attention", "forms", "norms", "recurrent", "softmaxes", "transforms")
HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("family", QUICK)
def test_formulas_hold_at_two_threads(family: str) -> None:
    check_formulas(family, 2)


def check_formulas(family: str, num_threads: int) -> None:
    found = readings([family], num_threads)
    assert any(reading.measured_bytes > SLACK_BYTES for reading in found)
    assert [reading for reading in found if reading.is_under] == []
    if this_processor().is_measured:
        # At more threads than one, kernels may use fewer than they are allowed.
        assert [reading for reading in found if reading.is_over and num_threads == 1] == []


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(QUICK)))
def test_formulas_of_the_other_families_hold(family: str) -> None:
    """At one thread; `./scripts/nightly workspace` asks for more of them, and for a processor without AVX2."""
    check_formulas(family, 1)


def fake_calls() -> Iterator[tuple[Call, Any]]:
    """Every call of the calibration with its result, on fake tensors."""
    with FakeTensorMode():
        for family in FAMILIES.values():
            for call in family():
                yield call, call.target(*call.args, **call.kwargs)


def bytes_on(call: Call, result: Any, which: Processor) -> int:
    return workspace_bytes(call.target, call.args, result, call.kwargs, which)


def test_more_threads_never_need_less() -> None:
    for call, result in fake_calls():
        for isa in Isa:
            one, many = (bytes_on(call, result, Processor(number, isa)) for number in (1, 16))
            # oneDNN shares the samples of an unfolded image out or not: the bound follows its rule.
            assert 0 <= one <= many, call


def test_a_bound_by_reading_is_not_below_what_was_measured() -> None:
    for call, result in fake_calls():
        for number in (1, 2, 16):
            measured = bytes_on(call, result, Processor(number, Isa.AVX2))
            assert bytes_on(call, result, Processor(number, Isa.SSE41)) >= measured, call


def test_a_processor_with_half_precision_has_another_table() -> None:
    """Which convolutions and products oneDNN runs follows from the facts, not from this machine."""
    plain, native = (Processor(2, Isa.AVX512, types) for types in ((), HALVES))
    a, b = torch.ones(256, 64, dtype=torch.bfloat16), torch.ones(64, 256, dtype=torch.bfloat16)
    product = Call(aten.mm.default, (a, b))
    assert bytes_on(product, a @ b, plain) == 0
    assert bytes_on(product, a @ b, native) > 2 * 2 * 256 * 64 + 4 * 256 * 256
    assert not native.is_measured and not plain.is_measured


@pytest.mark.parametrize(("asked", "expected"), [("SSE41", Isa.SSE41), ("avx2", Isa.AVX2), ("AVX512_CORE", Isa.AVX512)])
def test_onednn_is_bounded_by_its_variable(asked: str, expected: Isa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", asked)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: True)
    found = processor._processor.__wrapped__(3)
    assert (found.num_threads, found.isa) == (3, expected)
    assert found.channel_block == (16 if expected is Isa.AVX512 else 8)


def test_channels_are_padded_to_the_registers_of_the_processor() -> None:
    x, w = torch.ones(2, 20, 16, 16), torch.ones(36, 20, 3, 3)
    how = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    call = Call(aten.convolution.default, (x, w, None, *how))
    result = call.target(*call.args)
    narrow, wide = (bytes_on(call, result, Processor(1, isa)) for isa in (Isa.AVX2, Isa.AVX512))
    pixels = 2 * 16 * 16 * 4
    assert narrow >= pixels * 24 and wide >= pixels * 32 and wide > narrow


def test_every_row_is_measured() -> None:
    called = {workspace.forms.form_of(call.target).plain for call, _ in fake_calls()}
    rows = {target for family in workspace.FAMILIES.values() for target in family}
    assert sorted(str(target) for target in rows - called) == []


def test_what_needs_nothing_costs_nothing() -> None:
    x = torch.ones(64, 64)
    for target in (aten.mm.default, aten.add.Tensor, aten.maximum.default):
        assert workspace_bytes(target, (x, x), target(x, x), processor=Processor(1, Isa.AVX2)) == 0


def test_keyword_arguments_and_defaults_are_seen() -> None:
    mask = torch.ones(64, 64, dtype=torch.bool)
    result = aten.sum.dim_IntList(mask, [1], dtype=torch.float64)
    assert workspace_bytes(aten.sum.dim_IntList, (mask, [1]), result, {"dtype": torch.float64}) == 64 * 64 * 8


def test_a_reduced_loss_retains_the_whole_one() -> None:
    x = torch.ones(64, 64)
    result = aten.mse_loss(x, x)
    assert result.untyped_storage().nbytes() == 64 * 64 * 4
    assert retained_bytes(aten.mse_loss.default, (x, x), result) == 64 * 64 * 4
    assert retained_bytes(aten.mse_loss.default, (x, x, 0), aten.mse_loss(x, x, 0)) == 0
