"""Reuse: a result is written into the memory of an operand that nobody reads afterwards.

*Takes* a call. *Gives* the operands that it could be written into, and the form of its operator that does so. It costs
nothing: the peak is lower by the result, and the system hands out fewer pages. Pointwise kernels allow it for every
operand, operators with an in-place form for their first, a softmax along contiguous rows for every operand of the
result's shape. `koila.planning.storages.reused` decides, for a whole body, where it is done.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx

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
    """The form of an operator that writes into given memory and allocates none of its own."""
    if target in _IN_PLACE:
        return Variant(_IN_PLACE[target], None)
    if target in _SOFTMAXES:
        return _with_out(target, [_SOFTMAXES[target]])
    if not isinstance(target, torch._ops.OpOverload) or target in _NOT_IN_PLACE or target.is_view:
        return None
    if torch.Tag.pointwise not in target.tags:
        return None
    packet = getattr(aten, target.overloadpacket.__name__, None)
    if packet is not target.overloadpacket or target._schema.is_mutable:
        return None
    found = _with_out(target, [getattr(packet, name) for name in packet.overloads()])
    return _in_place(target) if found is None else found


def _arguments(target: Any) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in target._schema.arguments if not argument.is_out]


def _with_out(target: Any, others: list[Any]) -> Variant | None:
    for other in others:
        outs = [argument.name for argument in other._schema.arguments if argument.is_out]
        if len(outs) == 1 and _arguments(other) == _arguments(target):
            # A kernel of its own: the forms that are made from others compute the result first, and copy it.
            own = torch._C._dispatch_has_kernel_for_dispatch_key(other.name(), "CPU")
            return Variant(other, outs[0]) if own else None
    return None


def _in_place(target: Any) -> Variant | None:
    packet = getattr(aten, f"{target.overloadpacket.__name__}_", None)
    overload = getattr(packet, target._overloadname, None)
    same = overload is not None and _arguments(overload) == _arguments(target)
    return Variant(overload, None) if same else None


def _layout(value: torch.Tensor) -> tuple[Any, ...]:
    return (tuple(value.shape), value.stride(), value.dtype, value.layout)


def candidates(node: fx.Node) -> tuple[fx.Node, ...]:
    """Operands whose memory a call could write its result into, if they are not needed afterwards. Noted on the node.

    The notes speak of operands by their number: they survive copying.
    """
    if "reusable" not in node.meta:
        node.meta["reusable"] = _candidates(node)
    operands = node.all_input_nodes
    return tuple(operands[number] for number in node.meta["reusable"])


def _candidates(node: fx.Node) -> tuple[int, ...]:
    variant = variant_of(node.target)
    value = node.meta.get("val")
    if variant is None or not isinstance(value, torch.Tensor) or "fused" in node.meta or not _fills(value):
        return ()
    last = value.ndim - 1
    if node.target in _SOFTMAXES:
        dim: Any = node.args[2 if "backward" in str(node.target) else 1]
        if dim not in (-1, last) or not value.is_contiguous():
            return ()
    direct = [argument for argument in node.args if isinstance(argument, fx.Node)]
    if variant.out is None:
        direct = [argument for argument in node.args[:1] if isinstance(argument, fx.Node)]
    found = []
    for number, operand in enumerate(node.all_input_nodes):
        other = operand.meta.get("val")
        if operand not in direct or operand.op != "call_function" or not isinstance(other, torch.Tensor):
            continue
        if _fills(other) and _layout(other) == _layout(value) and not (other.is_conj() or other.is_neg()):
            found.append(number)
    return tuple(found)


def _fills(value: torch.Tensor) -> bool:
    """Whether a tensor is all of its storage, each element once."""
    size = value.numel() * value.element_size()
    return size > 0 and value.untyped_storage().nbytes() == size and not torch._debug_has_internal_overlap(value)


def is_new(maker: fx.Node) -> bool:
    """Whether a call certainly makes memory of its own; a reshape may give a view where sizes alone do not tell."""
    return isinstance(maker.target, torch._ops.OpOverload) and maker.target is not aten.reshape.default
