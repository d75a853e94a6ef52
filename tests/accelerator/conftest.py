"""What holds for tests on the simulated device: it has no limit and no failure waiting, before and after each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.accelerator import sim


@pytest.fixture(autouse=True)
def unlimited() -> Iterator[None]:
    yield
    for device in range(3):
        sim.limit(None, device)
        sim.fail_in(-1, device)
