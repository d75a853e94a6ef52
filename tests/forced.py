"""Eager tensors in place of lazy ones, whatever is known: a test then sees how they behave, not when they are used.

*Takes* `koila.lazy`. *Gives* a function like it that begins steps which are followed as if every call were known,
except where a budget is named, or a tensor requires grad.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from sys import getrefcount
from typing import Any

import torch

from koila._budget import is_any_named
from koila._torch import without_torch_function
from koila._torch.transforms import active_transform
from koila.capture import eager
from koila.capture.at_once import Program, here
from koila.capture.known import Form, KnownCall, Origin, Unknowable
from koila.capture.lookup import implementation
from koila.ir import source
from koila.ir.ambient import current_context
from koila.ir.prepass import is_plain
from koila.ir.tree import leaves, map_leaves


class _Following(dict[Any, Any]):
    """Every call that would be recorded is known, and followed by every other."""

    def get(self, func: Any, default: Any = ()) -> Any:
        return (_ANY,) if type(implementation(func)) is partial and active_transform() is None else ()


class _AnyCall(KnownCall):
    """A call that is known whatever it is."""

    def __init__(self) -> None:
        super().__init__()
        self.following = _Following()
        self.matches = self._note
        self.call = KnownCall()
        """The call that is made now, as the program will know it."""

    def _note(self, args: Any, kwargs: Any) -> bool:
        try:
            with without_torch_function():
                self.call = KnownCall(Form(args, kwargs), eager.EagerTensor, here.position.at)
            self.call.following = self.following
        except Unknowable:
            self.call = self
        return True

    def learn(
        self, func: Any, form: Form, eager: type, results: Sequence[Origin], ends_run: bool
    ) -> tuple[KnownCall, bool]:  # fmt: skip
        """After the first call that is not followed nothing is known."""
        return KnownCall().learn(func, form, eager, results, ends_run)


_ANY = _AnyCall()


def followed(func: Any, call: KnownCall, result: Any) -> Any:
    """In place of `koila.capture.eager._followed`: whatever comes out is what was known."""
    here.position.at = call = _ANY.call
    alone = eager._ALONE + 1  # The variable of the caller.
    if type(result) is torch.Tensor and getrefcount(result) == alone and is_plain(result):
        result.__class__ = eager.EagerTensor
    elif isinstance(result, (tuple, list)):
        eager._mark(result)
    made = [each for each in eager._eager_in(result) if each._origin is None]
    for each in made:
        each._origin = _origin(each)
        each._origin.part = here.position.part
    call.results, call.recorded = tuple(each._origin for each in made), (func, current_context(), source.user_site())
    return result


def forced(lazy: Callable[..., Any]) -> Callable[..., Any]:
    """`koila.lazy`, with eager tensors."""

    def make(*values: Any, batch: Any = 0, budget: Any = None, eager: Any = None) -> Any:
        source._internal[id(make.__code__)] = make.__code__  # Warnings and errors name the test's line.
        tensors = [leaf for leaf in leaves(values) if isinstance(leaf, torch.Tensor)]
        usual = budget is not None or eager is not None or is_any_named() or not tensors or active_transform()
        if usual or not all(is_plain(each) and not each.requires_grad for each in tensors):
            return lazy(*values, batch=batch, budget=budget, eager=eager)
        lazies = leaves(lazy(*values, batch=batch))  # With its errors and warnings.
        batches = iter([leaf._value.batch for leaf in lazies if isinstance(leaf, torch.Tensor)])
        program = Program(source.user_site(), batch, tensors)
        program.root = _ANY
        here.position.end()
        here.position.follow(program)
        found = map_leaves(values, lambda leaf: _eager(leaf, next(batches)) if isinstance(leaf, torch.Tensor) else leaf)
        return found[0] if len(found) == 1 else found

    return make


def _eager(tensor: torch.Tensor, batch: int | None) -> torch.Tensor:
    origin = _origin(tensor)
    origin.batch = batch
    return eager.hand_out(tensor, origin)


def _origin(tensor: torch.Tensor) -> Origin:
    with without_torch_function():
        return Origin.of(tensor)
