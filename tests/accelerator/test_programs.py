"""Programs on the simulated device: the numbers of eager, inside budgets by the count of the device itself."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch

import koila
from tests.accelerator import sim
from tests.accelerator.programs import NAMES
from tests.accelerator.trial import Outcome, assert_kept, distance, step

IN_THE_KERNEL = "attention with dropout"
"""Its random numbers are drawn inside of a kernel, from which they cannot be had: it runs whole."""


@cache
def eager(name: str) -> Outcome:
    return step(name)


@pytest.mark.parametrize("name", NAMES)
def test_a_program_that_is_not_cut_is_eager_to_the_last_bit(name: str) -> None:
    assert distance(step(name, koila.lazy), eager(name)) == 0


@pytest.mark.parametrize("chunk", [5, 1])
@pytest.mark.parametrize("name", [name for name in NAMES if name != IN_THE_KERNEL])
def test_chunks_give_the_numbers_of_the_whole_batch(name: str, chunk: int) -> None:
    found = step(name, koila.lazy, partial(koila.budget, chunk_size=chunk))
    assert found.report.how == "split" and not found.report.fallbacks
    assert distance(found, eager(name)) < 1e-10


@pytest.mark.parametrize("share", [0.75, 0.5])
@pytest.mark.parametrize("name", ["gpt", "gpt with dropout", "cnn", "mlp", "attention"])
def test_budgets_are_kept_by_the_devices_own_counter(name: str, share: float) -> None:
    allowed = int(share * eager(name).peak_bytes)
    found = step(name, partial(koila.lazy, budget=allowed))
    assert found.report.how == "split" and not found.report.fallbacks
    assert_kept(found)
    assert distance(found, eager(name)) < 1e-10


@pytest.mark.parametrize("name", ["gpt with dropout", "mlp"])
def test_random_numbers_of_a_device_need_not_come_in_blocks(name: str) -> None:
    with sim.counted_generator():
        expected = step(name)
        found = step(name, koila.lazy, partial(koila.budget, chunk_size=5))
    assert found.report.how == "split"
    assert distance(found, expected) < 1e-10
    assert distance(found, eager(name)) > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dropout_of_half_precision_is_eager_to_the_last_bit(dtype: torch.dtype) -> None:
    assert distance(step("mlp", koila.lazy, dtype=dtype), step("mlp", dtype=dtype)) == 0
