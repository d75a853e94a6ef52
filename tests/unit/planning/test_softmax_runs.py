"""Softmaxes of short runs keep the greatest number and the sum of many runs: by what the malloc hook measured."""

from __future__ import annotations

import pytest
import torch

from koila.planning.workspace import Isa, Processor, workspace_bytes

MEASURED = [
    # Shape, dimension, type, KiB at one thread.
    ((100000, 1), 1, torch.float32, 64),
    ((100000, 10), 1, torch.float32, 7),
    ((8, 2, 224, 224), 1, torch.float32, 128),
    ((2, 200000), 0, torch.float32, 128),
    ((2, 200000), 0, torch.bfloat16, 512),
]


@pytest.mark.parametrize(("shape", "dim", "dtype", "measured"), MEASURED, ids=str)
def test_short_runs_are_counted(shape: tuple[int, ...], dim: int, dtype: torch.dtype, measured: int) -> None:
    value = torch.zeros(shape, dtype=dtype)
    found = workspace_bytes(
        torch.ops.aten._log_softmax.default, (value, dim, False), value, None, Processor(1, Isa.AVX2)
    )
    assert measured << 10 <= found <= (measured + 32) << 10
