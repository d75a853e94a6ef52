"""Rules for batched linear algebra and Fourier transforms: leading dimensions are a batch.

*Takes* calls on stacks of matrices or along named dimensions. *Gives* the table `ROWS`.
"""

from __future__ import annotations

from typing import Any

import torch

from koila.analysis.rules._rows import along, letters, trailing
from koila.analysis.ruling import Rule

aten = torch.ops.aten

ROWS: dict[Any, Rule] = {
    aten.tril.default: trailing(2),
    aten.triu.default: trailing(2),
    aten.linalg_inv_ex.default: letters("A=*XX -> *XX *"),
    aten._linalg_det.default: letters("A=*XX -> * *XX *X"),
    aten._linalg_slogdet.default: letters("A=*XX -> * * *XX *X"),
    aten.linalg_cholesky_ex.default: letters("self=*XX -> *XX *"),
    aten._linalg_eigh.default: letters("A=*XX -> *X *XX", when=lambda call: call["compute_v"]),
    aten.linalg_qr.default: letters("A=*XX -> *XX *XX", when=lambda call: call["mode"] != "r"),
    aten.linalg_matrix_exp.default: trailing(2),
    aten._fft_r2c.default: along("dim"),
    aten._fft_c2r.default: along("dim"),
    aten._fft_c2c.default: along("dim"),
}
