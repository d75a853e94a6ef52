"""The tensor abstraction layer: what eager and lazy tensors have in common.

*Takes* nothing. *Gives* the protocols `Runnable`, `TensorMixin` and `RunnableTensor`, which both kinds of tensor
satisfy, and `BatchInfo`, the batch dimension of a value. `isinstance` against a protocol looks for the names of its
members and reads none of them: asking a lazy tensor what it is neither traces nor runs anything.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class BatchInfo:
    """Which dimension of a value is the batch, and how many samples it has."""

    index: int
    """The dimension, counted from the left."""
    value: int
    """The number of samples."""

    def map(self, index: int | Callable[[int], int]) -> BatchInfo:
        """The same batch in another dimension: a number, or a function of the one it is in.

        >>> BatchInfo(0, 8).map(lambda index: index + 1)
        BatchInfo(index=1, value=8)
        """
        found = index(self.index) if callable(index) else index
        if isinstance(found, bool) or not isinstance(found, int):
            raise TypeError(f"a dimension is a whole number, got {found!r}; write map(1), or map(lambda dim: dim + 1)")
        return BatchInfo(found, self.value)


class BatchedPair(NamedTuple):
    """Bytes that grow with the batch, and bytes that do not."""

    batch: int
    """Bytes for each sample."""
    no_batch: int
    """Bytes that are there once."""


class _NamesOnly(type(Protocol)):  # type: ignore[misc]
    """Python 3.11 reads every member of a protocol in `isinstance`; 3.12 looks for it without reading, and so do we."""

    def __instancecheck__(cls, instance: object) -> bool:
        if not getattr(cls, "_is_protocol", False):
            return bool(super().__instancecheck__(instance))
        kind = type(instance)
        own = {} if isinstance(instance, type) else getattr(instance, "__dict__", {})
        return all(hasattr(kind, name) or name in own for name in _members(cls))


@cache
def _members(protocol: type) -> frozenset[str]:
    """The public names that a protocol and the protocols below it declare."""
    declared = (name for base in protocol.__mro__ if getattr(base, "_is_protocol", False) for name in vars(base))
    return frozenset(name for name in declared if not name.startswith("_"))


@runtime_checkable
class Runnable(Protocol[T_co], metaclass=_NamesOnly):
    """Something that can be evaluated."""

    @abstractmethod
    def run(self) -> T_co:
        """Evaluate, and give the result."""


@runtime_checkable
class TensorMixin(Protocol, metaclass=_NamesOnly):
    """What can be asked of a tensor without looking at its data."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def shape(self) -> torch.Size: ...

    def dim(self) -> int: ...

    def numel(self) -> int: ...


@runtime_checkable
class RunnableTensor(Runnable[torch.Tensor], TensorMixin, Protocol, metaclass=_NamesOnly):
    """A tensor that can be evaluated, and knows its batch before that."""

    @property
    def batch(self) -> BatchInfo | None: ...


class Realizer(Protocol):
    """How capture asks the later stages to run what is pending; joined to them in `koila._api`."""

    def read(self, lazy: Any, why: str) -> None:
        """Bind a lazy tensor whose call was matched and has no node yet."""

    def backward_from(self, lazy: Any, retain_graph: bool) -> None:
        """Run a backward pass from such a lazy tensor, a scalar."""

    def materialize(self, values: Sequence[Any], why: str) -> None:
        """Bind each of the pending values to a real tensor."""

    def backward(self, request: Any) -> None:
        """Run a backward pass from pending values and commit its gradients."""

    def grad(self, request: Any) -> tuple[Any, ...]:
        """The gradients that `torch.autograd.grad` would give, as real tensors."""

    def is_inside(self, values: Sequence[Any], roots: Sequence[Any]) -> bool:
        """Whether a run in chunks has hidden one of these values behind these real tensors."""

    def before_step(self, parameters: Sequence[Any]) -> None:
        """An optimizer is about to change these parameters."""

    def run_what_fits(self, values: Sequence[Any], why: str) -> None:
        """Run those of the values that the user holds, the smallest first, as far as there is room to keep them."""

    def is_passed_by(self, value: Any) -> bool:
        """Whether gradients of results that a run in chunks has given pass through this value, out of its sight."""

    def batches_of(self, values: Sequence[Any]) -> list[BatchInfo | None]:
        """The batch dimensions that the analysis finds in pending values."""
