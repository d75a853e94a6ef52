"""A GPT and a BatchNorm CNN, trained for twenty steps: whole they are eager's to the bit, in chunks they are exact."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch

import koila
from tests.e2e.training import Step, assert_exact, assert_identical, train
from tests.models import Task, language, vision

BATCH = 11
STEPS = 20

TASKS: dict[str, Callable[[torch.dtype], Task]] = {
    "gpt": lambda dtype: language(BATCH, dtype, STEPS),
    "cnn": lambda dtype: vision(BATCH, dtype, STEPS),
    "gpt, all sizes equal": lambda dtype: language(
        BATCH, dtype, STEPS, context=BATCH, vocabulary=BATCH, heads=BATCH, width=BATCH * 2, layers=1
    ),
    "cnn, all sizes equal": lambda dtype: vision(
        BATCH, dtype, STEPS, size=BATCH, classes=BATCH, channels=BATCH, layers=2
    ),
}


@pytest.fixture(scope="module")
def eager() -> Iterator[Callable[[str, torch.dtype], list[Step]]]:
    """Steps of plain PyTorch, made once for each task and dtype."""
    known: dict[tuple[str, torch.dtype], list[Step]] = {}

    def steps(name: str, dtype: torch.dtype) -> list[Step]:
        if (name, dtype) not in known:
            known[name, dtype] = train(TASKS[name](dtype), lazy=False)
        return known[name, dtype]

    yield steps


@pytest.mark.parametrize("name", TASKS)
def test_unsplit_training_is_bit_identical(name: str, eager: Callable[..., list[Step]]) -> None:
    found = train(TASKS[name](torch.float32), lazy=True)
    assert_identical(found, eager(name, torch.float32))
    assert sum(step.loss for step in found[-5:]) < sum(step.loss for step in found[:5])


@pytest.mark.parametrize("chunk_size", [1, 3, 4])
@pytest.mark.parametrize("name", TASKS)
def test_training_in_chunks_is_exact(name: str, chunk_size: int, eager: Callable[..., list[Step]]) -> None:
    koila.metrics.reset()
    found = train(TASKS[name](torch.float64), lazy=True, chunk_size=chunk_size)
    assert_exact(found, eager(name, torch.float64))
    assert koila.metrics.counter_value("runs::split") >= STEPS
    assert [counter for counter in koila.metrics.counter_names() if counter.startswith("fallback::")] == []


@pytest.mark.semantics("S17")
@pytest.mark.parametrize("name", ["gpt", "cnn"])
@pytest.mark.parametrize("chunk_size", [None, 4])
def test_loss_read_before_backward(name: str, chunk_size: int | None) -> None:
    dtype = torch.float32 if chunk_size is None else torch.float64
    task, reference = TASKS[name](dtype), TASKS[name](dtype)
    del task.batches[4:], reference.batches[4:]
    found = train(task, lazy=True, chunk_size=chunk_size, read_before=True)
    expected = train(reference, lazy=False, read_before=True)
    if chunk_size is None:
        assert_identical(found, expected)
    else:
        assert_exact(found, expected)


@pytest.mark.semantics("S17")
def test_one_joint_run_serves_an_item_that_backward_follows() -> None:
    """Learned demand: from the second step on, the loss that is read and its gradients come from the same run."""
    task = language(BATCH, torch.float64, steps=4, vocabulary=29)  # A program that no other test runs.
    koila.metrics.reset()
    train(task, lazy=True, chunk_size=4, read_before=True)
    assert koila.metrics.counter_value("segment::rerun") == 1


def test_a_forgotten_program_of_another_batch_size_does_not_stop_the_cut() -> None:
    """Its running statistics are due before the next run, and it is cut along its own batch."""
    first, second = (torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5)).double() for _ in range(2))
    reference = copy.deepcopy(first)
    large, small = torch.randn(16, 3).double(), torch.randn(8, 3).double()
    reference(large)
    with koila.budget(chunk_size=1):
        first(koila.lazy(large))
        koila.metrics.reset()
        second(koila.lazy(small)).square().mean().backward()
    assert koila.metrics.counter_value("runs::split") == 2
    torch.testing.assert_close(first[1].running_var, reference[1].running_var, rtol=1e-10, atol=0)
    assert koila.metrics.counter_value("chunks") % 8 == 0
