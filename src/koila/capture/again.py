"""What a followed step would have recorded: asked for by whoever plans or explains a value that was run at once.

*Takes* eager tensors of a step that is followed. *Gives* the lazy tensors that they would be if the step had been
recorded. The known program says which calls were made since something was run last; they are recorded once more,
apart from everything else, with empty tensors in place of what they read. Parameters are the user's own.

What is not known any more: a number that varies from step to step is the one that was seen first.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from sys import getrefcount
from typing import Any

import torch

from koila._torch import num_owners, without_torch_function
from koila.capture.at_once import here
from koila.capture.bridge import Bridge
from koila.capture.known import KnownCall, Origin, Seen, tensors_in
from koila.capture.pending import recorder
from koila.capture.record import input_value
from koila.ir.generators import GeneratorState
from koila.ir.tree import leaves, map_leaves


@contextmanager
def recorded_again(tensors: Sequence[Any]) -> Iterator[list[Any]]:
    """For each eager tensor the lazy one that it would be; None for what would have been run already.

    They are pending inside of the scope only.
    """
    position = here.position
    calls = _calls_until(position.at)
    if calls is None:
        if position.program is not None:
            position.program.is_out = True  # The next step is lazy, and can answer.
        calls = []
    with ExitStack() as stack:
        stack.enter_context(recorder.apart())
        made: dict[int, Any] = {}
        if calls:
            devices = {origin.device for call in calls for origin in call.results if origin.device is not None}
            for device in {torch.device("cpu"), *devices}:
                stack.enter_context(GeneratorState(device).restored())
            tell = _teller(made)
            for call in calls:
                _record(call, tell, made)
            del tell
            made = {name: made[name] for name in _held(position.part) if name in made}
        yield [made.get(id(each._origin)) if _is_of(each, position.part) else None for each in tensors]


def _held(part: object) -> set[int]:
    """Which results of this part the user holds, by identity: those are values that a lazy step would hold, too."""
    found = set[int]()
    with without_torch_function():
        for each in gc.get_objects():
            if type(each) is Bridge.eager_type and _is_of(each, part):
                owned = 1 if num_owners(each) > 1 else 0  # Autograd's graph refers to it, too.
                if getrefcount(each) > _IN_LOOP + owned:
                    found.add(id(each._origin))
    return found


_IN_LOOP = next(getrefcount(item) for item in [object()])
"""How often a thing is referred to that nobody holds: by the list, a variable, and the argument of `getrefcount`."""


def _is_of(tensor: Any, part: object) -> bool:
    return tensor._origin is not None and tensor._origin.part is part


def _calls_until(call: KnownCall | None) -> list[KnownCall] | None:
    """A call and those that led to it, in order; None if there were other calls between them that are not known."""
    found: list[KnownCall] = []
    while call is not None and call.before is not None:
        found.append(call)
        call = call.before
    arguments = [leaf for each in found if each.form is not None for leaf in leaves((each.form.args, each.form.kwargs))]
    is_whole = not any(type(leaf) is Seen and leaf.is_pending for leaf in arguments)
    return found[::-1] if is_whole and all(each.recorded is not None for each in found) else None


def _record(call: KnownCall, tell: Callable[[Any], Any], made: dict[int, Any]) -> None:
    assert call.form is not None
    func, context, site = call.recorded
    args, kwargs = map_leaves(call.form.args, tell), map_leaves(call.form.kwargs, tell)
    operands = {id(leaf) for leaf in leaves((args, kwargs))}
    with context.enter():
        result = Bridge.lazy_type.__torch_function__(func, (Bridge.lazy_type,), args, kwargs)
    fresh = [each for each in tensors_in(result) if type(each) is Bridge.lazy_type and id(each) not in operands]
    for lazy, origin in zip(fresh, call.results, strict=True):
        made[id(origin)] = lazy
        if lazy._value.node is not None:
            lazy._value.node.site = site


def _teller(made: dict[int, Any]) -> Callable[[Any], Any]:
    """A function that gives the tensor for what stands in its place among known arguments."""
    others: dict[int, torch.Tensor] = {}

    def tell(leaf: Any) -> Any:
        if type(leaf) is Origin:
            if id(leaf) not in made:  # An input, or a result of what was run before.
                made[id(leaf)] = Bridge.lazy_type._wrap(input_value(_empty_like(leaf), leaf.batch))
            return made[id(leaf)]
        if type(leaf) is not Seen:
            return leaf
        real = leaf.reference()
        if real is not None and real.requires_grad:
            return real
        key = id(leaf if real is None else real)
        if key not in others:
            empty = _empty_like(leaf)
            others[key] = empty if leaf.batch is None else Bridge.lazy_type._wrap(input_value(empty, leaf.batch))
        return others[key]

    return tell


def _empty_like(seen: Origin | Seen) -> torch.Tensor:
    stride = torch.empty(seen.shape, device="meta").stride() if seen.stride is None else seen.stride
    found = torch.empty_strided(seen.shape, stride, dtype=seen.dtype, device=seen.device)
    return found.requires_grad_() if seen.requires_grad else found
