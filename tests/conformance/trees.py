"""Structures of tensors: copied with their layout, compared bit by bit or up to the order of summation.

*Takes* trees of tensors (torch's pytrees). *Gives* copies, and differences as text; None where there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

TOLERANCES = {torch.float32: 1e-6, torch.complex64: 1e-6, torch.float64: 1e-10, torch.complex128: 1e-10}
"""Rule 1: ‖a−b‖ ≤ tol·‖b‖."""
ROUNDING = 1e-2
"""A value that is zero in exact arithmetic may differ by this share of the tolerance, per element."""


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors of a tree, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def copy_tree(tree: Any) -> Any:
    """Fresh leaf tensors with the same data, layout, sharing of memory and requires_grad."""
    storages: dict[int, torch.UntypedStorage] = {}
    copies: dict[int, torch.Tensor] = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = _copy(tensor, storages)
        return copies[id(tensor)]

    return tree_map_only(torch.Tensor, copy, tree)


def _copy(tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    plain = tensor.detach()
    if plain.layout != torch.strided or type(plain) is not torch.Tensor:
        return plain.clone().requires_grad_(tensor.requires_grad)
    storage = plain.untyped_storage()
    if storage._cdata not in storages:
        storages[storage._cdata] = storage.clone()
    made = torch.empty(0, dtype=plain.dtype)
    made.set_(storages[storage._cdata], plain.storage_offset(), plain.shape, plain.stride())
    torch._C._set_conj(made, plain.is_conj())
    torch._C._set_neg(made, plain.is_neg())
    return made.requires_grad_(tensor.requires_grad)


Difference = Callable[[torch.Tensor, torch.Tensor], str | None]


def tree_difference(found: Any, expected: Any, compare: Difference) -> str | None:
    """Where two trees first differ."""
    found_leaves, found_spec = tree_flatten(found)
    expected_leaves, expected_spec = tree_flatten(expected)
    if found_spec != expected_spec:
        return f"structure {_short(found_spec)} instead of {_short(expected_spec)}"
    for place, (one, other) in enumerate(zip(found_leaves, expected_leaves, strict=True)):
        difference = _leaf_difference(one, other, compare)
        if difference is not None:
            return f"[{place}] {difference}"
    return None


def _short(spec: Any) -> str:
    return str(spec).replace("TreeSpec", "")[:80]


def _leaf_difference(found: Any, expected: Any, compare: Difference) -> str | None:
    if isinstance(expected, torch.Tensor) != isinstance(found, torch.Tensor):
        return f"{type(found).__name__} instead of {type(expected).__name__}"
    if isinstance(expected, torch.Tensor):
        return meta_difference(found, expected) or compare(found, expected)
    if found is expected or type(found) is not type(expected) or found == expected:
        return None if type(found) is type(expected) else f"{found!r} instead of {expected!r}"
    return None if found != found and expected != expected else f"{found!r} instead of {expected!r}"


def meta_difference(found: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Shape, dtype, layout, requires_grad."""
    if type(found) is not type(expected):
        return f"type {type(found).__name__} instead of {type(expected).__name__}"
    for name in ("shape", "dtype", "layout", "requires_grad"):
        one, other = getattr(found, name), getattr(expected, name)
        if one != other:
            return f"{name} {_plain(one)} instead of {_plain(other)}"
    return None


def _plain(value: Any) -> str:
    return str(list(value) if isinstance(value, torch.Size) else value)


def stride_difference(found: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Strides, where they mean anything."""
    if expected.layout != torch.strided or expected.numel() < 2 or found.stride() == expected.stride():
        return None
    return f"strides {found.stride()} instead of {expected.stride()}"


def no_difference(found: torch.Tensor, expected: torch.Tensor) -> str | None:
    """For uninitialised memory: metadata is all there is."""
    return None


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach()
    if plain.is_quantized:
        plain = plain.int_repr()
    if plain.is_nested or type(plain) is not torch.Tensor:
        plain = torch.cat([part.reshape(-1) for part in plain.unbind()])
    if plain.layout != torch.strided:
        plain = plain.to_dense()
    return plain.resolve_conj().resolve_neg()


def bit_difference(found: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Bits, NaN payloads and signs of zero included."""
    one, other = _dense(found), _dense(expected)
    if torch.equal(_bytes(one), _bytes(other)):
        return None
    return f"values differ by {_distance(one, other)}"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    # A copy: one element may be "contiguous" with any stride.
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))
    return flat if flat.numel() == 0 else flat.view(torch.uint8)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _distance(found: torch.Tensor, expected: torch.Tensor) -> str:
    one, other = _wide(found), _wide(expected)
    if not torch.equal(one.isnan(), other.isnan()):
        return "NaN in other places"
    one, other = one.nan_to_num(), other.nan_to_num()
    return f"{float((one - other).norm() / other.norm().clamp_min(1e-300)):.1e} relative"


def close_difference(found: torch.Tensor, expected: torch.Tensor, narrow: bool = False) -> str | None:
    """Rule 1 for a split run; integers and booleans are exact; `narrow` programs compute in float32 on the way."""
    one, other = _dense(found), _dense(expected)
    if not (other.is_floating_point() or other.is_complex()):
        return bit_difference(found, expected)
    tolerance = max(TOLERANCES.get(other.dtype, 1e-2), TOLERANCES[torch.float32] if narrow else 0.0)
    one, other = _wide(one), _wide(other)
    if not torch.equal(one.isnan(), other.isnan()):
        return "NaN in other places"
    finite = other.isfinite()
    if not torch.equal(one[~finite].nan_to_num(), other[~finite].nan_to_num()):
        return "infinities in other places"
    error, size = (one - other)[finite].norm(), other[finite].norm()
    if float(error) <= tolerance * (float(size) + ROUNDING * max(other.numel(), 1) ** 0.5):
        return None
    return f"values differ by {float(error / size.clamp_min(1e-300)):.1e} relative"
