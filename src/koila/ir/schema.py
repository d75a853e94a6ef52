"""Arguments of operators by the names in their schemas.

*Takes* an operator, and the arguments of a call. *Gives* the arguments by name, in the schema's order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from koila._torch import OpOverload, schema_of


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
def given_arguments(target: OpOverload) -> tuple[tuple[str, str], ...]:
    """Name and type of each argument that is no memory for a result: equal for the forms of one operator.

    >>> import torch
    >>> given_arguments(torch.ops.aten.mm.out) == given_arguments(torch.ops.aten.mm.default)
    True
    """
    return tuple((each.name, str(each.type)) for each in schema_of(target).arguments if not each.is_out)


@cache
def _defaults(target: OpOverload) -> dict[str, Any]:
    arguments = schema_of(target).arguments
    return {each.name: each.default_value if each.has_default_value() else None for each in arguments}
