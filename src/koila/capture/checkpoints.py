"""`torch.utils.checkpoint` on lazy tensors: eager's checkpoint without a budget, koila's own recomputation with one.

*Takes* PyTorch's checkpoint. *Gives* the same, except that inside a budget a checkpointed function with lazy arguments
is recorded like any other code: koila recomputes what its plan says, and nothing is recomputed in a run that fits. The
function is then called once, so that statistics inside of it are updated once, where eager updates them twice: that is
said once per place. Without a budget the function runs at the call: a checkpoint without reentrant autograd is made of
hooks on saved tensors, under which no call waits, and one with it is called on real tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch.utils.checkpoint

from koila import events
from koila._budget import current_budget
from koila._torch import CHECKPOINT_GENERATOR
from koila._warnings import warn_once
from koila.capture.bridge import Bridge
from koila.capture.record import budget_of, realize, run_eagerly
from koila.capture.scan import scan_call
from koila.ir.source import user_site
from koila.ir.tree import leaves, map_leaves

_WHY = "a checkpoint without a budget"


def patch_checkpoint() -> None:
    """Checkpoints without reentrant autograd; those with it come as `CheckpointFunction.apply`."""
    original = getattr(torch.utils.checkpoint, CHECKPOINT_GENERATOR)

    @wraps(original)
    def around(function: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        if is_recorded((args, kwargs)):
            yield
        else:  # It is recomputed from what PyTorch keeps here: real tensors.
            yield from original(function, *map_leaves(args, _real), **map_leaves(kwargs, _real))

    setattr(torch.utils.checkpoint, CHECKPOINT_GENERATOR, around)


def reentrant_checkpoint(original: Callable[..., Any], function: Any, preserves: bool, *args: Any) -> Any:
    """`CheckpointFunction.apply` with lazy arguments; `original` is PyTorch's `Function.apply`."""
    if is_recorded(args):
        return function(*args)
    kind = torch.utils.checkpoint.CheckpointFunction

    def checkpoint(*reals: Any) -> Any:
        return original(kind, function, preserves, *reals)

    return run_eagerly(checkpoint, scan_call(checkpoint, args, {})[0], _WHY)


def _real(leaf: Any) -> Any:
    return realize(leaf._value, _WHY) if type(leaf) is Bridge.lazy_type else leaf


def is_recorded(arguments: Any) -> bool:
    """Whether a checkpointed function is recorded: an argument is lazy, and a budget in force (Rule 6: counted).

    Where an argument is eager, its first call is recorded in this budget, and all that follow it.
    """
    found = list(leaves(arguments))
    values = [leaf._value for leaf in found if type(leaf) is Bridge.lazy_type]
    if not values and not any(type(leaf) is Bridge.eager_type for leaf in found):
        return False
    given, site = budget_of(values), user_site()
    is_recorded = not current_budget([] if given is None else [given]).is_default
    events.count("checkpoint::recorded" if is_recorded else "checkpoint::kept", site=site)
    if is_recorded:
        warn_once(
            "a checkpoint inside a budget",
            "torch.utils.checkpoint is taken as if it were not there: koila recomputes what its budget asks for, "
            "and calls the function once (batch statistics inside are updated once, eager updates them twice)",
            "leave the checkpoint out where a budget is in force, or the budget where a checkpoint is",
            site.file,
            site.line,
        )
    return is_recorded
