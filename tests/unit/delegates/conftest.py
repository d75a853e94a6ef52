"""Fixtures: a registry that is put back, and generators that start at the same place.

Takes: nothing.
Gives: independent tests.
"""

from collections.abc import Iterator

import pytest
import torch

from koila.delegates import registry


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _registry_put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    yield
