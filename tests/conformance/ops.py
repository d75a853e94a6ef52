"""torch's `op_db` as trials: function, method and in-place variants, the dtypes usual for a CPU.

*Takes* entries of `op_db`. *Gives* trials.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_methods_invocations import op_db

from tests.conformance.choice import number_of, two_cuts
from tests.conformance.trees import copy_tree, tensors_of
from tests.conformance.trial import Program, Trial, cotangent_loss, seed

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
SPLIT_DTYPES = (torch.float64, torch.int64, torch.bool)
INSTEAD = (torch.complex128, torch.bfloat16)
"""For a split of entries that have none of `SPLIT_DTYPES`."""
UNINITIALISED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
DEVICE = "cpu"


def _unwrapped(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


# The database seeds random operators itself and hides the generator; trials seed it, and compare its state.
common_methods_invocations.wrapper_set_seed = _unwrapped


def entries() -> dict[str, Any]:
    """All entries by their full name."""
    return {op.full_name: op for op in op_db}


def has_cpu_dtype(op: Any) -> bool:
    """Whether the entry supports any dtype of `DTYPES`."""
    return bool(op.supported_dtypes(DEVICE) & set(DTYPES))


@dataclass(frozen=True)
class Variant:
    """One way to call an operator."""

    name: str
    function: Callable[..., Any]
    in_place: bool = False
    on_input: bool = False
    """Whether it writes to the real input itself instead of a lazy copy of it."""


def variants(op: Any) -> list[Variant]:
    """Function, method and in-place variants; those on a lazy value, as inside a program, and on the input itself."""
    found = [Variant("function", op.op)]
    if op.method_variant is not None:
        found.append(Variant("method", op.method_variant))
    if op.inplace_variant is not None:
        found.append(Variant("in-place", op.inplace_variant, in_place=True))
        found.append(Variant("in-place on input", op.inplace_variant, in_place=True, on_input=True))
    return found


def samples_of(op: Any, dtype: torch.dtype) -> list[Any]:
    """The database's samples for a dtype; the same each time."""
    seed(number_of(op.full_name))
    requires_grad = op.supports_autograd and dtype in op.supported_backward_dtypes(DEVICE)
    return list(op.sample_inputs(DEVICE, dtype, requires_grad=requires_grad))


def _program(variant: Variant, sample: Any) -> Program:
    def call(inputs: Any) -> Any:
        first, args, kwargs = inputs
        if variant.in_place and not variant.on_input:
            first = first.clone()
        outcome = variant.function(first, *args, **kwargs)
        return (outcome, first) if variant.in_place else outcome

    def loss(outputs: Any) -> Any:
        return cotangent_loss(sample.output_process_fn_grad(outputs if not variant.in_place else outputs[0]))

    return Program(copy_tree((sample.input, sample.args, sample.kwargs)), call, loss=loss)


def trial_of(op: Any, dtype: torch.dtype, variant: Variant, sample: Any, number: int) -> Trial:
    """One sample, called one way."""
    label = f"{variant.name} {str(dtype).removeprefix('torch.')} #{number}"
    return Trial(
        op.full_name, label, lambda: _program(variant, sample), op.name in UNINITIALISED, writes_input=variant.on_input
    )


def _fits(variant: Variant, sample: Any) -> bool:
    if not variant.in_place:
        return variant.name == "function" or isinstance(sample.input, torch.Tensor)
    if not isinstance(sample.input, torch.Tensor) or sample.broadcasts_input:
        return False
    return not (variant.on_input and sample.input.requires_grad)  # Eager refuses to write to a leaf that requires grad.


def all_trials(op: Any, dtypes: tuple[torch.dtype, ...] = DTYPES, only_function: bool = False) -> Iterator[Trial]:
    """Every sample of every dtype and variant."""
    for dtype in _supported(op, dtypes):
        for number, sample in enumerate(samples_of(op, dtype)):
            for variant in variants(op)[: 1 if only_function else None]:
                if _fits(variant, sample):
                    yield trial_of(op, dtype, variant, sample, number)


def _supported(op: Any, dtypes: tuple[torch.dtype, ...]) -> list[torch.dtype]:
    supported = op.supported_dtypes(DEVICE)
    return [dtype for dtype in dtypes if dtype in supported] or [dtype for dtype in INSTEAD if dtype in supported]


def chosen_trials(op: Any, dtypes: tuple[torch.dtype, ...] = DTYPES, only_function: bool = False) -> Iterator[Trial]:
    """Two dtypes (the first that is supported, and one more), one sample each and one variant each, chosen by hash."""
    supported = _supported(op, dtypes)
    others = supported[1:]
    for turn, dtype in enumerate(supported[:1] + others[number_of(op.full_name) % max(len(others), 1) :][:1]):
        samples = list(enumerate(samples_of(op, dtype)))
        if only_function:
            samples = [pair for pair in samples if _can_be_cut(pair[1])]
        if samples:
            number, sample = samples[number_of(f"{op.full_name} {dtype}") % len(samples)]
            fitting = [variant for variant in variants(op) if _fits(variant, sample)]
            variant = fitting[0 if only_function else (number_of(op.full_name) + turn) % len(fitting)]
            yield trial_of(op, dtype, variant, sample, number)


def _can_be_cut(sample: Any) -> bool:
    tensors = tensors_of((sample.input, sample.args, sample.kwargs))
    return any(size >= 2 for tensor in tensors if tensor.layout == torch.strided for size in tensor.shape)


cuts = two_cuts
