"""DistributedDataParallel with its options: losses, gradients, parameters and buffers of the loop without koila."""

from __future__ import annotations

from pathlib import Path

import pytest

import koila
from tests.distributed import data_parallel
from tests.distributed.ranks import assert_no_differences, compare


def options(rank: int) -> list[str]:
    return compare(rank, data_parallel.PROGRAMS) + runs_once(rank) + splits_in_one_rank(rank)


def runs_once(rank: int) -> list[str]:
    """Looking for unused parameters costs no second forward pass: one run per step, in chunks."""
    koila.metrics.reset()
    with koila.budget(chunk_size=2):
        data_parallel.unused_parameters(rank, koila.lazy)
    found = koila.metrics.counter_value("runs::split"), koila.metrics.counter_value("segment::rerun")
    return [] if found == (data_parallel.NUM_STEPS, 0) else [f"rank {rank}: {found} runs in chunks and reruns"]


def splits_in_one_rank(rank: int) -> list[str]:
    """Under a budget of bytes, one rank runs whole and the other in chunks."""
    koila.metrics.reset()
    program = data_parallel.another_budget_in_each_rank
    found = compare(rank, {program.__name__: program}, {"bytes": {}})
    counts = [koila.metrics.counter_value(f"runs::{how}") for how in ("whole", "split")]
    return found if counts == [[6, 0], [0, 6]][rank] else [*found, f"rank {rank}: {counts} runs whole and in chunks"]


def buffers(rank: int) -> list[str]:
    return compare(rank, data_parallel.WITH_STATISTICS)


@pytest.mark.semantics("S12", "S21")
def test_options_equal_eager(tmp_path: Path) -> None:
    assert_no_differences(options, tmp_path)


@pytest.mark.semantics("S5", "S21")
def test_buffers_equal_eager(tmp_path: Path) -> None:
    assert_no_differences(buffers, tmp_path)
