"""Given memory: operators that can write their result into memory that is there.

*Takes* a step. *Gives* whether its result can be written into given memory, and the function that does so: the
operator's own `out` form, or one that is written here and calls what the operator itself calls. The numbers are the
same to the last bit. An `out` form counts if it has a kernel of its own on a CPU: those that PyTorch makes of others
compute the result first, and copy it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from koila._torch import OpOverload, schema_of
from koila.planning.forms import Form
from koila.planning.in_place import with_out
from koila.planning.operation import Kernel
from koila.planning.step import Kind, Step

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Filler:
    """A function that writes a result into given memory."""

    target: Callable[..., Any]
    out: str
    """The name of the argument for the memory."""


def _copy(source: torch.Tensor, *, out: torch.Tensor, **_: Any) -> torch.Tensor:
    """For `clone` and `_to_copy`: the memory has the layout and the dtype that they would give."""
    return out.copy_(source)


def _select_backward(
    gradient: torch.Tensor, sizes: Any, dim: int, index: int, *, out: torch.Tensor
) -> torch.Tensor:  # fmt: skip
    out.zero_().select(dim, index).copy_(gradient)
    return out


def _slice_backward(
    gradient: torch.Tensor, sizes: Any, dim: int, start: int, end: int, step: int, *, out: torch.Tensor
) -> torch.Tensor:
    aten.slice.Tensor(out.zero_(), dim, start, end, step).copy_(gradient)
    return out


def _embedding(
    weight: torch.Tensor, indices: torch.Tensor, *_: Any, out: torch.Tensor, **__: Any
) -> torch.Tensor:  # fmt: skip
    torch.index_select(weight, 0, indices.reshape(-1), out=out.view(-1, weight.shape[1]))
    return out


def _masked_fill(source: torch.Tensor, mask: torch.Tensor, value: Any, *, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(source).masked_fill_(mask, value)


def _full(sizes: Any, value: Any, *, out: torch.Tensor, **_: Any) -> torch.Tensor:
    return out.fill_(value)


def _full_like(source: Any, value: Any, *, out: torch.Tensor, **_: Any) -> torch.Tensor:
    return out.fill_(value)


def _zeros(source: Any, *_: Any, out: torch.Tensor, **__: Any) -> torch.Tensor:
    return out.zero_()


_WRITTEN_HERE: dict[Any, Callable[..., torch.Tensor]] = {
    aten.clone.default: _copy,
    aten._to_copy.default: _copy,
    aten.select_backward.default: _select_backward,
    aten.slice_backward.default: _slice_backward,
    aten.embedding.default: _embedding,
    aten.masked_fill.Scalar: _masked_fill,
    aten.masked_fill.Tensor: _masked_fill,
    aten.full.default: _full,
    aten.full_like.default: _full_like,
    aten.zeros.default: _zeros,
    aten.zeros_like.default: _zeros,
    aten.new_zeros.default: _zeros,
}
_COPIES = frozenset(
    {
        aten._fft_c2c.default,
        aten._fft_c2r.default,
        aten._fft_r2c.default,
        aten.cholesky.default,
        aten.histc.default,
        aten.index_reduce.default,
        aten.isin.Tensor_Tensor,
        aten.linalg_householder_product.default,
        aten.linalg_ldl_solve.default,
        aten.linalg_lu_solve.default,
        aten.masked_select.default,
        aten.mvlgamma.default,
        aten.ormqr.default,
    }
)
"""Operators whose own `out` form computes the result elsewhere all the same, and copies it."""


@cache
def filler_of(target: Any) -> Filler | None:
    """The function that writes the result of an operator into given memory, if there is one."""
    if target in _WRITTEN_HERE:
        return Filler(_WRITTEN_HERE[target], "out")
    if not isinstance(target, OpOverload) or target.is_view or target in _COPIES:
        return None
    if torch.Tag.nondeterministic_seeded in target.tags:
        return None
    packet = getattr(aten, target.overloadpacket.__name__, None)
    if packet is not target.overloadpacket or schema_of(target).is_mutable:
        return None
    if any(argument.name == "reduction" for argument in schema_of(target).arguments):
        return None  # Losses put what they reduce into the memory of their result, which is enlarged for it.
    found = with_out(target, [getattr(packet, name) for name in packet.overloads()])
    return None if found is None or found.out is None else Filler(found.target, found.out)


_MAY_BE_VIEWS = frozenset({aten.reshape.default, aten.view.default, aten.contiguous.default})


def can_fill(step: Step) -> bool:
    """Whether the only result of a step can be written into given memory, which it fills."""
    if step.kind is not Kind.RUN or len(step.places) != 1 or step.is_view or not step.fills_storage:
        return False
    form = step.work.form
    if (
        not isinstance(form, Form)
        or not form.is_dense
        or form.is_conj
        or form.is_neg
        or step.work.kernel is not Kernel.OWN
    ):
        return False
    exact = step.places[0] == form.num_bytes and not step.retained_bytes
    return exact and filler_of(step.work.target) is not None


_READ_STORAGES = frozenset({aten.slice_scatter.default, aten.select_scatter.default, aten.diagonal_scatter.default})
"""Operators that copy the whole storage of what they read, and write into the copy."""


@cache
def _reads_storage(target: Any) -> bool:
    """Whether an operator looks beyond the tensors that it is given, at their storage: at all of it, or from its start
    on."""
    return target in _READ_STORAGES or any(each.name == "storage_offset" for each in schema_of(target).arguments)


def needs_own_operands(step: Step) -> bool:
    """Whether what a step reads must have memory of its own: it may be held afterwards, by code that is not PyTorch's
    or by a result that may be a view although sizes alone do not tell; or the step looks at the whole storage of it.
    """
    if step.holds_operands or step.kind is Kind.SUB_PLAN:
        return True
    if step.kind is not Kind.RUN:
        return False
    target = step.work.target
    owns = any(isinstance(place, int) for place in step.places)
    is_plain = isinstance(target, OpOverload) and target.namespace in ("aten", "prims")
    return not is_plain or _reads_storage(target) or (owns and target in _MAY_BE_VIEWS)
