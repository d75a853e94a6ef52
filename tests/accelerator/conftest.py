"""What holds for tests on the simulated device: it has no limit and no failure waiting, before and after each test."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def unlimited() -> Iterator[None]:
    yield
    # Not imported before a test is: where there is no compiler, tests are skipped one by one, and say so.
    sim = importlib.import_module("tests.accelerator.sim")
    for device in range(3):
        sim.limit(None, device)
        sim.fail_in(-1, device)
