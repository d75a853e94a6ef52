"""Accelerate, torchmetrics, transformers' Trainer and Lightning on two ranks: what they log and train without koila."""

from __future__ import annotations

import warnings
from pathlib import Path

from tests.distributed import frameworks
from tests.distributed.ranks import Program, assert_no_differences, compare


def programs(rank: int, *found: Program) -> list[str]:
    warnings.simplefilter("ignore")  # Theirs, about loaders and deprecated calls.
    return compare(rank, {program.__name__: program for program in found})


def accelerate(rank: int) -> list[str]:
    frameworks.under_torchrun(rank)
    return programs(rank, frameworks.gathered_and_reduced, frameworks.accelerated_training, frameworks.trainer)


def workers(rank: int) -> list[str]:
    return programs(rank, frameworks.trainer_with_workers)


def lightning(rank: int) -> list[str]:
    frameworks.under_torchrun(rank)
    return programs(rank, frameworks.metrics, frameworks.lightning_logs)


def test_accelerate_and_trainer_equal_eager(tmp_path: Path) -> None:
    assert_no_differences(accelerate, tmp_path)


def test_trainer_with_workers_equals_eager(tmp_path: Path) -> None:
    """In one process: plain PyTorch cannot start a loader's worker safely beside gloo's threads."""
    assert_no_differences(workers, tmp_path, num_ranks=1)


def test_lightning_equals_eager(tmp_path: Path) -> None:
    assert_no_differences(lightning, tmp_path)
