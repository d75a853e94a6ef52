"""Counts the bytes of storages that live while a scope runs.

*Takes* every operator that PyTorch dispatches in a `with` block. *Gives* the bytes alive above those at the start,
their peak, and each storage that was born, with the operator that made it.

Memory that an operator allocates and frees inside its own kernel is out of sight, and so are fake and meta tensors,
which have no memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True, slots=True)
class Birth:
    """A storage that was born in the scope."""

    operator: str
    """The operator that returned it first."""
    num_bytes: int
    shape: tuple[int, ...]
    """The shape of the first tensor in it."""
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.operator} {list(self.shape)} {str(self.dtype).removeprefix('torch.')}, {self.num_bytes} bytes"


_NOTHING = Birth("nothing", 0, (), torch.uint8)


class StorageTracker(TorchDispatchMode):
    """Storages of results and arguments, each from its first appearance to its end.

    An argument whose storage was not born in the scope was alive at the start: it counts only when it dies, and then
    below zero.

    >>> with StorageTracker() as tracker:
    ...     kept = torch.ones(1024)
    ...     _ = kept + 1
    >>> tracker.current_bytes, tracker.peak_bytes, tracker.largest.operator
    (4096, 8192, 'aten.ones.default')
    """

    def __init__(self) -> None:
        super().__init__()
        self.current_bytes = 0
        """Bytes alive now, above those at the start."""
        self.peak_bytes = 0
        """The most that `current_bytes` has been."""
        self.births: list[Birth] = []
        """Every storage born in the scope, in order."""
        self._alive: dict[int, int] = {}
        self._watched: dict[int, weakref.ref[Any]] = {}

    @property
    def largest(self) -> Birth:
        """The largest storage born in the scope; the first of equals."""
        return max(self.births, key=lambda birth: birth.num_bytes, default=_NOTHING)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):
            self._see(tensor, None)
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            self._see(tensor, str(func))
        return result

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._watched.clear()

    def _see(self, tensor: torch.Tensor, operator: str | None) -> None:
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        known = self._alive.get(key)
        if known is None:
            self._alive[key] = num_bytes
            self._watched[key] = weakref.ref(storage, lambda _: self._forget(key))
            if operator is not None:
                self.births.append(Birth(operator, num_bytes, tuple(tensor.shape), tensor.dtype))
                self._grow(num_bytes)
        elif known != num_bytes:
            self._alive[key] = num_bytes
            self._grow(num_bytes - known)

    def _grow(self, num_bytes: int) -> None:
        self.current_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)

    def _forget(self, key: int) -> None:
        self._watched.pop(key, None)
        self.current_bytes -= self._alive.pop(key, 0)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Tensors with memory of their own."""
    if isinstance(tree, torch.Tensor):
        if type(tree) in (torch.Tensor, torch.nn.Parameter) and tree.layout == torch.strided and not tree.is_meta:
            yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from _tensors(item)


def gradient_bytes(model: torch.nn.Module) -> int:
    """Bytes of the gradients of a model's parameters."""
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
