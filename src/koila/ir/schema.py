"""Arguments of operators by the names in their schemas.

*Takes* an operator and the arguments of a call. *Gives* a dict with every argument of the schema, in its order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from torch._ops import OpOverload


def named_arguments(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name, defaults filled in; None where one has no default and is not given.

    >>> import torch
    >>> named_arguments(torch.ops.aten.add.Tensor, (1, 2), {"alpha": 3})
    {'self': 1, 'other': 2, 'alpha': 3}
    >>> named_arguments(torch.ops.aten.sum.dim_IntList, (1, [0]), {})
    {'self': 1, 'dim': [0], 'keepdim': False, 'dtype': None}
    """
    defaults = _defaults(target)
    return {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}


@cache
def _defaults(target: OpOverload) -> dict[str, Any]:
    arguments = target._schema.arguments
    return {each.name: each.default_value if each.has_default_value() else None for each in arguments}
