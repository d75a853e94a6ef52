"""Eager tensors in place of lazy ones, whatever is known: a test then sees how they behave, not when they are used.

*Takes* `koila.lazy`. *Gives* a function like it that hands out `EagerTensor`s whose calls run at once, except where a
budget is named, or a tensor requires grad.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from koila._budget import is_any_named
from koila.capture.at_once import here
from koila.capture.eager import hand_out
from koila.capture.known import Origin
from koila.ir.prepass import is_plain
from koila.ir.tree import leaves, map_leaves


def forced(lazy: Callable[..., Any]) -> Callable[..., Any]:
    """`koila.lazy`, with eager tensors."""

    def make(*values: Any, batch: Any = 0, budget: Any = None, eager: Any = None) -> Any:
        tensors = [leaf for leaf in leaves(values) if isinstance(leaf, torch.Tensor)]
        usual = budget is not None or eager is not None or is_any_named() or not tensors
        if usual or not all(is_plain(each) and not each.requires_grad for each in tensors):
            return lazy(*values, batch=batch, budget=budget, eager=eager)
        lazy(*values, batch=batch)  # Its errors and warnings.
        here.position.is_lazy = False
        found = map_leaves(values, _eager)
        return found[0] if len(found) == 1 else found

    return make


def _eager(leaf: Any) -> Any:
    return hand_out(leaf, Origin(leaf.shape, leaf.dtype, False)) if isinstance(leaf, torch.Tensor) else leaf
