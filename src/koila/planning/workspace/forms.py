"""Forms of operators that write into given memory (`add_`, `add.out`): what they share with the plain one.

*Takes* an operator. *Gives* its `Form`: the operator with the same arguments that returns a new result, whose row in
the table holds for it, too. Forms without a kernel of their own compute a new result first, and copy it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch

from koila._torch import OpOverload, OpOverloadPacket, schema_of
from koila.ir.schema import given_arguments


@dataclass(frozen=True, slots=True)
class Form:
    """How an operator is related to the one that returns a new result."""

    plain: OpOverload
    """The operator whose row holds; itself, where nothing is written and where none is found."""
    writes: bool
    """Whether the result is memory that was given: its type need not be the one that is computed in."""
    copies: bool
    """Whether the result is computed elsewhere, and copied."""


@cache
def form_of(target: OpOverload) -> Form:
    """The form of an operator.

    >>> aten = torch.ops.aten
    >>> print(form_of(aten.add_.Tensor).plain, form_of(aten.add.out).plain, form_of(aten.mm.out).copies)
    aten.add.Tensor aten.add.Tensor False
    >>> form_of(aten.convolution.out).copies
    True
    """
    if not schema_of(target).is_mutable:
        return Form(target, writes=False, copies=False)
    same = (other for other in _relatives(target) if given_arguments(other) == given_arguments(target))
    has_kernel = torch.Tag.generated not in target.tags
    return Form(next(same, target), writes=True, copies=torch.Tag.out in target.tags and not has_kernel)


def _relatives(target: OpOverload) -> Iterator[OpOverload]:
    """Operators of the same name that write nothing."""
    packet = target.overloadpacket
    name = packet.__name__
    packets = [packet, getattr(getattr(torch.ops, target.namespace), name[:-1], None) if name.endswith("_") else None]
    for each in packets:
        if isinstance(each, OpOverloadPacket):
            overloads = (getattr(each, overload) for overload in each.overloads())
            yield from (other for other in overloads if not schema_of(other).is_mutable)
