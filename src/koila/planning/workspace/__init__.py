"""Workspaces: what operators allocate inside their kernels, beyond their results.

*Takes* an operator, its arguments and its result, as fake or as real tensors, and the processor. *Gives* bytes, from
formulas that `python -m benchmarks.calibrate` checks against a malloc hook. They describe the CPU kernels of torch
2.13. Most of what is hidden is copies: of operands into a layout or a type that the kernel wants. An operator is a line
in the table of its family; pointwise ones that mix types need no line; all others have no workspace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from koila._torch import OpOverload
from koila.ir.schema import given_arguments, named_arguments
from koila.ir.tree import leaves
from koila.planning.devices import current_rules
from koila.planning.workspace import (
    accelerators,
    attention,
    convolutions,
    images,
    indexing,
    losses,
    norms,
    pointwise,
    products,
    recurrent,
    reductions,
    transforms,
)
from koila.planning.workspace.accelerators import kernel_bytes
from koila.planning.workspace.forms import Form, form_of
from koila.planning.workspace.kernel_call import HALF, Formula, KernelCall, num_bytes
from koila.planning.workspace.onednn_convolutions import PRIMITIVE_BYTES
from koila.planning.workspace.processor import Isa, Processor, this_processor

__all__ = ["FAMILIES", "HALF", "PRIMITIVE_BYTES", "Isa", "Processor", "may_allocate", "num_bytes", "retained_bytes",
           "this_processor", "workspace_bytes"]  # fmt: skip

FAMILIES: dict[str, dict[Any, Formula]] = {
    "pointwise": pointwise.ROWS,
    "products": products.ROWS,
    "convolutions": convolutions.ROWS,
    "attention": attention.ROWS,
    "recurrent": recurrent.ROWS,
    "norms": norms.ROWS,
    "reductions": reductions.ROWS,
    "losses": losses.ROWS,
    "images": images.ROWS,
    "indexing": indexing.ROWS,
    "transforms": transforms.ROWS,
}
_TABLE = {target: formula for rows in FAMILIES.values() for target, formula in rows.items()}
_RETAINED = {**losses.RETAINED, **recurrent.RETAINED}


def workspace_bytes(
    target: OpOverload,
    args: Sequence[Any],
    result: Any,
    kwargs: Mapping[str, Any] | None = None,
    processor: Processor | None = None,
) -> int:
    """The most that an operator allocates while it runs, beyond its results as their shapes say.

    Forms that write into given memory (`add_`, `add.out`) are known by the row of the plain one.

    Args:
        target: The operator.
        args: Its arguments; tensors may be fake.
        result: What it returns.
        kwargs: Its arguments by name.
        processor: Where it runs; this machine, if not given.

    >>> a, b = torch.ones(512, 512)[:, ::2], torch.ones(256, 256)
    >>> workspace_bytes(torch.ops.aten.mm.default, (a, b), a @ b) == a.numel() * 4
    True
    """
    if not current_rules().runs_cpu_kernels:
        return kernel_bytes(target, args, result)
    form, formula = _row(target)
    copied = _new_bytes(result) if form.copies else 0
    if formula is None or (formula is pointwise.casts and _has_one_type((*args, result), kwargs)):
        return copied
    return copied + int(formula(_kernel_call(target, args, result, kwargs, processor)))


def may_allocate(target: OpOverload, args: Sequence[Any], result: Any, kwargs: Mapping[str, Any] | None = None) -> bool:
    """Whether an operator may allocate anything beyond its results, with operands of these types at any sizes."""
    if not current_rules().runs_cpu_kernels:
        return target in accelerators.TABLE
    form, formula = _row(target)
    is_plain = formula is None or (formula is pointwise.casts and _has_one_type((*args, result), kwargs))
    return form.copies or not is_plain


def retained_bytes(
    target: OpOverload,
    args: Sequence[Any],
    result: Any,
    kwargs: Mapping[str, Any] | None = None,
    processor: Processor | None = None,
) -> int:
    """What stays alive with the results beyond what their shapes say; `workspace_bytes` counts it, too.

    Reduced losses keep the storage of the unreduced ones, and fake RNN layers have no workspace for the backward.
    """
    if not current_rules().runs_cpu_kernels:
        return 0
    formula = _RETAINED.get(target)
    return 0 if formula is None else int(formula(_kernel_call(target, args, result, kwargs, processor)))


def _kernel_call(
    target: OpOverload, args: Sequence[Any], result: Any, kwargs: Mapping[str, Any] | None, processor: Processor | None
) -> KernelCall:
    writes = form_of(target).writes
    given = named_arguments(target, args, kwargs or {})
    if writes:
        given = {name: given[name] for name, _ in given_arguments(target)}
    return KernelCall(given, result, processor or this_processor(), writes)


def _new_bytes(result: Any) -> int:
    """Results that are computed first, and then copied into the memory that was given."""
    return sum(num_bytes(leaf) for leaf in leaves(result) if isinstance(leaf, torch.Tensor))


def _has_one_type(values: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bool:
    """Whether all tensors of a call have the type of the result, the last of `values`: most calls end here."""
    dtype = getattr(values[-1], "dtype", None)
    others = values if not kwargs else (*values, *kwargs.values())
    return all(value.dtype is dtype for value in others if isinstance(value, torch.Tensor))


@cache
def _row(target: OpOverload) -> tuple[Form, Formula | None]:
    form = form_of(target)
    if form.plain in _TABLE:
        return form, _TABLE[form.plain]
    return form, pointwise.casts if torch.Tag.pointwise in form.plain.tags else None
