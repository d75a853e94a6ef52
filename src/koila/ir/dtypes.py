"""Mixtures of dtypes that eager refuses: fake kernels and decompositions are more lenient than the real ones.

*Takes* a call of an operator on fake tensors. *Gives* whether the real kernel refuses it, by asking it: it is called on
tensors of zeros with the same dtypes, of one element each. Only unusual mixtures are asked for, so that it costs
nothing in ordinary programs. A kernel that fails on so small tensors for another reason is taken to accept.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

import torch

from koila._torch import without_modes
from koila.ir.tree import leaves, map_leaves

_ABOUT_DTYPES = re.compile(r"d(ata)?[ _]?type|scalar type|same type", re.IGNORECASE)
_USUAL = frozenset({torch.int64, torch.bool, torch.uint8})
"""Dtypes of indices and masks, which stand beside any other."""


def is_refused(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether eager's kernel refuses the dtypes of these operands."""
    operands = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if len({operand.dtype for operand in operands} - _USUAL) < 2 or not all(map(_is_plain, operands)):
        return False
    if torch.Tag.nondeterministic_seeded in func.tags:
        return False  # The generator must not move.
    small = lambda leaf: _small(leaf) if isinstance(leaf, torch.Tensor) else leaf  # noqa: E731
    with without_modes(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            func(*map_leaves(args, small), **map_leaves(kwargs, small))
        except Exception as error:
            return bool(_ABOUT_DTYPES.search(str(error)))
    return False


def _is_plain(operand: torch.Tensor) -> bool:
    return operand.layout == torch.strided and operand.device.type == "cpu"


def _small(operand: torch.Tensor) -> torch.Tensor:
    return torch.zeros([1] * operand.dim(), dtype=operand.dtype)
