"""Fourier transforms and factorisations of matrices: what MKL and LAPACK ask for."""

from __future__ import annotations

from typing import Any

import torch

from koila.planning.workspace.kernel_call import Formula, KernelCall, num_bytes

aten = torch.ops.aten


def _transform(per_element: int) -> Formula:
    """Buffers for one transform."""

    def formula(call: KernelCall) -> int:
        source, result = call["self"], call.result
        return max(max(source.shape[d], result.shape[d]) for d in call["dim"]) * per_element

    return formula


def _to_real(call: KernelCall) -> int:
    copied = num_bytes(call["self"]) if len(call["dim"]) > 1 else 0
    return copied + _transform(32)(call)


def _orthogonal(call: KernelCall) -> int:
    """LAPACK asks for wider blocks of columns with more threads."""
    return (256 * call.num_threads + 272) * int(call["A"].shape[-1])


def _linear_algebra(times: int, per_row: int) -> Formula:
    return lambda call: times * num_bytes(call["A"]) + per_row * int(call["A"].shape[-1])


ROWS: dict[Any, Formula] = {
    aten._fft_r2c.default: _transform(32),
    aten._fft_c2c.default: _transform(120),
    aten._fft_c2r.default: _to_real,
    aten.linalg_inv_ex.default: _linear_algebra(1, 32),
    aten._linalg_eigh.default: _linear_algebra(2, 64),
    aten._linalg_svd.default: _linear_algebra(4, 80),
    aten.linalg_qr.default: _orthogonal,
}
