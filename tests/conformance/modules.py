"""torch's `module_db` as trials: every module in train and eval mode.

*Takes* entries of `module_db`. *Gives* trials.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.testing._internal.common_modules import module_db

from tests.conformance.choice import number_of, two_cuts
from tests.conformance.trees import copy_tree
from tests.conformance.trial import Program, Trial, cotangent_loss, seed

DTYPES = (torch.float32, torch.float64)
SPLIT_DTYPES = (torch.float64,)


def entries() -> dict[str, Any]:
    """All entries by name."""
    return {info.name: info for info in module_db}


def has_cpu_dtype(info: Any) -> bool:
    """Whether the entry supports a dtype of `DTYPES`."""
    return bool(set(DTYPES) & set(info.dtypes))


def _inputs_of(info: Any, dtype: torch.dtype, training: bool) -> list[Any]:
    seed(number_of(info.name))
    return list(info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training))


def _program(info: Any, dtype: torch.dtype, training: bool, chosen: Any) -> Program:
    args, kwargs = copy_tree((chosen.constructor_input.args, chosen.constructor_input.kwargs))
    seed()
    module = info.module_cls(*args, **kwargs).to(dtype).train(training)
    inputs = (chosen.forward_input.args, chosen.forward_input.kwargs)
    if info.is_lazy:
        with torch.no_grad():
            module(*copy_tree(inputs)[0], **copy_tree(inputs)[1])
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    call = lambda found: module(*found[0], **found[1])  # noqa: E731
    return Program(copy_tree(inputs), call, state, cotangent_loss)


def _trial(info: Any, dtype: torch.dtype, training: bool, chosen: Any, number: int) -> Trial:
    label = f"{'train' if training else 'eval'} {str(dtype).removeprefix('torch.')} #{number}"
    return Trial(info.name, label, lambda: _program(info, dtype, training, chosen))


def all_trials(info: Any, dtypes: tuple[torch.dtype, ...] = DTYPES, only_function: bool = False) -> Iterator[Trial]:
    """Every sample, in train and eval mode."""
    for dtype in dtypes:
        for training in (True, False) if dtype in info.dtypes else ():
            for number, chosen in enumerate(_inputs_of(info, dtype, training)):
                if chosen.forward_input is not None:
                    yield _trial(info, dtype, training, chosen, number)


def chosen_trials(info: Any, dtypes: tuple[torch.dtype, ...] = DTYPES, only_function: bool = False) -> Iterator[Trial]:
    """One sample in train mode and one in eval mode, chosen by hash."""
    dtype = next(dtype for dtype in dtypes if dtype in info.dtypes)
    for training in (True, False):
        found = [chosen for chosen in _inputs_of(info, dtype, training) if chosen.forward_input is not None]
        if found:
            number = number_of(f"{info.name} {training}") % len(found)
            yield _trial(info, dtype, training, found[number], number)


cuts = two_cuts
