"""What a formula is given: a call of an operator, its result, and the processor that runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from koila.planning.workspace.processor import Processor

HALF = (torch.bfloat16, torch.float16)
"""The types that most CPU kernels compute in float32."""


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One call of an operator, as far as its kernel's memory depends on it."""

    arguments: Mapping[str, Any]
    """Every argument of the schema by name, defaults included, memory for results not; tensors may be fake."""
    result: Any
    processor: Processor
    writes: bool = False
    """Whether the result is memory that was given, so that its type need not be the one that is computed in."""

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    @property
    def num_threads(self) -> int:
        return self.processor.num_threads


Formula = Callable[[KernelCall], int]
"""A call → the bytes that its kernel allocates beyond the results."""


def num_bytes(tensor: torch.Tensor | None) -> int:
    """Bytes of a dense copy of a tensor."""
    return 0 if tensor is None else tensor.numel() * tensor.element_size()


def bytes_like(name: str) -> Formula:
    """As much as an argument."""
    return lambda call: num_bytes(call[name])
