"""Outcomes: what a call on chunks gives and costs, found by running it on meta tensors.

*Takes* an operation and the layouts of its operands. *Gives* an `Outcome`: the layout of the result, which operands it
shares memory with, workspace and seconds. Layers of one shape ask once: what is known of a call of PyTorch's operators
is kept for equal ones.

Running each call on meta tensors is the check that every chunk has the shape its type predicts (Rule 3). That is
several times faster than on fake ones, which are asked where an operator has no kernel for meta tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from koila._torch import FakeTensorMode, OpOverload, has_kernel, in_turn, is_autograd_view, schema_of, storage_key
from koila._torch.fakes import cpu_mode, fake_on_cpu
from koila.analysis.rules.reduce import MOMENTS, moments_bytes
from koila.ir.cache import Cache
from koila.ir.meta_kernels import known_result
from koila.ir.tree import leaves, map_leaves
from koila.planning.cost import call_seconds, large_bytes
from koila.planning.devices import current_device, current_rules
from koila.planning.few_pixels import runs_unfolded, unfolded_bytes
from koila.planning.forms import Drawn, Form, form_tree, forms_of, like, meta_tree
from koila.planning.half_products import float32_bytes, runs_in_float32
from koila.planning.operation import HELPERS, Kernel, Operation, slice_whole
from koila.planning.step import Place
from koila.planning.workspace import retained_bytes, workspace_bytes

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call gives and costs."""

    form: Any
    """The result: a `Form`, or a tuple or list of them."""
    places: tuple[Place, ...]
    """For each result, the bytes of the storage that it makes, or (operand, place) of the storage that it shares."""
    views: tuple[bool, ...]
    """For each result, whether PyTorch calls it a view."""
    inside_bytes: int
    retained_bytes: int
    seconds: float
    fresh_bytes: int
    kernel: Kernel


_CONVOLUTIONS = {aten.convolution.default, aten.convolution_backward.default}
"""Operators whose kernels, and the layouts of their results, depend on sizes and devices."""
_known: Cache[Outcome] = Cache("outcome_cache", 1024)


_shown: Cache[bool] = Cache("shown_cache", 8192)
"""By call without its sizes, whether its results were dense, its own, and as large as the types say when it was run."""

Shapes = tuple[tuple[int, ...], ...]


def outcome_of(
    operation: Operation, operands: list[Any], chunk: int, whole: Any = None,
    expected: Callable[[], Shapes | None] = lambda: None,
) -> Outcome:  # fmt: skip
    """What a call gives for operands of these forms.

    Args:
        operation: The call.
        operands: The forms of its operands.
        chunk: Samples per chunk.
        whole: Its result for the whole batch, if there is one.
        expected: Gives the shapes of its results, as their types have them, if they do.
    """
    target = operation.target
    overload = isinstance(target, OpOverload)
    if not (overload or target in HELPERS or target in MOMENTS) or not all(map(_holds_no_tensor, operands)):
        return _find(operation, operands, chunk, whole, None)
    size = chunk if target in HELPERS else min(chunk, 1)
    key = (current_rules(), operation.signature, size, *map(_hashable, operands))
    return _known.get_or_add(key, lambda: _find(operation, operands, chunk, whole, expected()))


def _holds_no_tensor(operand: Any) -> bool:
    return type(operand) is Form or not any(isinstance(leaf, torch.Tensor) for leaf in leaves(operand))


def _hashable(tree: Any) -> Any:
    return tuple(map(_hashable, tree)) if isinstance(tree, (list, tuple)) else tree


def _find(operation: Operation, operands: list[Any], chunk: int, whole: Any, expected: Shapes | None) -> Outcome:
    metas = meta_tree(operands)
    args, kwargs = operation.applied(metas, start=0, stop=chunk)
    value = dense = _pointwise(operation.target, operands, whole)
    if value is None:
        dense = _dense(operation.target, operands, whole, expected)
        value = (
            _run(operation.target, args, kwargs)
            if dense is None
            else _shown_or_run(operation, operands, metas, dense, args, kwargs)
        )
    places, views = _aliases(value, metas) if dense is not value else _own(value)
    kernel = _kernel(operation.target, args, value, chunk)
    inside, retained = _workspaces(operation.target, args, kwargs, value, metas, kernel)
    seconds, fresh = call_seconds(operation.target, args, kwargs, value), large_bytes(value)
    return Outcome(form_tree(value), places, views, inside, retained, seconds, fresh, kernel)


def _kernel(target: Any, args: Any, value: Any, chunk: int) -> Kernel:
    """What computes a call; what is not cut keeps eager's kernels of convolutions."""
    if runs_in_float32(target, value):
        return Kernel.FLOAT32
    return Kernel.UNFOLDED if chunk and runs_unfolded(target, args, value) else Kernel.OWN


def _dense(target: Any, operands: list[Any], whole: Any, expected: Shapes | None) -> Any:
    """Dense results of the expected shapes, for a call that makes dense results; else None."""
    if expected is None or not (target in MOMENTS or _computes(target)):
        return None
    wholes = whole if isinstance(whole, (tuple, list)) else (whole,)
    if len(expected) != len(wholes) or not all(isinstance(w, torch.Tensor) and w.is_contiguous() for w in wholes):
        return None
    if not all(
        isinstance(operand, Form) and (operand.is_contiguous or target not in _CONVOLUTIONS) for operand in operands
    ):
        return None  # Sizes decide about the layout that a convolution gives.
    pairs = zip(expected, wholes, strict=True)
    made = tuple(torch.empty(shape, dtype=each.dtype, device="meta") for shape, each in pairs)
    return made if isinstance(whole, (tuple, list)) else made[0]


def _computes(target: Any) -> bool:
    """Whether it is an operator whose results are no views of its operands."""
    return isinstance(target, OpOverload) and not target.is_view and target is not aten.reshape.default


def _without_sizes(form: Form) -> Hashable:
    """What forms have in common at other sizes: dimensions of one element, and how the others lie in memory."""
    ones = tuple([min(size, 2) for size in form.shape])
    if form.is_contiguous:
        return form.dtype, ones, form.is_conj, form.is_neg
    order = tuple(sorted(range(len(ones)), key=lambda dim: (form.stride[dim], dim)))
    repeats = tuple([step == 0 for step in form.stride])
    return form.dtype, ones, form.is_conj, form.is_neg, order, repeats, form.is_dense


def _shown_or_run(
    operation: Operation, operands: list[Any], metas: list[Any], dense: Any, args: Any, kwargs: Any
) -> Any:
    """What a call gives: run on meta tensors, unless that gave dense results of their own before, at other sizes.

    Not every operator whose schema names no alias makes memory of its own: `unsafe_split` does not.
    """
    key = (operation.structure, tuple(map(_without_sizes, operands)))
    shown = _shown.get(key)
    if shown:
        return dense
    value = _run(operation.target, args, kwargs)
    if shown is None:
        made = [each for each in _tensors(value) if each is not None]
        owns = all(isinstance(place, int) for place in _aliases(value, metas)[0])
        _shown.add(key, owns and form_tree(made) == form_tree(_tensors(dense)))
    return value


def _run(target: Any, args: Any, kwargs: Any) -> Any:
    if kwargs.get("device") is not None:
        kwargs["device"] = "meta"
    known = known_result(target, args, kwargs) if isinstance(target, OpOverload) else None
    if known is not None:
        return known
    try:
        return target(*args, **kwargs)
    except NotImplementedError:
        return _run_on_fakes(target, args, kwargs)


@in_turn
def _run_on_fakes(target: Any, args: Any, kwargs: Any) -> Any:
    with FakeTensorMode():
        # An operator of an accelerator has no kernel for other devices.
        is_foreign = isinstance(target, OpOverload) and not has_kernel(target.name(), "CPU")
        device = current_device() if is_foreign else "cpu"
        fake = lambda leaf: like(leaf, device) if isinstance(leaf, torch.Tensor) else leaf  # noqa: E731
        kwargs = {name: value for name, value in kwargs.items() if name != "device"}
        result = target(*map_leaves(args, fake), **map_leaves(kwargs, fake))
    return map_leaves(result, lambda leaf: like(leaf, "meta") if isinstance(leaf, torch.Tensor) else leaf)


def _pointwise(target: Any, operands: list[Any], whole: Any) -> torch.Tensor | None:
    """The value of a pointwise call on contiguous operands, without asking PyTorch: most calls are of this kind."""
    if not isinstance(target, OpOverload) or torch.Tag.pointwise not in target.tags or target.is_view:
        return None
    if not isinstance(whole, torch.Tensor) or schema_of(target).is_mutable:
        return None
    if not all(isinstance(operand, Form) and operand.is_contiguous for operand in operands):
        return None
    shapes = {operand.shape for operand in operands}
    shape = max(shapes, key=len, default=())
    if any(size != 1 and size != shape[place] for other in shapes for place, size in enumerate(other, -len(other))):
        return None
    return torch.empty(shape, dtype=whole.dtype, device="meta")


def _tensors(value: Any) -> list[torch.Tensor | None]:
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [each if isinstance(each, torch.Tensor) and each.layout == torch.strided else None for each in values]


def _aliases(value: Any, metas: list[Any]) -> tuple[tuple[Place, ...], tuple[bool, ...]]:
    """Where the results of a call lie, and which of them are views."""
    known: dict[int, tuple[int, int]] = {}
    for number, operand in enumerate(metas):
        for place, tensor in enumerate(_tensors(operand)):
            if tensor is not None:
                known.setdefault(storage_key(tensor.untyped_storage()), (number, place))
    places: list[Place] = []
    for tensor in _tensors(value):
        storage = None if tensor is None else tensor.untyped_storage()
        shared = None if storage is None else known.get(storage_key(storage))
        places.append((0 if storage is None else storage.nbytes()) if shared is None else shared)
    return tuple(places), tuple(tensor is not None and is_autograd_view(tensor) for tensor in _tensors(value))


def _own(value: Any) -> tuple[tuple[Place, ...], tuple[bool, ...]]:
    """The same for dense results that make memory of their own."""
    tensors = _tensors(value)
    return tuple(0 if each is None else each.nbytes for each in tensors), (False,) * len(tensors)


def _workspaces(target: Any, args: Any, kwargs: Any, value: Any, metas: list[Any], kernel: Kernel) -> tuple[int, int]:
    """What a call allocates in its kernel, and what of it stays alive with its results."""
    if target is slice_whole:
        # Bits are opened to bytes in blocks.
        return (value.numel() if isinstance(args[0], Drawn) else 0), 0
    if target in MOMENTS:
        return moments_bytes(target, metas[0]), 0
    if not isinstance(target, OpOverload):
        return 0, 0
    if kernel is Kernel.FLOAT32:
        return float32_bytes([*metas, value]), 0
    if kernel is Kernel.UNFOLDED:
        return unfolded_bytes(target, args, value), 0
    types = {leaf.dtype for leaf in (*metas, value) if isinstance(leaf, torch.Tensor)}
    if target.is_view or (torch.Tag.pointwise in target.tags and len(types) == 1):
        return 0, 0
    return _ask_table(target, args, kwargs, value)


_fakes: Cache[torch.Tensor] = Cache("fake_cache", 256)
"""By layout, a fake tensor on the CPU: the operands of one convolution are the results of another."""


def _on_cpu(leaf: Any) -> Any:
    """What stands for an argument of a call on the CPU."""
    return _fakes.get_or_add(Form.of(leaf), lambda: fake_on_cpu(leaf)) if isinstance(leaf, torch.Tensor) else leaf


@in_turn
def _ask_table(target: Any, *call: Any) -> tuple[int, int]:
    on_cpu = target in _CONVOLUTIONS  # The choice of a kernel depends on the device.
    with cpu_mode() if on_cpu else nullcontext():
        args, kwargs, result = map_leaves(call, _on_cpu) if on_cpu else call
        hidden = workspace_bytes(target, args, result, kwargs)
        return hidden, retained_bytes(target, args, result, kwargs)


def storage_bytes(form: Any) -> list[int]:
    """By place, the bytes of the storage of a value that comes from outside."""
    return [0 if each is None else each.extent_bytes for each in forms_of(form)]
