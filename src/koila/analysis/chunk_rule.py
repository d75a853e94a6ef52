"""The form of a split rule: one call of an operator in, what it asks of its operands and what it gives out.

*Takes* a `Call`: the operator, its arguments by schema name with every tensor replaced by an `Operand` (whole shape,
dtype, split type), the whole shapes of its results and the batch size. *Gives* a `ChunkRule`, or None when the operator
must run whole (Rule 3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from koila._torch import OpOverload
from koila.analysis.types import Sliced, SplitType


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor argument of a call, as a rule sees it."""

    shape: tuple[int, ...]
    """The whole shape."""
    dtype: torch.dtype
    type: SplitType

    @property
    def ndim(self) -> int:
        return len(self.shape)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an operator on whole values."""

    target: OpOverload
    arguments: Mapping[str, Any]
    """Every argument of the schema by name, defaults filled in; tensors are `Operand`s, lists of them are tuples."""
    results: tuple[Operand | None, ...]
    """Whole shapes of the results; their `type` means nothing yet. None where a result is not a tensor."""
    num_samples: int
    """The batch size B."""

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def operands(self) -> dict[str, Operand | tuple[Operand | None, ...]]:
        """The tensor arguments by name: single operands and tuples of them."""
        found: dict[str, Operand | tuple[Operand | None, ...]] = {}
        for name, value in self.arguments.items():
            if isinstance(value, Operand) or (
                isinstance(value, tuple) and any(isinstance(item, Operand) for item in value)
            ):
                found[name] = value
        return found

    @property
    def result(self) -> Operand:
        """The only result."""
        assert len(self.results) == 1 and self.results[0] is not None
        return self.results[0]


Required = SplitType | tuple[SplitType | None, ...]


@dataclass(frozen=True, slots=True)
class ChunkRule:
    """What an operator does with a chunk."""

    operands: Mapping[str, Required]
    """By argument name, the type that the operator needs; an operand that is not named is needed Whole.
    A Whole value is sliced for free, a Sliced or Merged one that is needed otherwise costs a phase."""
    result: SplitType | tuple[SplitType, ...]
    """The type of the result, or of each result."""
    sizes: tuple[str, ...] = ()
    """Arguments that hold the size of the (first) result: rewritten from its type, never by matching numbers."""
    rewrite: Callable[[dict[str, Any], int], dict[str, Any]] | None = field(default=None, compare=False)
    """(arguments of the whole call, samples in the chunk) → arguments of the chunk's call, where `sizes` is not
    enough. Tensors in the arguments are opaque to it."""
    target: Callable[..., Any] | None = None
    """The operator for a chunk, where it is another one (`view` becomes `reshape`)."""


Rule = Callable[[Call], ChunkRule | None]


def sliced(value: Any) -> Sliced | None:
    """The Sliced type of an operand, or None."""
    return value.type if isinstance(value, Operand) and isinstance(value.type, Sliced) else None
