"""The entries of `op_db` that must be proved for some sample, by family.

*Takes* torch's own classes of entries, and names. *Gives* the names of each family, and who is missing.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from typing import Any

from torch.testing._internal.opinfo.core import BinaryUfuncInfo, ReductionOpInfo, UnaryUfuncInfo

KINDS: dict[str, tuple[type, ...]] = {"pointwise": (UnaryUfuncInfo, BinaryUfuncInfo), "reductions": (ReductionOpInfo,)}
"""Families that torch marks itself."""

NAMES: dict[str, tuple[str, ...]] = {
    "pointwise": (
        "nn.functional.*relu*", "nn.functional.*elu", "nn.functional.*sigmoid", "nn.functional.*shrink",
        "nn.functional.hard*", "nn.functional.mish", "nn.functional.soft[ps]*", "nn.functional.threshold", "addc*",
        "where", "clamp*", "lerp", "masked_fill", "nan_to_num",
    ),
    "matmul": (
        "*mm", "*mm.decomposed", "addmv", "mv", "addr", "matmul", "__rmatmul__", "inner", "outer", "ger", "dot", "vdot",
        "einsum", "tensordot", "linalg.multi_dot", "linalg.vecdot", "nn.functional.linear", "nn.functional.bilinear",
    ),
    "convolutions": ("nn.functional.conv*",),
    "attention": ("nn.functional.scaled_dot_product_attention", "nn.functional.multi_head_attention_forward"),
    "embedding": ("nn.functional.embedding*",),
    "norms": ("nn.functional.*norm", "native_*norm", "norm", "norm.*", "linalg.*norm*", "renorm", "masked.norm*"),
    "softmaxes": ("*softmax*", "*softmin*", "*logsumexp*"),
    "index, gather, scatter": (
        "index_*", "gather", "scatter*", "take*", "select*", "__getitem__", "slice*", "narrow*", "masked_fill",
    ),
    "sort, topk": ("sort", "argsort", "msort", "topk", "kthvalue", "mode", "median", "nanmedian", "searchsorted"),
    "reductions": ("sum", "mean", "prod", "var*", "std*", "amax", "amin", "aminmax", "max.*", "min.*", "any", "all"),
    "cat, stack, split": ("cat", "concat*", "*stack", "*split*", "chunk*", "unbind*", "column_stack"),
    "pad": ("nn.functional.pad.*", "constant_pad_nd"),
    "interpolate": ("nn.functional.interpolate.*", "nn.functional.upsample*", "nn.functional.grid_sample"),
    "pooling": ("*pool*",),
    "linear algebra": ("linalg.*", "cholesky*", "svd", "lu*", "qr", "geqrf", "ormqr", "triangular_solve", "pinverse"),
    "Fourier": ("fft.*",),
}  # fmt: skip


def families(entries: Mapping[str, Any]) -> dict[str, list[str]]:
    """The names of each family."""
    found = {}
    for family, patterns in NAMES.items():
        kinds = KINDS.get(family, ())
        found[family] = [
            name
            for name, op in entries.items()
            if isinstance(op, kinds) or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        ]
    return found


def lines(entries: Mapping[str, Any], proved: set[str], apart: Mapping[str, str]) -> Iterator[str]:
    """How many of each family are proved, and which are not."""
    yield "\nproved by family"
    for family, names in families(entries).items():
        compared = [name for name in names if name not in apart]
        missing = [name for name in compared if name not in proved]
        rest = f"; not {', '.join(missing)}" if missing else ""
        yield f"  {family}: {len(compared) - len(missing)} of {len(compared)}{rest}"
