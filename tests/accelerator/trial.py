"""One step of a program on the simulated device, by eager and by koila, with what the device counted.

*Takes* a program's name, and how koila is told its budget. *Gives* an `Outcome` of each, and their distance.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

import koila
from koila.ir.cache import clear_all
from koila.reporting.report import Report
from tests.accelerator import sim
from tests.accelerator.programs import program

Scope = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Outcome:
    """What a step left behind."""

    loss: float
    gradients: list[torch.Tensor]
    buffers: list[torch.Tensor]
    generator: torch.Tensor
    peak_bytes: int
    """The most that the device had allocated, beyond what was there before."""
    report: Report | None = None


def step(
    name: str, lazy: Callable[..., Any] | None = None, around: Scope = nullcontext, during: Scope = nullcontext,
    dtype: torch.dtype = torch.float64, device: str = "sim:0",
) -> Outcome:  # fmt: skip
    """Forward and backward.

    Args:
        name: The program.
        lazy: Makes the inputs lazy; they stay as they are if it is not given.
        around: A scope around the forward and the backward pass.
        during: A scope around the forward pass alone.
        dtype: The type of parameters and inputs.
        device: Where it runs.
    """
    made, index = program(name, dtype).to(device), torch.device(device).index
    torch.manual_seed(7)
    gc.collect()
    sim.reset_peak(index)
    before = sim.live(index)
    inputs = made.inputs if lazy is None else tuple(lazy(each) for each in made.inputs)
    with around():
        with during():
            loss = made.loss(made.model, inputs)
        loss.backward()
    peak = sim.peak(index) - before
    gradients = [p.grad.cpu() for p in made.model.parameters() if p.grad is not None]
    buffers = [buffer.cpu() for buffer in made.model.buffers()]
    report = None if lazy is None else koila.last_report()
    return Outcome(loss.item(), gradients, buffers, torch.sim.get_rng_state(index), peak, report)


def distance(one: Outcome, other: Outcome) -> float:
    """The largest relative distance of loss, gradients and buffers; infinite if anything else differs."""
    if not torch.equal(one.generator, other.generator) or len(one.gradients) != len(other.gradients):
        return float("inf")
    pairs = [*zip(one.gradients, other.gradients, strict=True), *zip(one.buffers, other.buffers, strict=True)]
    pairs.append((torch.tensor(one.loss), torch.tensor(other.loss)))
    return max(((a - b).norm() / (b.norm() + 1e-30)).item() for a, b in ((a.double(), b.double()) for a, b in pairs))


def assert_kept(outcome: Outcome) -> None:
    """Measured ≤ projected ≤ allowed, by the device's own counter (Rule 2)."""
    report = outcome.report
    assert report is not None and report.projected_bytes is not None and report.allowed_bytes is not None
    assert outcome.peak_bytes <= report.projected_bytes <= report.allowed_bytes


def forget() -> None:
    """What koila knows of earlier programs: a switch of the device, of which koila sees nothing, changes kernels."""
    clear_all()
