"""EagerTensor: the eager execution interceptor.

*Takes* torch calls on a tensor that has its data. *Gives* a result of PyTorch's own engine, or of the graph builder if
another operand is lazy or the result would be large.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log2
from typing import Any

import torch

from koila import events
from koila._torch import without_torch_function
from koila.capture.bridge import Bridge
from koila.capture.lazy import LazyTensor
from koila.capture.record import input_value, lazy_forward
from koila.capture.scan import scan_call
from koila.interfaces import BatchInfo
from koila.ir.infer import compute_shape, infer
from koila.ir.prepass import PLAIN_TYPES, prepass_of
from koila.ir.replay import current_context
from koila.ir.tree import leaves, map_leaves

LARGE_BYTES = 1 << 30
"""A result of at least this many bytes is recorded instead of computed; set `EagerTensor.large_bytes` to change it."""


class EagerTensor(torch.Tensor):
    """A real tensor that decides per call: run now, or hand the call to the graph builder.

    >>> import koila
    >>> type(koila.eager(torch.ones(2)) + 1).__name__
    'EagerTensor'
    >>> type(koila.eager(torch.ones(2)) + koila.lazy(torch.ones(2))).__name__
    'LazyTensor'
    """

    large_bytes = LARGE_BYTES

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind is LazyTensor for kind in types):
            return lazy_forward(func, *args, **kwargs)
        if _is_large(func, args, kwargs):
            swap = lambda leaf: LazyTensor._wrap(input_value(leaf.run())) if type(leaf) is EagerTensor else leaf  # noqa: E731
            return lazy_forward(func, *map_leaves(args, swap), **map_leaves(kwargs, swap))
        return super().__torch_function__(func, types, args, kwargs)

    def run(self) -> torch.Tensor:
        """The real tensor itself."""
        with without_torch_function():
            return self.as_subclass(torch.Tensor)

    @property
    def batch(self) -> BatchInfo | None:
        """A real tensor has no recorded batch."""
        return None


def _log_bytes(args: Any, kwargs: Any) -> float:
    """The binary logarithm of a number of bytes that no result of a call exceeds, whatever the function is.

    A result is at most as large as the square of all operands, or the product of them (`einsum`); a number among the
    arguments may stand for each of three dimensions, as a scale factor does; 16 bytes are the widest element.
    """
    found = list(leaves((args, kwargs)))
    sizes = [max(1, leaf.numel()) for leaf in found if isinstance(leaf, torch.Tensor)]
    numbers = [abs(leaf) for leaf in found if isinstance(leaf, (int, float)) and abs(leaf) > 1]
    return max(2 * log2(sum(sizes) or 1), sum(map(log2, sizes))) + 3 * sum(map(log2, numbers)) + log2(16)


def _is_large(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the call allocates at least `EagerTensor.large_bytes`."""
    with without_torch_function():
        if _log_bytes(args, kwargs) < log2(EagerTensor.large_bytes):
            return False
    scan, cacheable = scan_call(func, args, kwargs)
    key = None
    if cacheable:
        metas = tuple((prepass_of(operand), operand.is_leaf) for operand in scan.operands)  # type: ignore[arg-type,union-attr]
        key = ("eager", scan.function, current_context(), tuple(scan.statics), metas)
    inference = compute_shape(key, lambda: infer(func, scan.args, scan.kwargs, scan.operands))
    fresh = [out for out in inference.outputs if out.shares is None and out.same_as is None]
    large = sum(output.prepass.num_bytes for output in fresh) >= EagerTensor.large_bytes
    if large:
        events.count("eager_tensor::handed over")
    return large


Bridge.eager_type = EagerTensor
PLAIN_TYPES.add(EagerTensor)
