"""`koila.lazy`: tensors in any structure become lazy, with one batch size.

*Takes* pytrees of tensors and where their batch is. *Gives* the same structures with lazy tensors in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass, replace
from sys import _getframe
from typing import Any

import torch

from koila import events
from koila._torch.transforms import active_transform
from koila.capture.advice import begin_program, note_worker, warn_of_batch, warn_of_nothing_lazy
from koila.capture.at_once import begin_other_step, begin_step, here, trace_inputs
from koila.capture.carried import run_carried
from koila.capture.eager import hand_out
from koila.capture.known import Origin
from koila.capture.lazy import LazyTensor, real_tensor
from koila.capture.patches import install
from koila.capture.record import input_value
from koila.errors import CaptureError
from koila.ir.ambient import watch_streams
from koila.ir.prepass import is_plain
from koila.ir.source import user_frame, user_site
from koila.ir.tree import leaves, rebuild


class _Group:
    """The batch size of one call of `koila.lazy`, set by its first tensor; makes lazy tensors."""

    size: int | None = None
    shape: tuple[int, ...] = ()
    num_lazy = 0
    """How many lazy tensors were found or made."""

    def __init__(self, budget: int | None = None, strict: bool = True) -> None:
        self.budget = budget
        self.strict = strict
        """Whether a tensor of another size in the batch dimension is an error; else it is lazy without a batch."""
        self.shapes: list[tuple[int, ...]] = []
        """Of those that have no batch."""

    def take(self, real: torch.Tensor, batch: Any) -> torch.Tensor:
        """What is handed out for a plain tensor."""
        dim = self._join(real.shape, batch) if isinstance(batch, int) else None
        if dim is None:
            self.shapes.append(real.shape)
        self.num_lazy += 1
        return self.make(real, dim)

    def make(self, real: torch.Tensor, dim: int | None) -> torch.Tensor:
        """What is handed out for a real tensor with its batch dimension: a lazy tensor."""
        if not real.is_cpu:
            watch_streams()
        return LazyTensor._wrap(input_value(real, dim, self.budget))

    def _join(self, shape: tuple[int, ...], batch: int) -> int | None:
        """The batch dimension of a tensor, or None if it has none."""
        num_dims = len(shape)
        if not -num_dims <= batch < num_dims:
            return None
        dim = batch % num_dims
        if self.size is None:
            self.size, self.shape = shape[dim], shape
        elif shape[dim] != self.size:
            if not self.strict:
                return None
            raise CaptureError(
                f"batch sizes differ: {list(self.shape)} has {self.size} samples, "
                f"{list(shape)} has {shape[dim]} in dim {dim}",
                where=str(user_site()),
                hint="say where the batch is, one entry per value: koila.lazy(x, table, batch=(0, None))",
            )
        return dim


class _Watched(_Group):
    """The same for a step that is watched: its lazy tensors are noted in order."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[torch.Tensor] = []

    def make(self, real: torch.Tensor, dim: int | None) -> torch.Tensor:
        self.made.append(super().make(real, dim))
        return self.made[-1]


class _Found(_Group):
    """Nothing is made: the real tensors are noted in order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[torch.Tensor] = []

    def make(self, real: torch.Tensor, dim: int | None) -> torch.Tensor:
        self.found.append(real)
        return real


class _Followed(_Group):
    """Eager tensors, the inputs of a step that is followed."""

    def __init__(self, origins: Iterable[Origin]) -> None:
        super().__init__()
        self._origins = iter(origins)

    def make(self, real: torch.Tensor, dim: int | None) -> torch.Tensor:
        return hand_out(real, next(self._origins))


def _member(batch: Any, key: Any) -> Any:
    """The part of a batch prefix that belongs to a member of a structure."""
    if batch is None or isinstance(batch, int):
        return batch
    if isinstance(batch, dict):
        return batch.get(key)
    if isinstance(batch, (list, tuple)):
        if isinstance(key, int) and key < len(batch):
            return batch[key]
        raise _bad_prefix(batch, key)
    return getattr(batch, str(key), None)


def _bad_prefix(batch: Any, key: Any) -> CaptureError:
    return CaptureError(
        f"batch={batch!r} has no entry for member {key!r}",
        where=str(user_site()),
        hint="batch is an int, None, or a structure like the values: batch=(0, None) or {'labels': 0}",
    )


def _check_prefix(batch: Any) -> None:
    if isinstance(batch, (bool, float, str)):
        raise CaptureError(
            f"batch must be an int, None, or a structure of them, got {batch!r}",
            where=str(user_site()),
            hint="koila.lazy(x, y, batch=0)",
        )


def _make_lazy(tree: Any, batch: Any, group: _Group) -> Any:
    if type(batch) is not int:
        _check_prefix(batch)
    if type(tree) is torch.Tensor:
        return _make_tensor_lazy(tree, batch, group)
    if type(tree) is LazyTensor:
        group.num_lazy += 1
        return tree
    if isinstance(tree, torch.Tensor):
        return _make_tensor_lazy(real_tensor(tree), batch, group)
    if isinstance(tree, (list, tuple)) and not isinstance(tree, torch.Size):
        return rebuild(type(tree), [_make_lazy(item, _member(batch, i), group) for i, item in enumerate(tree)])
    if isinstance(tree, dict):
        return type(tree)({name: _make_lazy(item, _member(batch, name), group) for name, item in tree.items()})
    if is_dataclass(tree) and not isinstance(tree, type):
        members = {f.name: _make_lazy(getattr(tree, f.name), _member(batch, f.name), group) for f in fields(tree)}
        return replace(tree, **members)
    return _user_mapping(tree, batch, group)


def _make_tensor_lazy(real: torch.Tensor, batch: Any, group: _Group) -> torch.Tensor:
    if not is_plain(real):
        events.count(f"inputs::left as they are::{type(real).__name__}, {real.layout}", site=user_site())
        return real
    return group.take(real, batch)


def _user_mapping(tree: Any, batch: Any, group: _Group) -> Any:
    """A mapping class that is no dict, such as transformers' BatchEncoding: a copy with lazy members."""
    data = getattr(tree, "data", None)
    if isinstance(data, dict) and hasattr(tree, "keys"):
        copy = tree.__class__.__new__(tree.__class__)
        copy.__dict__.update(tree.__dict__)
        copy.data = {name: _make_lazy(item, _member(batch, name), group) for name, item in data.items()}
        return copy
    return tree


def make_lazy(values: tuple[Any, ...], batch: Any, budget: int | None = None, strict: bool = True) -> Any:
    """See `koila.lazy`; without `strict`, tensors whose size is not that of the batch are lazy without one."""
    install()
    begin_other_step()
    return _begin(values, batch, _Group(budget, strict))


def make_eager(values: tuple[Any, ...], batch: Any, is_small: Callable[[int, bool], bool]) -> Any:
    """The same with eager tensors where the step that begins here is known and small; see `koila.capture.at_once`.

    Args:
        values: As in `koila.lazy`.
        batch: As in `koila.lazy`.
        is_small: Whether a program that may need so many bytes is far below what is free, and nobody asks for a budget;
            asked thoroughly or not.
    """
    install()
    tensors = _tensors_of(values, batch)
    if tensors is None:
        return make_lazy(values, batch)
    program = begin_step(tensors, batch, is_small)
    if program is None:
        return _begin_watched(values, batch)
    if here.position.has_recorded:
        run_carried()
        here.position.has_recorded = False
    if tensors is values:
        if len(values) == 1:
            return hand_out(values[0], program.inputs[0])
        return tuple(map(hand_out, values, program.inputs))
    return _make_values(values, batch, _Followed(program.inputs))


def _begin(values: tuple[Any, ...], batch: Any, group: _Group) -> Any:
    """Lazy tensors, with which a program begins."""
    transform = active_transform()
    if transform is not None:  # Its tensors are not what they seem, and it ends before anything would run.
        events.count("eager::lazy", site=user_site())
        events.count(f"eager_because::{transform}")
        return values[0] if len(values) == 1 else values
    run_carried()
    begin_program(user_frame(_getframe(2)))
    note_worker()
    found = _make_values(values, batch, group)
    # Tensors without dimensions have no batch, and the default names none for them.
    if group.shapes and group.size is None and batch != 0 and _names_a_batch(batch):
        warn_of_batch(batch, group.shapes)
    return found


def _begin_watched(values: tuple[Any, ...], batch: Any) -> Any:
    """The same for a step that is watched: its inputs are known by their place."""
    group = _Watched()
    found = _begin(values, batch, group)
    trace_inputs(group.made)
    return found


def _tensors_of(values: tuple[Any, ...], batch: Any) -> Sequence[torch.Tensor] | None:
    """The tensors that would be handed out; None where a transform is active, or one of them is lazy already."""
    if active_transform() is not None:
        return None
    for value in values:
        if type(value) is not torch.Tensor:
            break
        if not is_plain(value):
            return None
    else:
        return values
    group = _Found()
    _make_values(values, batch, group)
    return group.found if group.found and len(group.found) == group.num_lazy else None


def _make_values(values: tuple[Any, ...], batch: Any, group: _Group) -> Any:
    """What is handed out for all values of the call."""
    if len(values) == 1:
        return _make_value(values[0], _single(batch, values[0]), group)
    if type(batch) is int:
        return tuple([_make_value(value, batch, group) for value in values])
    return tuple([_make_value(value, _member(batch, index), group) for index, value in enumerate(values)])


def _make_value(value: Any, batch: Any, group: _Group) -> Any:
    """One value of the call; it is said if nothing of it is lazy."""
    if type(value) is torch.Tensor and type(batch) is int and is_plain(value):  # As mostly.
        return group.take(value, batch)
    before = group.num_lazy
    found = _make_lazy(value, batch, group)
    if group.num_lazy == before:
        warn_of_nothing_lazy(value)
    return found


def _names_a_batch(batch: Any) -> bool:
    return any(isinstance(leaf, int) for leaf in leaves(batch))


def _single(batch: Any, value: Any) -> Any:
    """`lazy(x, batch=(0,))` means the same as `lazy(x, batch=0)` for a tensor."""
    if isinstance(batch, (list, tuple)) and len(batch) == 1 and isinstance(value, torch.Tensor):
        return batch[0]
    return batch
