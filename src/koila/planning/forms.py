"""Forms: the layout of a tensor without the tensor.

*Takes* tensors. *Gives* `Form`s, which are small, comparable and hashable, and meta tensors made from them. Plans hold
forms only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch

from koila._torch import negative_view
from koila.ir.tree import map_leaves


@dataclass(frozen=True, slots=True)
class Form:
    """The layout of a strided tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_conj: bool = False
    is_neg: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Form:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def extent_bytes(self) -> int:
        """Bytes from its first element to its last."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        return _is_contiguous(self.shape, self.stride)

    @property
    def is_dense(self) -> bool:
        """Whether its elements lie side by side, in any order, each once."""
        return _is_dense(self.shape, self.stride)

    @property
    def gathered(self) -> Form:
        """The buffer that the chunks of such a value are copied into: its order in memory, without overlaps or gaps."""
        order = sorted(range(len(self.shape)), key=lambda dim: (self.stride[dim], self.shape[dim]))
        found, step = [0] * len(self.shape), 1
        for dim in order:
            found[dim] = step
            step *= max(self.shape[dim], 1)
        return Form(self.shape, tuple(found), self.dtype)

    def make(self, device: str = "meta") -> torch.Tensor:
        """A tensor of this layout."""
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        made = made.conj() if self.is_conj else made
        return negative_view(made) if self.is_neg else made


@lru_cache(4096)
def _is_contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    if 0 in shape:
        return True
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


@lru_cache(4096)
def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    pairs = sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1)
    steps, sizes = [step for step, _ in pairs], [size for _, size in pairs]
    return steps == [prod(sizes[:place]) for place in range(len(sizes))]


@dataclass(frozen=True, slots=True)
class Drawn:
    """Random numbers that were drawn before the run: packed, opened where they are read."""

    form: Form

    @property
    def shape(self) -> tuple[int, ...]:
        return self.form.shape


def form_tree(value: Any) -> Any:
    """A tree of tensors as forms; what is not strided stays a tensor, what is not a tensor stays as it is."""
    strided = lambda leaf: isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided  # noqa: E731
    return map_leaves(value, lambda leaf: Form.of(leaf) if strided(leaf) else leaf)


def meta_tree(tree: Any) -> Any:
    """A tree of forms as meta tensors."""
    return map_leaves(tree, lambda leaf: leaf.make() if isinstance(leaf, Form) else leaf)


def forms_of(tree: Any) -> list[Form | None]:
    """The results of a call, one for each place; None for what is not a strided tensor."""
    places = tree if isinstance(tree, (tuple, list)) else (tree,)
    return [each if isinstance(each, Form) else None for each in places]


def like(value: torch.Tensor, device: str) -> torch.Tensor:
    """A tensor of the same layout on another device."""
    if value.layout != torch.strided:
        return value if value.device.type == device else value.to(device)
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
