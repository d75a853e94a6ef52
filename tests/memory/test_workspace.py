"""The table of workspaces against the malloc hook: never under what is measured, and not far over it."""

from __future__ import annotations

import pytest
import torch

from benchmarks.calibrate import FAMILIES, SLACK_BYTES, readings
from koila.planning.workspace import retained_bytes, workspace_bytes

aten = torch.ops.aten
MEASURED = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX2", reason="the table was measured on a CPU with AVX2"
)
QUICK = ("attention", "norms", "recurrent", "softmaxes", "transforms")


@MEASURED
@pytest.mark.parametrize("family", QUICK)
def test_formulas_hold(family: str) -> None:
    found = readings([family])
    assert any(reading.measured_bytes > SLACK_BYTES for reading in found)
    assert [reading for reading in found if reading.is_under] == []
    assert [reading for reading in found if reading.is_over] == []


@MEASURED
@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(QUICK)))
def test_formulas_of_the_other_families_hold(family: str) -> None:
    test_formulas_hold(family)


def test_what_needs_nothing_costs_nothing() -> None:
    x = torch.ones(64, 64)
    for target in (aten.mm.default, aten.add.Tensor, aten.maximum.default):
        assert workspace_bytes(target, (x, x), target(x, x)) == 0


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
