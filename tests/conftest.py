"""What holds for all tests: one thread per process, so that bits are comparable, and fresh counters."""

from __future__ import annotations

import pytest
import torch

import koila

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fresh_counters() -> None:
    koila.metrics.reset()
