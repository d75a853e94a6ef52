"""Split types: what a value of the whole program is, seen from one chunk of the batch.

*Takes* nothing. *Gives* the three types of the calculus (`Whole`, `Sliced`, `Merged`), how a chunk is cut out of a
whole value, and the shape that a chunk's value must have.

The fourth type of the design, *Uniform*, is not a type of a value but a way to convert one: a Whole value that was
made from nothing batch-sized (zeros, ones, an expanded scalar) is remade per chunk instead of sliced
(`koila.analysis.uniform`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from koila.analysis.monoids import Monoid


@dataclass(frozen=True, slots=True)
class Whole:
    """The same for every chunk: computed once."""


@dataclass(frozen=True, slots=True)
class Sliced:
    """A chunk's value is a slice of the whole value.

    Along `dim` the whole value has `outer * (batch / granule) * inner` positions, in that order of nesting.
    """

    dim: int
    """The dimension that holds the batch, counted from the left, never negative."""
    outer: int = 1
    """Positions outside the batch in this dimension: `[T, B]` flattened has outer = T."""
    inner: int = 1
    """Positions inside the batch in this dimension: `[B, T]` flattened has inner = T."""
    granule: int = 1
    """Samples per position: `view(B // 2, 2)` has granule 2; chunks start and end at multiples of it."""

    def extent(self, num_samples: int) -> int:
        """The size of `dim` for that many samples."""
        return self.outer * (num_samples // self.granule) * self.inner

    def shape(self, whole_shape: tuple[int, ...], num_samples: int) -> tuple[int, ...]:
        """The shape of a chunk of that many samples."""
        return (*whole_shape[: self.dim], self.extent(num_samples), *whole_shape[self.dim + 1 :])

    def at(self, dim: int) -> Sliced:
        """The same structure in another dimension."""
        return self if dim == self.dim else Sliced(dim, self.outer, self.inner, self.granule)


@dataclass(frozen=True, slots=True)
class Merged:
    """The whole value is the merge of the chunks' values."""

    monoid: Monoid


SplitType = Whole | Sliced | Merged

WHOLE = Whole()
OPAQUE = Sliced(0, inner=0)
"""Belongs to its chunk, in a format that only the operator knows which it is made for: neither gathered, cut nor kept.
A fake operator gives an empty tensor for it."""


def chunk_of(value: torch.Tensor, kind: Sliced, start: int, stop: int, num_samples: int) -> torch.Tensor:
    """The part of a whole `value` that belongs to the samples `start:stop` of `num_samples`; a view where torch can.

    >>> chunk_of(torch.arange(6), Sliced(0, outer=2), 1, 2, 3)
    tensor([1, 4])
    """
    first, length = start // kind.granule * kind.inner, (stop - start) // kind.granule * kind.inner
    if kind.outer == 1:
        return value.narrow(kind.dim, first, length)
    per_outer = num_samples // kind.granule * kind.inner
    parts = value.unflatten(kind.dim, (kind.outer, per_outer)).narrow(kind.dim + 1, first, length)
    return parts.flatten(kind.dim, kind.dim + 1)


def store_chunk(
    whole: torch.Tensor, piece: torch.Tensor, kind: Sliced, start: int, stop: int, num_samples: int
) -> None:
    """Write a chunk's value to its place in a preallocated whole value."""
    first, length = start // kind.granule * kind.inner, (stop - start) // kind.granule * kind.inner
    if kind.outer == 1:
        whole.narrow(kind.dim, first, length).copy_(piece)
        return
    per_outer = num_samples // kind.granule * kind.inner
    place = whole.unflatten(kind.dim, (kind.outer, per_outer)).narrow(kind.dim + 1, first, length)
    place.copy_(piece.unflatten(kind.dim, (kind.outer, length)))
