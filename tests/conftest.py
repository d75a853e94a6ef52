"""What holds for all tests: one thread per process, so that bits are comparable, and fresh counters."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import koila
from koila._warnings import forget_warnings
from koila.capture.pending import recorder
from tests.seeding import seed_present_devices_only

torch.set_num_threads(1)
seed_present_devices_only()


@pytest.fixture(autouse=True)
def fresh_counters() -> None:
    koila.metrics.reset()
    forget_warnings()


@pytest.fixture(autouse=True)
def nothing_pending() -> Iterator[None]:
    """What a test recorded and did not run is not the next test's matter."""
    yield
    recorder.forget()
