"""Results in place: an operator writes its result into the memory of an operand that nobody reads afterwards.

*Takes* an operation. *Gives* the operands that it could be written into, and the variant of its operator that does so.
It costs nothing: the peak is lower by the result, and the system hands out fewer pages. Pointwise kernels allow it for
every operand, operators with an in-place variant for their first, a softmax along contiguous rows for every operand of
the result's shape. `koila.planning.aliasing.Overwrites` decides, for a whole schedule, where it is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from koila._torch import OpOverload, has_kernel, overload_name, schema_of
from koila.planning.forms import Form
from koila.planning.operation import Operation, Ref

aten = torch.ops.aten

_IN_PLACE = {
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.index_put.default: aten.index_put_.default,
    aten.masked_fill.Tensor: aten.masked_fill_.Tensor,
}
"""Operators that change a part of their first operand."""
_SOFTMAXES = {
    aten._softmax.default: aten._softmax.out,
    aten._log_softmax.default: aten._log_softmax.out,
    aten._softmax_backward_data.default: aten._softmax_backward_data.out,
    aten._log_softmax_backward_data.default: aten._log_softmax_backward_data.out,
}
"""Kernels that read a row before they write it, if rows are contiguous."""
_NOT_IN_PLACE = {aten.mvlgamma.default, aten.rrelu.default}
"""Pointwise operators whose in-place forms allocate a result all the same."""


@dataclass(frozen=True, slots=True)
class Variant:
    """How an operator writes its result into an operand."""

    target: Any
    out: str | None
    """The name of the argument for the result; None: the first operand is changed in place."""


@cache
def variant_of(target: Any) -> Variant | None:
    """The variant of an operator that writes into given memory and allocates none of its own."""
    if target in _IN_PLACE:
        return Variant(_IN_PLACE[target], None)
    if target in _SOFTMAXES:
        return with_out(target, [_SOFTMAXES[target]])
    if not isinstance(target, OpOverload) or target in _NOT_IN_PLACE or target.is_view:
        return None
    if torch.Tag.pointwise not in target.tags:
        return None
    packet = getattr(aten, target.overloadpacket.__name__, None)
    if packet is not target.overloadpacket or schema_of(target).is_mutable:
        return None
    found = with_out(target, [getattr(packet, name) for name in packet.overloads()])
    return _in_place(target) if found is None else found


def _arguments(target: Any) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in schema_of(target).arguments if not argument.is_out]


def with_out(target: Any, others: list[Any]) -> Variant | None:
    """The form of an operator among others that writes into given memory, if a kernel of its own does so."""
    for other in others:
        outs = [argument.name for argument in schema_of(other).arguments if argument.is_out]
        if len(outs) == 1 and _arguments(other) == _arguments(target):
            # A kernel of its own: the forms that are made from others compute the result first, and copy it.
            own = has_kernel(other.name(), "CPU")
            return Variant(other, outs[0]) if own else None
    return None


def _in_place(target: Any) -> Variant | None:
    packet = getattr(aten, f"{target.overloadpacket.__name__}_", None)
    overload = getattr(packet, overload_name(target), None)
    same = overload is not None and _arguments(overload) == _arguments(target)
    return Variant(overload, None) if same else None


def overwritable(operation: Operation, result: Any, operands: Sequence[Form | None]) -> tuple[int, ...]:
    """The positions of operands whose memory a call could write its result into, if nobody needs them afterwards.

    `operands` has a form for each operand that is all of its storage and was made by the schedule, and None for others.
    """
    variant = variant_of(operation.target)
    if variant is None or not isinstance(result, Form) or not result.is_dense or result.num_bytes == 0:
        return ()
    if operation.target in _SOFTMAXES:
        dim = operation.args[2 if "backward" in str(operation.target) else 1]
        if dim not in (-1, len(result.shape) - 1) or not result.is_contiguous:
            return ()
    args = operation.args if variant.out is not None else operation.args[:1]
    direct = {argument.position for argument in args if isinstance(argument, Ref)}
    same = (result.shape, result.stride, result.dtype, False, False)
    return tuple(
        position
        for position, form in enumerate(operands)
        if form is not None and position in direct
        if (form.shape, form.stride, form.dtype, form.is_conj, form.is_neg) == same
    )
