"""The device runs out of memory: the step is finished with eager's numbers, or nothing has changed.

`KOILA_NIGHTLY=1` makes every allocation of a step fail once, in turn (`scripts/nightly accelerator`); else a few do.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch

import koila
from tests.accelerator import sim
from tests.accelerator.programs import Program, program
from tests.accelerator.trial import forget

NUM_FAILURES = 50 if os.environ.get("KOILA_NIGHTLY") else 3
"""Per case: 200 and more in all at night."""
NUM_STEPS = 3


@pytest.fixture(autouse=True)
def unknown() -> None:
    forget()


def train(made: Program, lazy: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor) -> list[torch.Tensor]:
    """A few steps of a training loop; the parameters and buffers afterwards."""
    optimizer = torch.optim.SGD(made.model.parameters(), 0.1, momentum=0.9)
    torch.manual_seed(7)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        made.loss(made.model, tuple(map(lazy, made.inputs))).backward()
        optimizer.step()
    return [tensor.detach().cpu() for tensor in (*made.model.parameters(), *made.model.buffers())]


def are_alike(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    pairs = ((a.double(), b.double()) for a, b in zip(found, expected, strict=True))
    return all((a - b).norm() <= 1e-9 * (b.norm() + 1e-30) for a, b in pairs)


@pytest.mark.parametrize("share", [0.97, 0.7, 0.5, 0.25])
@pytest.mark.parametrize("name", ["gpt with dropout", "cnn", "mlp"])
def test_a_loop_without_a_budget_fits_into_the_device(name: str, share: float) -> None:
    sim.reset_peak()
    made = program(name).to("sim")
    before = sim.live()
    expected = train(made)
    needed = sim.peak() - before
    del made
    gc.collect()
    made = program(name).to("sim")
    # What stays between the steps, momentum and gradients, is there beside what the limit leaves for a step.
    resident = sum(2 * p.numel() * p.element_size() for p in made.model.parameters())
    sim.limit(sim.live() + resident + int(share * (needed - resident)))
    before = torch.accelerator.memory_stats("sim:0")["num_ooms"]
    found = train(made, koila.lazy)
    assert torch.accelerator.memory_stats("sim:0")["num_ooms"] <= before + 1, "at most one try fails in all"
    assert are_alike(found, expected)


# Allocations that fail.


class Trainer:
    """One step that can be repeated from the same state."""

    def __init__(self, name: str, around: Callable[[], AbstractContextManager[Any]]) -> None:
        self.made, self.around = program(name).to("sim"), around
        self.buffers = [buffer.clone() for buffer in self.made.model.buffers()]

    def reset(self) -> None:
        self.made.model.zero_grad()
        for buffer, before in zip(self.made.model.buffers(), self.buffers, strict=True):
            buffer.copy_(before)
        torch.manual_seed(7)
        gc.collect()

    def step(self, fail_in: int = -1) -> int:
        """Record, then run; the number of allocations of the run."""
        with self.around():
            loss = self.made.loss(self.made.model, tuple(map(koila.lazy, self.made.inputs)))
            before = sim.allocations()
            sim.fail_in(fail_in)
            try:
                loss.backward()
            finally:
                sim.fail_in(-1)
            return sim.allocations() - before

    def state(self) -> list[torch.Tensor]:
        gradients = [p.grad for p in self.made.model.parameters() if p.grad is not None]
        return [tensor.detach().cpu() for tensor in (*gradients, *self.made.model.buffers())]


WAYS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "whole": nullcontext,
    "chunks": partial(koila.budget, chunk_size=5),
    "budget": partial(koila.budget, "300KiB"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["gpt with dropout", "cnn"])
def test_an_allocation_that_fails_changes_nothing_or_nothing_but_the_plan(name: str, way: str) -> None:
    trainer = Trainer(name, WAYS[way])
    trainer.reset()
    trainer.step()
    expected = trainer.state()
    trainer.reset()
    count = trainer.step()
    assert are_alike(trainer.state(), expected)
    for number in range(0, count, max(1, count // NUM_FAILURES)):
        trainer.reset()
        untouched = trainer.state()
        try:
            trainer.step(number)
        except (torch.OutOfMemoryError, koila.errors.BudgetError):
            assert all(map(torch.equal, trainer.state(), untouched)), f"allocation {number} of {count}"
        else:
            assert are_alike(trainer.state(), expected), f"allocation {number} of {count}"


@pytest.mark.parametrize("number", range(3))
def test_drawing_is_tried_again_with_the_same_numbers(number: int) -> None:
    given, found = torch.randn(64, 64, device="sim"), []
    torch.nn.functional.dropout(koila.lazy(given), 0.5).run()  # The device is known.
    for fails in (-1, number):
        torch.manual_seed(1)
        value = koila.lazy(given)
        sim.fail_in(fails)
        result = torch.nn.functional.dropout(value, 0.5)
        sim.fail_in(-1)
        found.append((result.run(), torch.sim.get_rng_state()))
    assert all(map(torch.equal, *found))
