"""What kernels of accelerators allocate inside, by reading only: there is no device here to measure it on.

*Takes* a call. *Gives* bytes. Results are counted elsewhere. What is not in the table is taken to allocate nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from koila.ir.tree import leaves

aten = torch.ops.aten


def _bytes(tree: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(tree) if isinstance(leaf, torch.Tensor))


def _operands_and_results(args: Any, result: Any) -> int:
    """A convolution may copy or transform its operands and its results once."""
    return _bytes(args) + _bytes(result)


def _wide_gradients(args: Any, result: Any) -> int:
    """Attention adds up the gradient of its queries in float32."""
    return 4 * args[1].numel()


def _sorted_indices(args: Any, result: Any) -> int:
    """Gradients of an embedding, and sums by index, sort their indices: two copies of them and a workspace as large."""
    indices = [leaf for leaf in leaves(args) if isinstance(leaf, torch.Tensor) and not leaf.is_floating_point()]
    return 4 * 8 * max((leaf.numel() for leaf in indices), default=0)


TABLE = {
    aten.convolution.default: _operands_and_results,
    aten.convolution_backward.default: _operands_and_results,
    aten._scaled_dot_product_flash_attention_backward.default: _wide_gradients,
    aten._scaled_dot_product_efficient_attention_backward.default: _wide_gradients,
    aten._scaled_dot_product_cudnn_attention_backward.default: _wide_gradients,
    aten.embedding_dense_backward.default: _sorted_indices,
    aten.index_put.default: _sorted_indices,
    aten._unsafe_index_put.default: _sorted_indices,
}


def kernel_bytes(target: Any, args: Any, result: Any) -> int:
    """The bytes that a call allocates inside."""
    formula = TABLE.get(target)
    return 0 if formula is None else formula(args, result)
