"""Kernels: the functions that generated code calls beside PyTorch's own operators.

*Takes* the work of a step. *Gives* the function that runs for it: slices of whole values, random numbers that are
opened, products that are added to a sum in place, products of half precision in float32, convolutions of a few pixels
as one product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from koila.analysis.types import Sliced, chunk_of
from koila.execution.offload import Pieces
from koila.execution.pieces import Held
from koila.execution.unfolded import unfolded_convolution, unfolded_gradients
from koila.ir.draws import Source
from koila.planning import operation
from koila.planning.half_products import PRODUCTS
from koila.planning.operation import Kernel, OperatorWork

aten = torch.ops.aten


def slice_whole(value: Any, kind: Sliced, start: int, stop: int, num_samples: int) -> torch.Tensor:
    """A chunk of a whole value, of a random source, of what is held in pieces, or of what waits on the host."""
    if isinstance(value, Held):
        return value.chunk(kind, start, stop)
    if isinstance(value, Pieces):
        return value.fetch(start, stop)
    if not isinstance(value, Source):
        return chunk_of(value, kind, start, stop, num_samples)
    if kind.dim == 0 and kind.outer == 1:
        return value.rows(start // kind.granule * kind.inner, stop // kind.granule * kind.inner)
    return chunk_of(value.whole(), kind, start, stop, num_samples)


def open_source(value: Any) -> torch.Tensor:
    """All of a random source."""
    return value.whole() if isinstance(value, Source) else value


def add_product(sink: Any, index: int, first: torch.Tensor, second: torch.Tensor, is_transposed: bool) -> None:
    """Add a matrix product to a sum without a temporary: the gradient of a weight."""
    total = sink.take(index)
    if total is None:
        product = torch.mm(second.t(), first.t()) if is_transposed else torch.mm(first, second)
        sink(index, product)
    elif is_transposed:
        sink.give(index, total.addmm_(second.t(), first.t()))
    else:
        sink.give(index, total.addmm_(first, second))


def _in_float32(target: Any) -> Callable[..., torch.Tensor]:
    def product(*operands: torch.Tensor, **scales: Any) -> torch.Tensor:
        dtype = operands[0].dtype
        if operands[0].device.type != "cpu":
            return target(*operands, **scales)
        return target(*(operand.float() for operand in operands), **scales).to(dtype)

    product.__name__ = target.overloadpacket.__name__
    return product


HALF_PRODUCTS: dict[Any, Callable[..., torch.Tensor]] = {target: _in_float32(target) for target in PRODUCTS}
"""By operator, the function that computes its product of half precision in float32."""


def _trained_layer(*arguments: Any) -> Any:
    """oneDNN's recurrent layer makes the workspace of its backward only where gradients are recorded."""
    with torch.set_grad_enabled(bool(arguments[-1])):
        return aten.mkldnn_rnn_layer.default(*arguments)


_KERNELS: dict[Any, Callable[..., Any]] = {
    operation.slice_whole: slice_whole,
    operation.join_pieces: slice_whole,
    operation.open_source: open_source,
    aten.mkldnn_rnn_layer.default: _trained_layer,
    aten.view.default: aten.reshape.default,  # A chunk may lie in memory in another way than the batch that was traced.
}


_INSTEAD: dict[tuple[Kernel, Any], Callable[..., Any]] = {
    **{(Kernel.FLOAT32, target): product for target, product in HALF_PRODUCTS.items()},
    (Kernel.UNFOLDED, aten.convolution.default): unfolded_convolution,
    (Kernel.UNFOLDED, aten.convolution_backward.default): unfolded_gradients,
}
"""What computes a call that the operator itself does not compute."""


def kernel_of(work: OperatorWork) -> Any:
    """What runs for a step: its operator, or another function with the same numbers."""
    return _INSTEAD.get((work.kernel, work.target)) or _KERNELS.get(work.target, work.target)
