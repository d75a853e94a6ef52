"""Structure and numbers: a program without its sizes, and its sizes.

*Takes* a `Graph`. *Gives* `structure_of`, which two programs share if they make the same calls, whatever the sizes of
their inputs and the numbers among their arguments; and `numbers_of`, these numbers in a fixed order: the sizes and
strides of the leaves, the numbers among the arguments, the sizes of every result. Together they say as much as the key.

A user's own code (an `autograd.Function`, an operator of a library) may compute anything from sizes, `T // 8`, say, and
nobody records what. So a call of it belongs to the structure with its sizes, and nothing is derived for other ones.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from math import floor, isfinite
from typing import Any

import torch

from koila._torch.functions import is_pytorchs_own
from koila.ir.cache import HashedOnce
from koila.ir.graph import Graph
from koila.ir.node import Node, Value
from koila.ir.prepass import PrePass

Number = int | float


def call_structure(key: tuple[Any, ...]) -> Hashable:
    """What is left of the key of one call without numbers."""
    function, context, statics, metas, *rest = key
    return function, context, _without_numbers(statics), tuple((_kind(p), leaf) for p, leaf in metas), *rest


def call_numbers(key: tuple[Any, ...]) -> tuple[Number, ...]:
    """The numbers of one call: sizes and strides of its operands, then those among its arguments."""
    _, _, statics, metas, *_ = key
    given = [number for prepass, _ in metas for number in (*prepass.shape, *prepass.stride)]
    return (*given, *(number for static in statics for number in _numbers_in(static)))


def structure_of(graph: Graph) -> Hashable:
    """What is left of a program's key without numbers.

    >>> import koila
    >>> short = structure_of(koila.graph(koila.lazy(torch.ones(2, 5)).sum(1)))
    >>> short == structure_of(koila.graph(koila.lazy(torch.ones(2, 7)).sum(1)))
    True
    """
    known = graph.remembered
    if "structure" not in known:
        known["structure"] = HashedOnce(_structure(graph))
    return known["structure"]


def _structure(graph: Graph) -> Hashable:
    calls, metas, batches, counting, outputs = graph.key
    nodes = tuple(
        (function, context, *_given(node, statics), operands, len(node.draws), _results(node))
        for ((function, context, statics), operands), node in zip(calls, graph.nodes, strict=True)
    )
    return nodes, tuple((*_kind(prepass), is_leaf) for prepass, is_leaf in metas), batches, counting, outputs


def _given(node: Node, statics: Any) -> tuple[Any, ...]:
    """The static arguments of a call without numbers; with them and the sizes of the operands for a user's own code."""
    if is_pytorchs_own(node.func):
        return (_without_numbers(statics),)
    return statics, tuple(tuple(_tensor_of(operand).shape) for operand in node.operands)


def _tensor_of(operand: Value | torch.Tensor) -> PrePass | torch.Tensor:
    return operand.prepass if isinstance(operand, Value) else operand


def numbers_of(graph: Graph) -> tuple[Number, ...]:
    """The numbers of a program, in a fixed order; programs of one structure have equally many.

    >>> import koila
    >>> numbers_of(koila.graph(koila.lazy(torch.ones(2, 5)).sum(1)))
    (2, 5, 5, 1, 1, 2)
    """
    return tuple(_numbers(graph))


def _numbers(graph: Graph) -> Iterator[Number]:
    calls, metas, *_ = graph.key
    for prepass, _ in metas:
        yield from (*prepass.shape, *prepass.stride)
    for ((_, _, statics), _), node in zip(calls, graph.nodes, strict=True):
        for static in statics if isinstance(statics, tuple) else ():
            yield from _numbers_in(static)
        for output in node.inference.outputs:
            yield from output.prepass.shape


def num_input_numbers(graph: Graph) -> int:
    """How many of the numbers are sizes and strides of leaves; they come first."""
    return sum(len(prepass.shape) + len(prepass.stride) for prepass, _ in graph.key[1])


def _results(node: Any) -> tuple[Any, ...]:
    return tuple((len(output.prepass.shape), output.prepass.dtype) for output in node.inference.outputs)


def _kind(prepass: PrePass) -> tuple[Any, ...]:
    """A leaf without its sizes: where its dimensions lie in memory, and all that has no size."""
    order = sorted(range(len(prepass.stride)), key=lambda dim: (prepass.stride[dim], -dim))
    pairs = zip(prepass.shape, prepass.stride, strict=False)
    flags = tuple((size == 0, size == 1, stride == 0) for size, stride in pairs)
    return (
        len(prepass.shape), tuple(order), flags, prepass.dtype, prepass.device, prepass.layout, prepass.requires_grad,
        prepass.batch, prepass.inference, prepass.bits,
    )  # fmt: skip


def _without_numbers(statics: Any) -> Any:
    """The static arguments of a call; those of a call that is like no other stand for themselves."""
    return tuple(map(_shape_of_static, statics)) if isinstance(statics, tuple) else statics


def _is_number(static: Any) -> bool:
    return type(static) is tuple and len(static) == 2 and (static[0] is int or static[0] is float)


def _shape_of_static(static: Any) -> Any:
    if _is_number(static):
        return _range(static[1]) if static[0] is float or static[1] < 0 else int
    return (torch.Size, len(static)) if type(static) is torch.Size else static


def _range(number: float) -> Hashable:
    """What a number has in common with those for which PyTorch's formulas are the same: the gradient of a norm has one
    of its own for orders below one, up to two, above two, for whole ones and for infinite ones. (Whole numbers that are
    not negative are sizes, as far as one can see.)
    """
    if not isfinite(number) or number == int(number):
        return type(number), str(number)
    return float, max(-2, min(3, floor(number)))


def _numbers_in(static: Any) -> Sequence[Number]:
    if _is_number(static):
        return (static[1],)
    return tuple(static) if type(static) is torch.Size else ()
