"""Rules for batched linear algebra and Fourier transforms: leading dimensions are a batch.

*Takes* calls on stacks of matrices or along named dimensions. *Gives* the table `ROWS`.
"""

from __future__ import annotations

from typing import Any

import torch

from koila.analysis.chunk_rule import Call, ChunkRule, Rule
from koila.analysis.prepasses import dims_of
from koila.analysis.rules._axes import Axes, follow, left, right
from koila.analysis.rules._rows import along, either, letters, trailing

aten = torch.ops.aten


def crossed(call: Call) -> ChunkRule | None:
    """linalg_cross: pointwise but for one dimension."""
    ndim = call.result.ndim
    labels = right(ndim, dims_of(call["dim"], ndim))
    return follow(call, Axes({"self": labels, "other": labels}, (labels,)))


def embedded_diagonal(call: Call) -> ChunkRule | None:
    """diag_embed: the last dimension becomes two."""
    ndim = call.result.ndim
    gone = dims_of((call["dim1"], call["dim2"]), ndim)
    kept = iter(left(call["self"].ndim - 1))
    result = tuple(None if dim in gone else next(kept) for dim in range(ndim))
    return follow(call, Axes({"self": (*left(call["self"].ndim - 1), None)}, (result,), broadcast=False))


def trilinear(call: Call) -> ChunkRule | None:
    """Three operands in one space of dimensions, each without some; a sum over others."""
    ndim = call["i1"].ndim + len(call["expand1"])
    operands = {
        name: tuple(dim for dim in range(ndim) if dim not in dims_of(call[expand], ndim))
        for name, expand in (("i1", "expand1"), ("i2", "expand2"), ("i3", "expand3"))
    }
    result = tuple(dim for dim in range(ndim) if dim not in dims_of(call["sumdim"], ndim))
    return follow(call, Axes(operands, (result,), (True,)))


def _matrices(call: Call) -> bool:
    return bool(call["A"].ndim == call["B"].ndim)


def _vectors(call: Call) -> bool:
    return bool(call["A"].ndim == call["B"].ndim + 1)


ROWS: dict[Any, Rule] = {
    aten.tril.default: trailing(2),
    aten.triu.default: trailing(2),
    aten.diag_embed.default: embedded_diagonal,
    aten.linalg_cross.default: crossed,
    aten._trilinear.default: trilinear,
    aten.linalg_inv_ex.default: letters("A=*XX -> *XX *"),
    aten._linalg_det.default: letters("A=*XX -> * *XX *X"),
    aten._linalg_slogdet.default: letters("A=*XX -> * * *XX *X"),
    aten._linalg_solve_ex.default: either(
        letters("A=*XX B=*XX -> *XX *XX *X *", when=_matrices),
        letters("A=*XX B=*X -> *X *XX *X *", when=_vectors),
    ),
    aten._linalg_svd.default: letters("A=*XX -> *XX *X *XX", when=lambda call: call["compute_uv"]),
    aten._linalg_eigh.default: letters("A=*XX -> *X *XX", when=lambda call: call["compute_v"]),
    aten.linalg_eig.default: letters("self=*XX -> *X *XX"),
    aten.linalg_cholesky_ex.default: letters("self=*XX -> *XX *"),
    aten.cholesky.default: trailing(2),
    aten.cholesky_inverse.default: trailing(2),
    aten.cholesky_solve.default: letters("self=*XX input2=*XX -> *XX"),
    aten.linalg_qr.default: letters("A=*XX -> *XX *XX", when=lambda call: call["mode"] != "r"),
    aten.geqrf.default: letters("self=*XX -> *XX *X"),
    aten.linalg_householder_product.default: letters("input=*XX tau=*X -> *XX"),
    aten.ormqr.default: letters("self=*XX input2=*X input3=*XX -> *XX"),
    aten.linalg_ldl_factor_ex.default: letters("self=*XX -> *XX *X *"),
    aten.linalg_ldl_solve.default: letters("LD=*XX pivots=*X B=*XX -> *XX"),
    aten.linalg_lu.default: letters("A=*XX -> *XX *XX *XX", when=lambda call: call["pivot"]),
    aten.lu_unpack.default: letters(
        "LU_data=*XX LU_pivots=*X -> *XX *XX *XX", when=lambda call: call["unpack_data"] and call["unpack_pivots"]
    ),
    aten.linalg_lu_factor_ex.default: letters("A=*XX -> *XX *X *"),
    aten.linalg_lu_solve.default: letters("LU=*XX pivots=*X B=*XX -> *XX"),
    aten.linalg_solve_triangular.default: letters("self=*XX B=*XX -> *XX"),
    aten.triangular_solve.default: letters("self=*XX A=*XX -> *XX *XX"),
    aten.linalg_matrix_exp.default: trailing(2),
    aten.linalg_pinv.atol_rtol_tensor: letters("self=*XX atol=* rtol=* -> *XX"),
    aten._fft_r2c.default: along("dim"),
    aten._fft_c2r.default: along("dim"),
    aten._fft_c2c.default: along("dim"),
}
