"""Monoids: how the values of the chunks are merged into the value of the whole batch.

*Takes* the chunks' values one after the other, in the order of the batch. *Gives* the whole value. A state never
aliases a view or an expanded tensor: `start` copies a piece that it cannot own.

`Moments` merges by the pairwise update of Chan, Golub and LeVeque (1979).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from koila._torch import is_autograd_view

Pair = tuple[torch.Tensor, torch.Tensor]
State = tuple[int, torch.Tensor, torch.Tensor]
"""A count and two tensors."""

HALVES = (torch.float16, torch.bfloat16)
"""The dtypes that are too narrow to accumulate in."""


def can_own(dtype: torch.dtype, is_view: bool, num_bytes: int, storage_bytes: int) -> bool:
    """Whether a merge can start with a value itself: it is wide enough to add to, and all of its storage."""
    return dtype not in HALVES and not is_view and num_bytes == storage_bytes


def owned(piece: torch.Tensor) -> torch.Tensor:
    """`piece` itself if it may be written to, else a copy: wide enough, and no view of somebody's storage."""
    if piece.dtype in HALVES:
        return piece.float()
    num_bytes, storage_bytes = piece.numel() * piece.element_size(), piece.untyped_storage().nbytes()
    if can_own(piece.dtype, is_autograd_view(piece), num_bytes, storage_bytes):
        return piece
    return piece.clone(memory_format=torch.contiguous_format)


def narrowed(state: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """The finished value in the dtype of the whole program's value, if that differs from the accumulator's."""
    return state if dtype is None else state.to(dtype)


def narrow_dtype(dtype: torch.dtype) -> torch.dtype | None:
    """What to finish to: the value's dtype where it is narrower than its accumulator."""
    return dtype if dtype in HALVES else None


@dataclass(frozen=True, slots=True)
class Monoid:
    """One way of merging: `start` with the first chunk, `add` each further one, `finish` to the whole value.

    A piece is what the chunk's operator returned: a tensor, or a tuple of tensors. `num_samples` is the number of
    samples in that chunk. Pieces arrive in the order of the batch.
    """

    def start(self, piece: Any, num_samples: int) -> Any:
        """The state after the first chunk; takes ownership of `piece`."""
        raise NotImplementedError

    def add(self, state: Any, piece: Any, num_samples: int) -> Any:
        """The state after one more chunk."""
        raise NotImplementedError

    def finish(self, state: Any) -> Any:
        """The whole value: what the operator of the whole program returns."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Sum(Monoid):
    """The whole value is the sum; half precision accumulates in float32 (Rule 1)."""

    dtype: torch.dtype | None = None
    """The dtype of the finished value where it is narrower than the accumulator's."""

    def start(self, piece: torch.Tensor, num_samples: int) -> torch.Tensor:
        return owned(piece)

    def add(self, state: torch.Tensor, piece: torch.Tensor, num_samples: int) -> torch.Tensor:
        return state.add_(piece)

    def finish(self, state: torch.Tensor) -> torch.Tensor:
        return narrowed(state, self.dtype)


@dataclass(frozen=True, slots=True)
class Product(Monoid):
    """The whole value is the product."""

    dtype: torch.dtype | None = None
    """The dtype of the finished value where it is narrower than the accumulator's."""

    def start(self, piece: torch.Tensor, num_samples: int) -> torch.Tensor:
        return owned(piece)

    def add(self, state: torch.Tensor, piece: torch.Tensor, num_samples: int) -> torch.Tensor:
        return state.mul_(piece)

    def finish(self, state: torch.Tensor) -> torch.Tensor:
        return narrowed(state, self.dtype)


@dataclass(frozen=True, slots=True)
class Extreme(Monoid):
    """The whole value is the largest (or smallest) one; NaN wins, as in `amax`."""

    largest: bool = True

    def start(self, piece: torch.Tensor, num_samples: int) -> torch.Tensor:
        return piece

    def add(self, state: torch.Tensor, piece: torch.Tensor, num_samples: int) -> torch.Tensor:
        return torch.maximum(state, piece) if self.largest else torch.minimum(state, piece)

    def finish(self, state: torch.Tensor) -> torch.Tensor:
        return state


@dataclass(frozen=True, slots=True)
class AnyTrue(Monoid):
    """The whole value is true where any chunk's is."""

    def start(self, piece: torch.Tensor, num_samples: int) -> torch.Tensor:
        return piece

    def add(self, state: torch.Tensor, piece: torch.Tensor, num_samples: int) -> torch.Tensor:
        return torch.bitwise_or(state, piece)

    def finish(self, state: torch.Tensor) -> torch.Tensor:
        return state


@dataclass(frozen=True, slots=True)
class AllTrue(Monoid):
    """The whole value is true where every chunk's is."""

    def start(self, piece: torch.Tensor, num_samples: int) -> torch.Tensor:
        return piece

    def add(self, state: torch.Tensor, piece: torch.Tensor, num_samples: int) -> torch.Tensor:
        return torch.bitwise_and(state, piece)

    def finish(self, state: torch.Tensor) -> torch.Tensor:
        return state


@dataclass(frozen=True, slots=True)
class LogSumExp(Monoid):
    """The whole value is the logarithm of the summed exponentials."""

    dtype: torch.dtype | None = None
    """The dtype of the finished value where it is narrower than the accumulator's."""

    def start(self, piece: torch.Tensor, num_samples: int) -> torch.Tensor:
        return owned(piece)

    def add(self, state: torch.Tensor, piece: torch.Tensor, num_samples: int) -> torch.Tensor:
        return torch.logaddexp(state, piece.to(state.dtype))

    def finish(self, state: torch.Tensor) -> torch.Tensor:
        return narrowed(state, self.dtype)


@dataclass(frozen=True, slots=True)
class PowerNorm(Monoid):
    """The whole value is the norm of the chunks' norms, of a finite order other than zero."""

    order: float
    dtype: torch.dtype | None = None
    """The dtype of the finished value where it is narrower than the accumulator's."""

    def start(self, piece: torch.Tensor, num_samples: int) -> torch.Tensor:
        return owned(piece)

    def add(self, state: torch.Tensor, piece: torch.Tensor, num_samples: int) -> torch.Tensor:
        both = torch.stack([state, piece.to(state.dtype)])
        return torch.linalg.vector_norm(both, self.order, dim=0)

    def finish(self, state: torch.Tensor) -> torch.Tensor:
        return narrowed(state, self.dtype)


@dataclass(frozen=True, slots=True)
class Moments(Monoid):
    """Variance and mean from (count, mean, sum of squared deviations); a piece is `var_mean` with correction 0."""

    num_elements: int
    """How many elements the whole reduction runs over, for each element of the result."""
    num_samples: int
    """The batch size that `num_elements` belongs to."""
    correction: float = 1
    root: bool = False
    """Finish to the standard deviation."""
    with_mean: bool = True
    """Finish to a pair (variance, mean); the variance alone otherwise."""
    dtype: torch.dtype | None = None
    """The dtype of the finished values where it is narrower than the accumulator's."""

    def start(self, piece: Pair, num_samples: int) -> State:
        count = self._count(num_samples)
        variance, mean = piece
        return count, owned(mean), owned(variance) * count

    def add(self, state: State, piece: Pair, num_samples: int) -> State:
        count, mean, squares = state
        more = self._count(num_samples)
        total = count + more
        delta = piece[1] - mean
        spread = (delta * delta.conj()).real if delta.is_complex() else delta * delta
        squares.add_(piece[0], alpha=more).add_(spread, alpha=count * more / total)
        # Not mean + delta * share: an infinity would be lost by it, and BatchNorm's running mean has it in eager.
        weighted = (mean * (count / total)).add_(piece[1], alpha=more / total)
        return total, torch.where(delta == 0, mean, weighted), squares  # Of equal pieces it is the same: no spread.

    def finish(self, state: State) -> torch.Tensor | Pair:
        count, mean, squares = state
        variance = squares / max(0, count - self.correction)
        first = narrowed(variance.sqrt() if self.root else variance, self.dtype)
        return (first, narrowed(mean, self.dtype)) if self.with_mean else first

    def _count(self, num_samples: int) -> int:
        return self.num_elements * num_samples // self.num_samples


@dataclass(frozen=True, slots=True)
class FirstExtreme(Monoid):
    """The largest (or smallest) value and its first position; a piece is `(values, positions in the chunk)`."""

    num_positions: int
    """The whole size of the reduced dimension."""
    num_samples: int
    """The batch size that `num_positions` belongs to."""
    largest: bool = True
    with_values: bool = True
    """Finish to a pair (values, positions); the positions alone otherwise."""

    def start(self, piece: Pair, num_samples: int) -> State:
        return self._positions(num_samples), *piece

    def add(self, state: State, piece: Pair, num_samples: int) -> State:
        offset, values, positions = state
        better = piece[0] > values if self.largest else piece[0] < values
        better = better | (piece[0].isnan() & ~values.isnan())
        values = torch.where(better, piece[0], values)
        positions = torch.where(better, piece[1] + offset, positions)
        return offset + self._positions(num_samples), values, positions

    def finish(self, state: State) -> torch.Tensor | Pair:
        _, values, positions = state
        return (values, positions) if self.with_values else positions

    def _positions(self, num_samples: int) -> int:
        return self.num_positions * num_samples // self.num_samples
