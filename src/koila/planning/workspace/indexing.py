"""Indexing, sorting and scattering: buffers along a dimension, and float32 copies where half precision is added up."""

from __future__ import annotations

from typing import Any

import torch

from koila.planning.workspace.copies import copies, copy_bytes
from koila.planning.workspace.kernel_call import HALF, Formula, KernelCall, num_bytes

aten = torch.ops.aten


def _rows(name: str, per_element: int) -> Formula:
    """Buffers along the dimension that an operator works on, one for each thread."""

    def formula(call: KernelCall) -> int:
        source = call[name]
        return int(call.num_threads * source.shape[call["dim"]] * per_element) if source.dim() else 0

    return formula


def _kth_value(call: KernelCall) -> int:
    return num_bytes(call["self"]) + 8 * int(call["self"].numel())


def _median(call: KernelCall) -> int:
    return copy_bytes(call["self"]) + 10 * call.num_threads * int(call["self"].shape[call["dim"]])


def _index_add(call: KernelCall) -> int:
    return 56 * int(call["index"].numel())


def _scatter(call: KernelCall) -> int:
    """Half precision is scattered into a float32 copy."""
    return 4 * int(call.result.numel()) if call.result.dtype in HALF else 0


def _scatter_add(call: KernelCall) -> int:
    """The same, unless whole rows are added: then each thread has a row."""
    index = call["index"]
    if index.dim() > 1 and call["dim"] == 0 and index.stride(-1) == 0:
        return 4 * call.num_threads * int(index.shape[-1]) if call.result.dtype in HALF else 0
    return _scatter(call)


ROWS: dict[Any, Formula] = {
    aten.embedding_dense_backward.default: copies("grad_output"),
    aten.sort.default: _rows("self", 8),
    aten.topk.default: _rows("self", 16),
    aten.kthvalue.default: _kth_value,
    aten.median.dim: _median,
    aten.index_add.default: _index_add,
    aten.scatter.src: _scatter,
    aten.scatter.value: _scatter,
    aten.scatter_reduce.two: _scatter_add,
    aten.scatter_add.default: _scatter_add,
    aten.gather.default: _scatter,
}
