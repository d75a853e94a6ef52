"""Reductions and scans: operands cast to the type that is added up in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from koila.planning.workspace.kernel_call import HALF, Formula, KernelCall, bytes_like, num_bytes

aten = torch.ops.aten


def _sum(call: KernelCall) -> int:
    source, result = call["self"], call.result
    if source.dtype != result.dtype:
        return int(source.numel() * result.element_size())
    if source.dtype in HALF and _num_reduced_runs(source, call.arguments.get("dim")) > 1:
        return int(4 * (source.numel() + result.numel()))
    return 0


def _num_reduced_runs(source: torch.Tensor, dim: Sequence[int] | None) -> int:
    """Groups of reduced dimensions that do not follow each other in memory."""
    reduced = {d % source.dim() for d in dim} if dim else set(range(source.dim()))
    runs, inner = 0, None
    for d in sorted((d for d in range(source.dim()) if source.shape[d] > 1), key=lambda d: source.stride(d)):
        merges = inner is not None and source.stride(d) == source.stride(inner) * source.shape[inner]
        runs += d in reduced and not (merges and inner in reduced)
        inner = d
    return runs


def _mean(call: KernelCall) -> int:
    source, result = call["self"], call.result
    wide = torch.float32 if result.dtype in HALF else result.dtype
    if source.dtype == wide:
        return 0
    return source.numel() * wide.itemsize + (result.numel() * wide.itemsize if wide != result.dtype else 0)


def _cast_scan(call: KernelCall) -> int:
    return 0 if call["self"].dtype == call.result.dtype else num_bytes(call.result)


def _truth(call: KernelCall) -> int:
    return 0 if call["self"].dtype in (torch.bool, torch.uint8) else call["self"].numel()


ROWS: dict[Any, Formula] = {
    aten.logsumexp.default: bytes_like("self"),
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum,
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.prod.default: _sum,
    aten.cumsum.default: _cast_scan,
    aten.cumprod.default: _cast_scan,
    aten.any.default: _truth,
    aten.any.dim: _truth,
    aten.all.default: _truth,
    aten.all.dim: _truth,
}
