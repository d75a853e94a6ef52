"""Choices that are the same on every run: samples by hash, and which dimension is taken as the batch.

*Takes* names and trials. *Gives* numbers and cuts.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from tests.conformance.trees import tensors_of
from tests.conformance.trial import Trial

Cut = tuple[int, tuple[int | None, ...]]
"""A batch size, and the batch dimension of each input tensor."""


def number_of(text: str) -> int:
    """A fixed number for a text."""
    return zlib.crc32(text.encode())


def cut_along(tensors: Sequence[torch.Tensor], dim: int, size: int) -> Cut:
    """Every input that has that size there is cut."""
    return size, tuple(_batch(tensor, dim, size) for tensor in tensors)


def _batch(tensor: torch.Tensor, dim: int, size: int) -> int | None:
    fits = tensor.layout == torch.strided and dim < tensor.ndim and tensor.shape[dim] == size
    return dim if fits else None


def two_cuts(trial: Trial) -> list[Cut]:
    """The leading dimension and one other, of the first input that has a dimension of at least two."""
    tensors = tensors_of(trial.build().inputs)
    first = next((t for t in tensors if t.layout == torch.strided and any(size >= 2 for size in t.shape)), None)
    if first is None:
        return []
    dims = [dim for dim, size in enumerate(first.shape) if size >= 2]
    others = [dim for dim in dims if dim != 0]
    chosen = [dim for dim in dims if dim == 0]
    if others:
        chosen.append(others[number_of(trial.entry + trial.label) % len(others)])
    return [cut_along(tensors, dim, first.shape[dim]) for dim in chosen]
