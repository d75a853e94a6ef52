"""Functional transforms and `gradcheck`: entry points of PyTorch that look into tensors themselves.

*Takes* torch. *Gives* the same torch, except that a lazy tensor is run before it enters a transform of `torch.func`,
and that `gradcheck` is given functions whose results are real: it changes inputs in ways that no version shows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from koila import events
from koila._torch.transforms import GRADCHECK, TRANSFORM_ENTRIES
from koila.capture.bridge import Bridge
from koila.capture.record import realize
from koila.ir.source import user_site
from koila.ir.tree import map_leaves


def _run_lazy(tree: Any, why: str) -> Any:
    """The structure with real tensors; counted."""

    def swap(leaf: Any) -> Any:
        if type(leaf) is not Bridge.lazy_type:
            return leaf
        events.count(f"eager_because::{why}", site=user_site())
        return realize(leaf._value, why)

    return map_leaves(tree, swap)


def _with_real_arguments(original: Any) -> Any:
    return lambda *args, **kwargs: original(*_run_lazy(args, "a transform"), **kwargs)


def patch_transforms() -> None:
    """A lazy tensor enters a transform as the real tensor that it is."""
    for module, name in TRANSFORM_ENTRIES:
        _replace(module, name, _with_real_arguments)


def patch_gradcheck() -> None:
    """What `gradcheck` calls gives real tensors: it writes to its inputs through `.data` between two calls."""

    def checked(original: Any) -> Any:
        def check(func: Any, inputs: Any, **options: Any) -> Any:
            real = lambda *args: _run_lazy(func(*args), "gradcheck")  # noqa: E731
            return original(real, _run_lazy(inputs, "gradcheck"), **options)

        return check

    module, name = GRADCHECK
    _replace(sys.modules[module], name, checked)


def _replace(module: ModuleType, name: str, wrap: Callable[[Any], Any]) -> None:
    original = getattr(module, name)
    setattr(module, name, wraps(original)(wrap(original)))
