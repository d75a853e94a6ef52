"""Several devices: a program on another one than the first, and a program over two of them, written by hand."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import koila
from tests.accelerator import sim
from tests.accelerator.trial import assert_kept, distance, step


@pytest.mark.parametrize("name", ["gpt with dropout", "cnn"])
def test_a_program_on_the_second_device(name: str) -> None:
    expected = step(name, device="sim:1")
    sim.reset_peak(0)
    before = sim.peak(0)
    found = step(name, partial(koila.lazy, budget=int(0.6 * expected.peak_bytes)), device="sim:1")
    assert found.report.how == "split"
    assert_kept(found)
    assert distance(found, expected) < 1e-10
    assert sim.peak(0) == before, "nothing of it is on the first device"


class Pipeline(nn.Module):
    """Two halves on two devices."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(16, 128), nn.Dropout(0.1), nn.Tanh()).to("sim:0", torch.float64)
        self.second = nn.Sequential(nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 4)).to("sim:1", torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).to("sim:1"))


def pipeline_step(lazy: object = None, **budget: object) -> tuple[list[torch.Tensor], list[int]]:
    """The gradients, and what each device had at its peak."""
    torch.manual_seed(0)
    model = Pipeline()
    given = torch.randn(256, 16, dtype=torch.float64, device="sim:0")
    classes = torch.randint(4, (256,), device="sim:1")
    torch.manual_seed(7)
    gc.collect()
    before = [sim.live(device) for device in (0, 1)]
    for device in (0, 1):
        sim.reset_peak(device)
    if lazy is not None:
        given, classes = koila.lazy(given, classes)
    with koila.budget(**budget):
        F.cross_entropy(model(given), classes).backward()
    peaks = [sim.peak(device) - live for device, live in zip((0, 1), before, strict=True)]
    assert all(p.grad.device == p.device for p in model.parameters())
    return [p.grad.cpu() for p in model.parameters()], peaks


def are_alike(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all((a - b).norm() <= 1e-10 * b.norm() for a, b in zip(found, expected, strict=True))


def test_a_pipeline_over_two_devices() -> None:
    expected, peaks = pipeline_step()
    for options in ({"chunk_size": 50}, {"allowed": int(0.4 * sum(peaks))}):
        found, seen = pipeline_step(lazy=True, **options)
        assert koila.last_report().how == "split"
        assert are_alike(found, expected)
        assert "allowed" not in options or max(seen) <= koila.last_report().projected_bytes <= options["allowed"]


@pytest.mark.parametrize("short", [0, 1])
def test_the_device_with_the_least_memory_decides(short: int) -> None:
    expected, peaks = pipeline_step()
    gc.collect()
    sim.limit(sim.live(short) + peaks[short] // 2 + 200_000, short)
    found, _ = pipeline_step(lazy=True)
    assert are_alike(found, expected)
