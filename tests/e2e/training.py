"""Training loops as users write them, and what is left after each step.

*Takes* a task of `tests.models`. *Gives* one `Step` per batch, for comparison with plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

import koila
from tests.models import Batch, Task

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-6}


@dataclass(frozen=True)
class Step:
    """What one step of training left behind."""

    loss: float
    correct: int
    gradients: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    generator: torch.Tensor


def take_step(task: Task, batch: Batch, optimizer: torch.optim.Optimizer, read_before: bool = False) -> Step:
    """One step; the batch is lazy or not. Loss and accuracy are read after the optimizer's step, or before backward."""
    optimizer.zero_grad()
    logits = task.logits(batch)
    loss = task.loss(logits, batch)
    seen = loss.item() if read_before else None
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in task.model.named_parameters() if p.grad is not None}
    optimizer.step()
    value = loss.item() if seen is None else seen
    correct = int(task.correct(logits, batch).item())
    parameters = {name: p.detach().clone() for name, p in task.model.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in task.model.named_buffers()}
    return Step(value, correct, gradients, parameters, buffers, torch.get_rng_state())


def train(task: Task, lazy: bool, chunk_size: int | None = None, read_before: bool = False) -> list[Step]:
    """A pass over the task's batches with AdamW."""
    torch.manual_seed(7)
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=1e-2)
    steps = []
    for batch in task.batches:
        with koila.budget(chunk_size=chunk_size):
            steps.append(take_step(task, koila.lazy(*batch) if lazy else batch, optimizer, read_before))
    return steps


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """‖found − expected‖ / ‖expected‖; infinite where something differs from zero."""
    assert found.shape == expected.shape and found.dtype == expected.dtype
    if not expected.is_floating_point():
        return 0.0 if torch.equal(found, expected) else float("inf")
    difference, size = float((found - expected).double().norm()), float(expected.double().norm())
    return 0.0 if difference == 0.0 else difference / size if size else float("inf")


def worst(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> tuple[float, str]:
    """The largest relative error among tensors of the same names, and its name."""
    assert found.keys() == expected.keys()
    return max(((relative_error(found[name], expected[name]), name) for name in expected), default=(0.0, "nothing"))


def assert_identical(found: Sequence[Step], expected: Sequence[Step]) -> None:
    """The same bits after each step."""
    for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert mine.loss == theirs.loss and mine.correct == theirs.correct, f"step {number}"
        assert torch.equal(mine.generator, theirs.generator), f"generator after step {number}"
        for kind in ("gradients", "parameters", "buffers"):
            ours, plain = getattr(mine, kind), getattr(theirs, kind)
            assert ours.keys() == plain.keys()
            assert [n for n in plain if not torch.equal(ours[n], plain[n])] == [], f"{kind} after step {number}"


def assert_exact(found: Sequence[Step], expected: Sequence[Step], tolerance: float = 1e-10) -> None:
    """Equal up to the order of summation, after each step; the same generator."""
    for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert abs(mine.loss - theirs.loss) <= tolerance * abs(theirs.loss), f"step {number}"
        assert mine.correct == theirs.correct, f"step {number}"
        assert torch.equal(mine.generator, theirs.generator), f"generator after step {number}"
        for kind in ("gradients", "parameters", "buffers"):
            error, name = worst(getattr(mine, kind), getattr(theirs, kind))
            assert error <= tolerance, f"{kind} of {name} after step {number}: {error:.1e}"
