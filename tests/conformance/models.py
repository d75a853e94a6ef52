"""Architectures of transformers as trials: one training step each, dropout on.

*Takes* `ARCHITECTURES`. *Gives* trials.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers

from tests.conformance.architectures import ARCHITECTURES, Architecture
from tests.conformance.choice import Cut, cut_along
from tests.conformance.table import Row, row
from tests.conformance.trees import tensors_of
from tests.conformance.trial import Program, Trial, seed

DTYPES = (torch.float32,)
SPLIT_DTYPES = (torch.float64,)
BATCH = 4
TABLE_BATCH = 8

transformers.logging.set_verbosity_error()


def entries() -> dict[str, Architecture]:
    """All architectures by name."""
    return dict(ARCHITECTURES)


def has_cpu_dtype(architecture: Architecture) -> bool:
    """Every architecture runs on a CPU."""
    return True


def _to(value: Any, dtype: torch.dtype, device: str) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(device, dtype) if value.is_floating_point() else value.to(device)


def _results(outputs: Any) -> dict[str, Any]:
    """The tensors of a model's output: the loss, logits and what else it gives."""
    return {name: value for name, value in outputs.items() if isinstance(value, torch.Tensor)}


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def program_of(architecture: Architecture, dtype: torch.dtype, batch: int = BATCH, device: str = "cpu") -> Program:
    """One training step, with the same numbers on every device."""
    seed()
    model = architecture.model().train().to(device, dtype)
    if dtype == torch.float64 and architecture.kind == "mixture of experts":
        model.set_experts_implementation("batched_mm")  # torch's grouped matmul has no float64.

    def call(found: Any) -> Any:
        with _default_dtype(dtype):
            return _results(model(**found))

    def loss(results: Any) -> Any:
        with _default_dtype(dtype):
            return architecture.loss(results)

    inputs = {name: _to(value, dtype, device) for name, value in architecture.inputs(batch).items()}
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return Program(inputs, call, state, loss)


def all_trials(
    architecture: Architecture, dtypes: tuple[torch.dtype, ...] = DTYPES, only_function: bool = False
) -> Iterator[Trial]:
    """One training step."""
    for dtype in dtypes:
        label = f"train {str(dtype).removeprefix('torch.')}"
        yield Trial(architecture.kind, label, lambda dtype=dtype: program_of(architecture, dtype))  # type: ignore[misc]


chosen_trials = all_trials


def cuts(trial: Trial) -> list[Cut]:
    """The batch."""
    return [cut_along(tensors_of(trial.build().inputs), 0, BATCH)]


def measured(architecture: Architecture) -> Row:
    """Bytes and work of one training step, cut and uncut."""
    build = lambda: program_of(architecture, torch.float32, TABLE_BATCH)  # noqa: E731
    _, batches = cut_along(tensors_of(build().inputs), 0, TABLE_BATCH)
    return row(build, batches, TABLE_BATCH)
