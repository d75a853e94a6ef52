"""One thread: the tensors here are small, and threads would only wait for each other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import koila


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    koila.metrics.reset()
    yield
    torch.set_num_threads(before)
