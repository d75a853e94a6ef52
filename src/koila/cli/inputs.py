"""What `koila run` makes lazy in a script that does not know koila.

*Takes* the batches that a DataLoader hands out in the main process; without a DataLoader, what is passed to the
outermost module in train mode that has parameters. *Gives* them to the script as lazy tensors, and says once what is
lazy and what is not. Worker processes, modules inside of modules, and everything else are left alone.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.utils.data import get_worker_info

from koila._torch.loading import LOADER_ITERATOR
from koila.capture.inputs import make_lazy
from koila.capture.lazy import LazyTensor
from koila.ir.source import user_site
from koila.ir.tree import leaves

MOST_NOTES = 5
"""So many places are told; a script with more of them knows by then how it goes."""


class LazyInputs:
    """Makes the inputs of a script lazy while `in_force`."""

    def __init__(self, batch: int, allowed_bytes: int | None, say: Callable[[str], None]) -> None:
        """
        Args:
            batch: The batch dimension.
            allowed_bytes: What a run of the inputs may allocate, in whichever thread it is; None: what is free.
            say: Told in a sentence what was made lazy, once per place.
        """
        self._batch, self._allowed_bytes, self._say = batch, allowed_bytes, say
        self._process = os.getpid()
        self._said: set[tuple[str, ...]] = set()
        self._from_loader = False
        self._depth = threading.local()

    @property
    def is_idle(self) -> bool:
        """Whether nothing was made lazy so far."""
        return not self._said

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Loaders and modules hand out lazy tensors inside this block."""
        next_batch, call = LOADER_ITERATOR.__next__, torch.nn.Module.__call__
        LOADER_ITERATOR.__next__ = self._loading(next_batch)
        torch.nn.Module.__call__ = self._calling(call)  # type: ignore[method-assign]
        try:
            yield
        finally:
            LOADER_ITERATOR.__next__ = next_batch
            torch.nn.Module.__call__ = call  # type: ignore[method-assign]

    def _loading(self, next_batch: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def lazy_batch(iterator: Any) -> Any:
            batch = next_batch(iterator)
            if not self._is_main():
                return batch
            found = self._made_lazy(batch, "the batches of the DataLoader that is read")
            # A batch of a class that koila does not look into may still reach a module as tensors.
            self._from_loader = self._from_loader or _any_lazy(found)
            return found

        return lazy_batch

    def _calling(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._from_loader:
                return call(module, *args, **kwargs)
            depth = getattr(self._depth, "value", 0)
            if depth == 0 and self._is_main() and _is_trained(module) and not _any_lazy((args, kwargs)):
                args, kwargs = self._made_lazy((args, kwargs), f"what is passed to {type(module).__name__}")
            self._depth.value = depth + 1
            try:
                return call(module, *args, **kwargs)
            finally:
                self._depth.value = depth

        return called

    def _is_main(self) -> bool:
        """Forked processes inherit the patches, and leave everything as it is."""
        return os.getpid() == self._process and get_worker_info() is None

    def _made_lazy(self, tree: Any, what: str) -> Any:
        if not _holds_tensors(tree):
            self._note(what, [], _others(tree))
            return tree
        found = make_lazy((tree,), self._batch, self._allowed_bytes, strict=False)
        self._note(what, [leaf for leaf in _open(found) if isinstance(leaf, LazyTensor)], _others(found))
        return found

    def _note(self, what: str, made: list[LazyTensor], others: list[str]) -> None:
        key = (what, *(str(tensor.dtype) for tensor in made), *others)
        if key in self._said or len(self._said) >= MOST_NOTES:
            return
        self._said.add(key)
        place = user_site()
        if made:
            self._say(f"lazy: {what} at {place}: {'; '.join(_described(tensor) for tensor in made)}")
        if others:
            self._say(f"not lazy: {', '.join(others)} in {what} at {place}")


def _is_trained(module: torch.nn.Module) -> bool:
    """Whether a module is in train mode and has something to train: a loss has not, and nobody calls its `eval()`."""
    return module.training and any(parameter.requires_grad for parameter in module.parameters())


def _any_lazy(tree: Any) -> bool:
    return any(isinstance(leaf, LazyTensor) for leaf in _open(tree))


def _open(tree: Any) -> Iterator[Any]:
    """The leaves of a batch, members of objects that `koila.lazy` looks into included."""
    for leaf in leaves(tree):
        members = _members(leaf)
        yield from [leaf] if members is None else _open(members)


def _members(leaf: Any) -> dict[str, Any] | None:
    """What a dataclass or a mapping class holds; None for a leaf that is one."""
    if isinstance(leaf, (torch.Tensor, type)):
        return None
    if is_dataclass(leaf):
        return {field.name: getattr(leaf, field.name) for field in fields(leaf)}
    data = getattr(leaf, "data", None)
    return data if isinstance(data, dict) and hasattr(leaf, "keys") else None


def _holds_tensors(tree: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in _open(tree))


def _others(tree: Any) -> list[str]:
    """What is not lazy, in words; numbers and texts of no size are not worth one."""
    kinds = Counter(
        f"a {type(leaf).__name__}" if not isinstance(leaf, torch.Tensor) else f"a tensor of class {type(leaf).__name__}"
        for leaf in _open(tree)
        if not isinstance(leaf, (LazyTensor, type(None), bool, int, float))
    )
    return [kind if times == 1 else f"{kind} ({times} times)" for kind, times in kinds.items()]


def _described(tensor: LazyTensor) -> str:
    batch = tensor._value.batch
    where = "no batch" if batch is None else f"batch {tensor.shape[batch]} in dim {batch}"
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}, {where}"
