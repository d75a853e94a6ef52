"""Modules with fused paths: what they decide, they decide when they are called, as in eager.

*Takes* PyTorch's transformer modules. *Gives* the same modules, except that lazy arguments do not keep them from their
fused operators: `torch.overrides.has_torch_function`, by which they decide, takes a lazy tensor for a plain one inside
of them. The module's Python runs at the call, in the mode that it has then; what is recorded is the operator.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch

from koila._scopes import Scopes
from koila._torch import is_function_mode_enabled
from koila.capture.bridge import Bridge
from koila.capture.record import input_value
from koila.ir.tree import leaves, map_leaves

MODULES = (torch.nn.TransformerEncoder, torch.nn.TransformerEncoderLayer, torch.nn.MultiheadAttention)
_inside = Scopes[bool]("fused modules")


def patch_fused_modules() -> None:
    """Let these modules decide about lazy tensors as about plain ones."""
    _patch_question()
    for kind in MODULES:
        original = kind.forward

        def forward(self: Any, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
            if not any(type(leaf) is Bridge.lazy_type for leaf in leaves((args, kwargs))):
                return _original(self, *args, **kwargs)
            with _inside.inside(True):
                return map_leaves(_original(self, *args, **kwargs), _lazy)

        kind.forward = wraps(original)(forward)  # type: ignore[method-assign]


def _lazy(leaf: Any) -> Any:
    """A result as a lazy tensor: with padded sequences the encoder computes on nested tensors, which are eager."""
    is_real = isinstance(leaf, torch.Tensor) and type(leaf) is not Bridge.lazy_type and not leaf.is_nested
    return Bridge.lazy_type._wrap(input_value(leaf)) if is_real else leaf


def _patch_question() -> None:
    original = torch.overrides.has_torch_function

    @wraps(original)
    def has_torch_function(arguments: Any) -> bool:
        if not original(arguments):
            return False
        return _inside.innermost is None or is_function_mode_enabled() or _any_other(arguments)

    def _any_other(arguments: Any) -> bool:
        return any(type(each) is not Bridge.lazy_type and original((each,)) for each in arguments)

    torch.overrides.has_torch_function = has_torch_function
