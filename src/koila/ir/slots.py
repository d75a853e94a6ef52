"""Slots: numbers among the arguments of a call that may vary between steps without making another program.

*Takes* a torch function and a leaf of its arguments. *Gives* whether the leaf is a slot: then it is no part of the
program's key, and a run takes the number of its own step. A number that is not, an index or a size, say, is part of the
key; `koila.ir.formulas` finds how a program depends on those.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

_T = torch.Tensor

NONE, ANY_FLOAT, OPERANDS, POSITIVE = 0, 1, 2, 3
"""Which numbers of a function are slots: none; floats but the special ones; all but a few, like tensors; positive
floats, because the function refuses others."""

_ARITHMETIC = {
    torch.mul, torch.div, torch.add, torch.sub, _T.mul, _T.div, _T.add, _T.sub, _T.mul_, _T.div_, _T.add_, _T.sub_,
    _T.__mul__, _T.__rmul__, _T.__imul__, _T.__add__, _T.__radd__, _T.__iadd__, _T.__sub__, _T.__rsub__,
    _T.__isub__, _T.__truediv__, _T.__rtruediv__, _T.__itruediv__,
}  # fmt: skip
_OTHERS = (
    "clamp", "clamp_", "clip", "clip_", "clamp_min", "clamp_max", "pow", "pow_", "__pow__", "__ipow__", "masked_fill",
    "masked_fill_", "fill_", "lerp", "lerp_", "addcmul", "addcmul_", "addcdiv", "addcdiv_", "where", "full_like",
    "new_full", "rsub", "true_divide", "multiply", "subtract", "divide", "dropout", "dropout1d", "dropout2d",
    "dropout3d", "leaky_relu", "elu", "hardtanh", "softplus", "softshrink", "hardshrink", "threshold", "huber_loss",
    "smooth_l1_loss", "layer_norm", "group_norm", "rms_norm", "margin_ranking_loss", "__gt__", "__ge__",
    "__lt__", "__le__", "gt", "ge", "lt", "le",
)  # fmt: skip
"""Functions that use a float as it is, or in one of `analysis.trace.SLOT_FORMS`: tests show it for each of them."""
_SLOTTED = dict.fromkeys(_ARITHMETIC, OPERANDS)
for _place in (torch, _T, F):
    for _name in _OTHERS:
        if callable(_function := getattr(_place, _name, None)):
            _SLOTTED.setdefault(_function, ANY_FLOAT)
_SLOTTED[F.batch_norm] = POSITIVE

_SPECIAL = frozenset({0.0, 1.0, 2.0, 3.0, -1.0, -2.0, 0.5, -0.5, float("inf"), float("-inf")})
"""Floats for which operators have a way of their own: a power of two is a product, nothing is dropped out."""
_FEW = (0, 1, -1)


def slotted_by(func: Any) -> int:
    """Which numbers of a function are slots.

    >>> slotted_by(torch.mul) == OPERANDS, slotted_by(F.dropout) == ANY_FLOAT, slotted_by(torch.sum) == NONE
    (True, True, True)
    """
    return _SLOTTED.get(func, NONE)


def is_slot(leaf: Any, slotted: int) -> bool:
    """Whether a leaf of the arguments is a slot.

    >>> is_slot(0.3, ANY_FLOAT), is_slot(0.5, ANY_FLOAT), is_slot(7, ANY_FLOAT), is_slot(7, OPERANDS)
    (True, False, False, True)
    """
    kind = type(leaf)
    if slotted == POSITIVE:
        return kind is float and leaf > 0
    if kind is float:
        return bool(slotted) and leaf == leaf and (slotted == OPERANDS or leaf not in _SPECIAL)
    return kind is int and slotted == OPERANDS and leaf not in _FEW
