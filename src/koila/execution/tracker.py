"""Counting the bytes of storages: the one witness inside the process, for real runs and for runs on fake tensors.

*Takes* every operator that PyTorch dispatches in a `with` block. *Gives* the bytes alive above those at the start and
their peak. Memory that an operator allocates and frees inside its own kernel is out of sight.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

REAL = (torch.Tensor, torch.nn.Parameter)


class StorageTracker(TorchDispatchMode):
    """Storages of results, each from its birth to its end; those of arguments were there before.

    >>> with StorageTracker() as tracker:
    ...     kept = torch.ones(1024)
    ...     _ = kept + 1
    >>> tracker.current_bytes, tracker.peak_bytes
    (4096, 8192)
    """

    def __init__(self, kinds: tuple[type, ...] = REAL) -> None:
        super().__init__()
        self.current_bytes = 0
        """Bytes alive now, above those at the start."""
        self.peak_bytes = 0
        self.peak_operator = ""
        """The operator that was running when the peak was reached."""
        self._kinds = kinds
        self._born: dict[int, int] = {}
        self._watched: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in self._tensors((args, kwargs)):
            self._see(tensor, None)
        result = func(*args, **kwargs)
        for tensor in self._tensors(result):
            self._see(tensor, func)
        return result

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._watched.clear()

    def _see(self, tensor: torch.Tensor, operator: Any) -> None:
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        if key not in self._watched:
            self._watched[key] = weakref.ref(storage, lambda _: self._forget(key))
            if operator is None:
                return  # It was there before the scope: not counted, neither now nor when it dies.
            self._born[key] = 0
        if key in self._born and num_bytes != self._born[key]:
            grown = num_bytes - self._born[key]
            self._born[key] = num_bytes
            self._grow(grown, operator)

    def _grow(self, num_bytes: int, operator: Any) -> None:
        self.current_bytes += num_bytes
        if self.current_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_operator = self.current_bytes, str(operator)

    def _forget(self, key: int) -> None:
        self._watched.pop(key, None)
        self.current_bytes -= self._born.pop(key, 0)

    def _tensors(self, tree: Any) -> Iterator[torch.Tensor]:
        if isinstance(tree, torch.Tensor):
            if type(tree) in self._kinds and tree.layout == torch.strided:
                yield tree
        elif isinstance(tree, (list, tuple)):
            for item in tree:
                yield from self._tensors(item)
        elif isinstance(tree, dict):
            for item in tree.values():
                yield from self._tensors(item)


def fake_tracker() -> StorageTracker:
    """A tracker for a run on fake tensors: what the run would allocate."""
    return StorageTracker((FakeTensor,))
