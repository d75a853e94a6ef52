"""Normalisation and softmax: copies of strided operands, sums per thread, rows in float32, extremes of short runs."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from koila.planning.workspace.copies import copies, copy_bytes
from koila.planning.workspace.kernel_call import HALF, Formula, KernelCall, num_bytes

aten = torch.ops.aten


def _layer_norm_backward(call: KernelCall) -> int:
    sums = 2 * prod(call["normalized_shape"]) * 4 * call.num_threads
    return copy_bytes(call["grad_out"]) + copy_bytes(call["input"]) + (sums if any(call["output_mask"][1:]) else 0)


def _batch_norm_backward(call: KernelCall) -> int:
    if not call["output_mask"][0]:
        return 0
    if call["grad_out"].is_contiguous() and call["input"].is_contiguous():
        return num_bytes(call["input"])
    return 2 * num_bytes(call["input"]) if call["input"].dtype in HALF else 0


def _rms_norm(call: KernelCall) -> int:
    half = call["input"].dtype in HALF
    return num_bytes(call["input"]) * (5 if half else 1) + (4 * num_bytes(call["weight"]) if half else 0) + (16 << 10)


def _softmax(names: tuple[str, ...], half_bytes: int) -> Formula:
    def formula(call: KernelCall) -> int:
        result = call.result
        inner = call["dim"] % result.dim() != result.dim() - 1 if result.dim() else False
        copied = sum(copy_bytes(call[name]) + (16 << 10) for name in names)
        is_wide = inner and result.dtype in HALF
        return copied + _extremes(call, inner=inner) + (call.num_threads * half_bytes if is_wide else 0)

    return formula


def _extremes(call: KernelCall, *, inner: bool) -> int:
    """The greatest number and the sum of each run that a thread has taken: more runs the shorter they are."""
    numbers, half = call.result.numel(), call.result.dtype in HALF
    length = max(1, call.result.shape[call["dim"]]) if call.result.dim() else 1
    most = (512 if half else 256) << 10 if inner else 64 << 10
    return int(min(call.num_threads * (most // length), 16 * (numbers // length)))


ROWS: dict[Any, Formula] = {
    aten.native_layer_norm.default: copies("input"),
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten._fused_rms_norm.default: _rms_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten._softmax.default: _softmax(("self",), 256 << 10),
    aten._log_softmax.default: _softmax(("self",), 256 << 10),
    aten._softmax_backward_data.default: _softmax(("grad_output", "output"), 512 << 10),
    aten._log_softmax_backward_data.default: _softmax(("grad_output", "output"), 512 << 10),
}
