"""The three ways in which a program may run: whole, in chunks, and in a byte budget that asks for a cut."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

import koila

Scope = Callable[[], AbstractContextManager[Any]]


def plain(*tensors: torch.Tensor) -> Any:
    """Eager: tensors as they are."""
    return tensors[0] if len(tensors) == 1 else tensors


def _chunks() -> AbstractContextManager[Any]:
    return koila.budget(chunk_size=2)


def in_bytes(budget: int | str) -> Scope:
    """A scope with a byte budget."""
    return lambda: koila.budget(budget)


MODES = pytest.mark.parametrize("scope", [nullcontext, _chunks, in_bytes("1MiB")], ids=["whole", "chunks", "bytes"])
"""Parametrises a test with `scope`; small programs fit into the budget, which is then only planned for."""


def assert_same(found: Any, wanted: Any) -> None:
    """Equal structures; tensors within the tolerance of Rule 1."""
    if isinstance(wanted, torch.Tensor):
        real = found.run() if isinstance(found, koila.LazyTensor) else found
        assert real.shape == wanted.shape
        assert real.dtype == wanted.dtype
        tolerance = 1e-10 if wanted.dtype == torch.float64 else 1e-6
        assert torch.equal(real.isnan(), wanted.isnan())
        distance = (real - wanted).detach().double().nan_to_num().norm()
        assert distance <= tolerance * wanted.detach().double().nan_to_num().norm()
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    else:
        assert found == wanted
