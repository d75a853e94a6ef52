"""Counting the bytes of storages: the one witness inside the process, for real runs and for runs on fake tensors.

*Takes* every operator that PyTorch dispatches in a `with` block. *Gives* the bytes alive above those at the start,
their peak and, where asked for, each storage that was born. Memory that an operator allocates and frees inside its own
kernel is out of sight of a `StorageTracker`; a `WorkspaceTracker` adds what the table of workspaces says of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from koila._torch import FakeTensor, OpOverload, RunMode, TorchDispatchMode, has_kernel, storage_key
from koila.planning.forms import form_tree
from koila.planning.workspace import may_allocate, retained_bytes, workspace_bytes

REAL = (torch.Tensor, torch.nn.Parameter)


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


@cache
def _is_composite(func: Any) -> bool:
    """Whether an operator is made of others. Inference mode hands such ones on whole, others take them apart before."""
    if not isinstance(func, OpOverload):
        return False
    return has_kernel(func.name(), "CompositeImplicitAutograd") and not has_kernel(func.name(), "CPU")


@contextmanager
def _again(mode: TorchDispatchMode) -> Iterator[None]:
    """The mode sees what is dispatched inside its own handler, too."""
    TorchDispatchMode.__enter__(mode)
    try:
        yield
    finally:
        TorchDispatchMode.__exit__(mode, None, None, None)


class StorageTracker(RunMode):
    """Storages of results, each from its birth to its end; those of arguments were there before.

    Args:
        kinds: The types of tensors to watch.
        births: Keep a list of all storages that were born.
        frees: What was there before counts when it dies, and then below zero.

    >>> with StorageTracker(births=True) as tracker:
    ...     kept = torch.ones(1024)
    ...     number = (kept + 1).numel()
    >>> tracker.current_bytes, tracker.peak_bytes, tracker.largest.operator
    (4096, 8192, 'aten.ones.default')
    """

    def __init__(self, kinds: tuple[type, ...] = REAL, *, births: bool = False, frees: bool = True) -> None:
        super().__init__()
        self.current_bytes = 0
        """Bytes alive now, above those at the start."""
        self.peak_bytes = 0
        """The most that `current_bytes` has been."""
        self.peak_operator = ""
        """The operator that was running when the peak was reached."""
        self.births: list[Birth] = []
        """Every storage born in the scope, in order, if asked for."""
        self._kinds = kinds
        self._keeps_births = births
        self._counts_frees = frees
        self._known: dict[int, int] = {}
        self._watched: dict[int, weakref.ref[Any]] = {}

    @property
    def largest(self) -> Birth:
        """The largest storage born in the scope, if births are kept; the first of equals."""
        return max(self.births, key=lambda birth: birth.num_bytes, default=_NOTHING)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and _is_composite(func):
            with _again(self):
                return func.decompose(*args, **kwargs)
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
        key, num_bytes = storage_key(storage), storage.nbytes()
        if key not in self._watched:
            self._watched[key] = weakref.ref(storage, lambda _: self._forget(key))
            if operator is None:
                if self._counts_frees:
                    self._known[key] = num_bytes
                return
            self._known[key] = 0
            if self._keeps_births:
                self.births.append(Birth(str(operator), num_bytes, tuple(tensor.shape), tensor.dtype))
        if key in self._known and num_bytes != self._known[key]:
            grown = num_bytes - self._known[key]
            self._known[key] = num_bytes
            self._grow(grown, operator)

    def _grow(self, num_bytes: int, operator: Any) -> None:
        self.current_bytes += num_bytes
        if self.current_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_operator = self.current_bytes, str(operator)

    def _shrink(self, num_bytes: int) -> None:
        self.current_bytes -= num_bytes

    def _forget(self, key: int) -> None:
        self._watched.pop(key, None)
        self._shrink(self._known.pop(key, 0))

    def _tensors(self, tree: Any) -> Iterator[torch.Tensor]:
        if isinstance(tree, torch.Tensor):
            if type(tree) in self._kinds and tree.layout == torch.strided and not tree.is_meta:
                yield tree
        elif isinstance(tree, (list, tuple)):
            for item in tree:
                yield from self._tensors(item)
        elif isinstance(tree, dict):
            for item in tree.values():
                yield from self._tensors(item)


class WorkspaceTracker(StorageTracker):
    """A tracker that also counts what operators allocate inside their kernels, as a budget does.

    The bytes inside are those of `koila.planning.workspace`, which are an upper bound and hold for CPU kernels.

    >>> x = torch.ones(512, 512)
    >>> with StorageTracker() as plain, WorkspaceTracker() as tracker:
    ...     y = x.t() @ x[:, ::2].t()[:256].t()
    >>> tracker.peak_bytes - plain.peak_bytes == 4 * 512 * 256
    True
    """

    def __init__(self, kinds: tuple[type, ...] = REAL, *, births: bool = False, frees: bool = True) -> None:
        super().__init__(kinds, births=births, frees=frees)
        self._is_fake = FakeTensor in kinds
        self._retained: dict[int, int] = {}
        """By storage, what stays alive with it in the kernel's own memory; storages of real tensors show it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if isinstance(func, OpOverload) and may_allocate(func, args, result, kwargs):
            first = next(self._tensors(result), None)
            if first is not None and (self._is_fake or first.device.type == "cpu"):
                self._work(func, args, kwargs, result, storage_key(first.untyped_storage()))
        return result

    def _work(self, func: OpOverload, args: Any, kwargs: Any, result: Any, key: int) -> None:
        """Count what the kernel allocates; what it keeps lives as long as a storage."""
        hidden, kept = workspace_bytes(func, args, result, kwargs), retained_bytes(func, args, result, kwargs)
        if self._is_fake:
            self._retained[key] = kept
            self._grow(kept, func)
        self._grow(hidden - kept, func)
        self._shrink(hidden - kept)

    def _forget(self, key: int) -> None:
        super()._forget(key)
        self._shrink(self._retained.pop(key, 0))


@dataclass(slots=True)
class Life:
    """A storage from its birth to its end, counted in changes of the bytes alive."""

    birth: Birth
    place: object
    """What the caller said was running."""
    born: int
    died: int | None = None


@dataclass(slots=True)
class Call:
    """A call whose kernel may allocate something: three changes of the bytes alive, and one when its result dies."""

    target: OpOverload
    args: Any
    """Its arguments, tensors as forms."""
    kwargs: Any
    result: Any
    at: int
    """The first of three changes: what stays, what is allocated beyond that, and freed."""
    released: int | None = None
    """The change that frees what stayed."""


class FakeTracker(WorkspaceTracker):
    """A tracker for a run on fake tensors: what the run would allocate, and what stands at the peak.

    The end of a fake input frees nothing real.
    """

    def __init__(self) -> None:
        super().__init__((FakeTensor,), births=True, frees=False)
        self.place: object = None
        """What is running now, told by the caller."""
        self.trail: list[int] = []
        """Every change of the bytes alive, in order."""
        self.operators: list[str] = []
        """The operator of each of them."""
        self.lives: list[Life] = []
        """Every storage that was born."""
        self.calls: list[Call] = []
        """Every call whose kernel may allocate something."""
        self._living: dict[int, Life] = {}
        self._keeping: dict[int, Call] = {}

    def _see(self, tensor: torch.Tensor, operator: Any) -> None:
        num_births, now = len(self.births), len(self.trail)
        super()._see(tensor, operator)
        if len(self.births) > num_births:
            life = Life(self.births[-1], self.place, now)
            self.lives.append(life)
            self._living[storage_key(tensor.untyped_storage())] = life

    def _grow(self, num_bytes: int, operator: Any) -> None:
        super()._grow(num_bytes, operator)
        self.trail.append(num_bytes)
        self.operators.append(str(operator))

    def _shrink(self, num_bytes: int) -> None:
        super()._shrink(num_bytes)
        self.trail.append(-num_bytes)
        self.operators.append("")

    def _work(self, func: OpOverload, args: Any, kwargs: Any, result: Any, key: int) -> None:
        call = Call(func, form_tree(args), form_tree(kwargs or {}), form_tree(result), len(self.trail))
        self.calls.append(call)
        self._keeping[key] = call
        super()._work(func, args, kwargs, result, key)

    def _forget(self, key: int) -> None:
        life = self._living.pop(key, None)
        if life is not None:
            life.died = len(self.trail)
        call = self._keeping.pop(key, None)
        super()._forget(key)
        if call is not None:
            call.released = len(self.trail) - 1
