"""`koila.lazy`: tensors in any structure become lazy, with one batch size.

*Takes* pytrees of tensors and where their batch is. *Gives* the same structures with lazy tensors in them.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

from koila import events
from koila._torch.transforms import active_transform
from koila.capture.advice import begin_program, note_worker, warn_of_batch, warn_of_nothing_lazy
from koila.capture.carried import run_carried
from koila.capture.lazy import LazyTensor, real_tensor
from koila.capture.patches import install
from koila.capture.record import input_value
from koila.errors import CaptureError
from koila.ir.ambient import watch_streams
from koila.ir.prepass import is_plain
from koila.ir.source import user_site
from koila.ir.tree import leaves, rebuild


class _Group:
    """The batch size of one call of `koila.lazy`, set by its first tensor."""

    def __init__(self, budget: int | None, strict: bool = True) -> None:
        self.budget = budget
        self.strict = strict
        """Whether a tensor of another size in the batch dimension is an error; else it is lazy without a batch."""
        self.size: int | None = None
        self.shape: tuple[int, ...] = ()
        self.num_lazy = 0
        """How many lazy tensors were found or made."""
        self.shapes: list[tuple[int, ...]] = []
        """Of those that were made."""

    def join(self, tensor: torch.Tensor, batch: int | None) -> int | None:
        """The tensor's batch dimension, or None if it has none."""
        if batch is None or not -tensor.ndim <= batch < tensor.ndim:
            return None
        dim = batch % tensor.ndim
        if self.size is None:
            self.size, self.shape = tensor.shape[dim], tuple(tensor.shape)
        elif tensor.shape[dim] != self.size:
            if not self.strict:
                return None
            raise CaptureError(
                f"batch sizes differ: {list(self.shape)} has {self.size} samples, "
                f"{list(tensor.shape)} has {tensor.shape[dim]} in dim {dim}",
                where=str(user_site()),
                hint="say where the batch is, one entry per value: koila.lazy(x, table, batch=(0, None))",
            )
        return dim


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
    _check_prefix(batch)
    if isinstance(tree, LazyTensor):
        group.num_lazy += 1
        return tree
    if isinstance(tree, torch.Tensor):
        real = real_tensor(tree)
        if not is_plain(real):
            events.count(f"inputs::left as they are::{type(real).__name__}, {real.layout}", site=user_site())
            return real
        group.num_lazy += 1
        group.shapes.append(tuple(real.shape))
        if real.device.type != "cpu":
            watch_streams()
        dim = group.join(real, batch if isinstance(batch, int) else None)
        return LazyTensor._wrap(input_value(real, dim, group.budget))
    if isinstance(tree, (list, tuple)) and not isinstance(tree, torch.Size):
        return rebuild(type(tree), [_make_lazy(item, _member(batch, i), group) for i, item in enumerate(tree)])
    if isinstance(tree, dict):
        return type(tree)({name: _make_lazy(item, _member(batch, name), group) for name, item in tree.items()})
    if is_dataclass(tree) and not isinstance(tree, type):
        members = {f.name: _make_lazy(getattr(tree, f.name), _member(batch, f.name), group) for f in fields(tree)}
        return replace(tree, **members)
    return _user_mapping(tree, batch, group)


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
    transform = active_transform()
    if transform is not None:  # Its tensors are not what they seem, and it ends before anything would run.
        events.count("eager::lazy", site=user_site())
        events.count(f"eager_because::{transform}")
        return values[0] if len(values) == 1 else values
    run_carried()
    begin_program()
    note_worker()
    group = _Group(budget, strict)
    if len(values) == 1:
        found = _make_value(values[0], _single(batch, values[0]), group)
    else:
        found = tuple(_make_value(value, _member(batch, index), group) for index, value in enumerate(values))
    # Tensors without dimensions have no batch, and the default names none for them.
    if group.shapes and group.size is None and batch != 0 and _names_a_batch(batch):
        warn_of_batch(batch, group.shapes)
    return found


def _make_value(value: Any, batch: Any, group: _Group) -> Any:
    """One value of the call; it is said if nothing of it is lazy."""
    before = group.num_lazy
    found = _make_lazy(value, batch, group)
    if group.num_lazy == before:
        warn_of_nothing_lazy(value)
    return found


def _names_a_batch(batch: Any) -> bool:
    return any(isinstance(leaf, int) for leaf in leaves(batch))


def _single(batch: Any, value: Any) -> Any:
    """`lazy(x, batch=(0,))` means the same as `lazy(x, batch=0)` for a tensor."""
    if isinstance(value, torch.Tensor) and isinstance(batch, (list, tuple)) and len(batch) == 1:
        return batch[0]
    return batch
