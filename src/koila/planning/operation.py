"""Operations: what a step calls.

*Takes* a target and its arguments. *Gives* an `Operation`, in which tensors are numbered `Ref`s to the operands of a
step, and `OperatorWork`, an operation with the layout of its result. Neither holds a tensor. Only the builder, the code
generator and the lever that cuts regions look into them.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any

import torch

from koila.analysis.marks import SlotArgument
from koila.analysis.types import Sliced, chunk_of
from koila.ir.tree import leaves, map_leaves
from koila.planning.forms import Drawn, forms_of


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands for the operand of that position among the arguments."""

    position: int


class Bound(Enum):
    """A number among the arguments that the chunk loop knows."""

    START = "start"
    """The first sample of the chunk."""
    STOP = "stop"
    """The sample after the last."""


def slice_whole(value: Any, kind: Sliced, start: int, stop: int, num_samples: int) -> torch.Tensor:
    """A chunk of a whole value or of a random source, on meta tensors; `koila.execution.kernels` has the real one."""
    if not isinstance(value, Drawn):
        return chunk_of(value, kind, start, stop, num_samples)
    whole = value.form.make()
    if kind.dim == 0 and kind.outer == 1:
        rows = (stop - start) // kind.granule * kind.inner
        return whole.new_empty((rows, *value.form.shape[1:]))
    return chunk_of(whole, kind, start, stop, num_samples)


def join_pieces(value: torch.Tensor, kind: Sliced, start: int, stop: int, num_samples: int) -> torch.Tensor:
    """A chunk that lies in several pieces, copied into one, on meta tensors."""
    return chunk_of(value, kind, start, stop, num_samples).clone(memory_format=torch.preserve_format)


def open_source(value: Drawn) -> torch.Tensor:
    """All numbers of a random source, as a meta tensor; `koila.execution.kernels` has the real one."""
    return value.form.make()


HELPERS = (slice_whole, join_pieces, open_source)
"""Targets that are not PyTorch's."""


@dataclass(frozen=True, eq=False)
class Operation:
    """A target with its arguments; shared by the steps of all chunk sizes that call it alike."""

    target: Any
    """An operator of PyTorch, one of `HELPERS`, another function, or a `SubPlan`."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @cached_property
    def refs(self) -> tuple[int, ...]:
        """The positions of its operands, in the order in which they appear, as often as they do."""
        return tuple(leaf.position for leaf in leaves((self.args, self.kwargs)) if isinstance(leaf, Ref))

    @cached_property
    def signature(self) -> Hashable:
        """Equal for operations that give results of the same layout from operands of the same layout."""
        found = [leaf if isinstance(leaf, Ref) else (type(leaf), leaf) for leaf in leaves((self.args, self.kwargs))]
        return (self.target, *found, len(self.args), tuple(self.kwargs))

    @cached_property
    def structure(self) -> Hashable:
        """The same without the numbers among the arguments."""
        found = [
            leaf if isinstance(leaf, Ref) else type(leaf) if type(leaf) in (int, float) else (type(leaf), leaf)
            for leaf in leaves((self.args, self.kwargs))
        ]
        return (self.target, *found, len(self.args), tuple(self.kwargs))

    def applied(self, operands: list[Any], **bounds: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with operands in the place of references."""

        def swap(leaf: Any) -> Any:
            if isinstance(leaf, Ref):
                return operands[leaf.position]
            return bounds[leaf.value] if isinstance(leaf, Bound) else leaf

        return map_leaves(self.args, swap), map_leaves(self.kwargs, swap)

    def renumbered(self, positions: list[int]) -> Operation:
        """The operation whose references point to other positions."""
        if positions == list(range(len(positions))):
            return self
        swap = lambda leaf: Ref(positions[leaf.position]) if isinstance(leaf, Ref) else leaf  # noqa: E731
        return Operation(self.target, map_leaves(self.args, swap), map_leaves(self.kwargs, swap))

    @property
    def slots(self) -> list[SlotArgument]:
        """The floats among the arguments that vary from step to step of a training loop."""
        return [leaf for leaf in leaves((self.args, self.kwargs)) if isinstance(leaf, SlotArgument)]


class Kernel(Enum):
    """What computes a call."""

    OWN = "own"
    """The operator itself."""
    FLOAT32 = "in float32"
    """A product of half precision: the same operator, in float32."""
    UNFOLDED = "unfolded"
    """A convolution of a few pixels: one product of the unfolded images."""


@dataclass(frozen=True, slots=True, eq=False)
class OperatorWork:
    """What a step calls, and what that gives."""

    operation: Operation
    form: Any
    """The result: a `Form`, or a tuple or list of them; what is not a tensor stands for itself."""
    recorded: int | None = None
    """The number of the recorded call that it comes from; None in a backward pass."""
    kernel: Kernel = Kernel.OWN
    """What computes it."""
    is_transposed: bool = False
    """For a product that is added to a sum: whether the sum is of the transposed product."""
    prefix: str = ""

    @property
    def target(self) -> Any:
        """What is called."""
        return self.operation.target

    @property
    def label(self) -> str:
        """The name of the operator."""
        target = self.operation.target
        name = target.__name__ if type(target).__name__ == "function" else str(target)
        return self.prefix + name

    def shape(self, place: int) -> tuple[int, ...]:
        """The shape of a result."""
        form = forms_of(self.form)[place]
        return () if form is None else form.shape

    def offloaded(self) -> OperatorWork:
        """The same for the step that offloads the result."""
        return replace(self, prefix="offload ", form=None)

    def fetched(self) -> OperatorWork:
        """The same for the step that fetches the result."""
        return replace(self, prefix="fetch ", recorded=None)
