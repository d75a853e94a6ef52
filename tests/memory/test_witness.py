"""The outside witness: it agrees with the tracker where nothing is hidden, and sees what the tracker cannot."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

from benchmarks import witness
from koila.planning.tracker import StorageTracker
from tests.models import language

MIB = 2**20
Step = Callable[[], None]


def gpt() -> Step:
    task = language(8, torch.float32, context=64, width=128, heads=4, layers=2, vocabulary=2048, dropout=0.0)

    def step() -> None:
        task.model.zero_grad()
        task.loss(task.logits(task.batches[0]), task.batches[0]).backward()

    return step


def mlp() -> Step:
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))
    x = torch.randn(2048, 512)

    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    return step


def lstm() -> Step:
    model = nn.LSTM(64, 128, batch_first=True)
    x = torch.randn(64, 128, 64)

    def step() -> None:
        model.zero_grad()
        model(x)[0].sum().backward()

    return step


def bfloat16_convolution() -> Step:
    model = nn.Conv2d(64, 64, 3, padding=1).bfloat16()
    x = torch.randn(8, 64, 64, 64, dtype=torch.bfloat16)

    def step() -> None:
        model.zero_grad()
        model(x).sum().backward()

    return step


def both_witnesses(name: str) -> tuple[int, int]:
    """Peak bytes of a step by the hook and by the tracker."""
    step: Step = globals()[name]()
    step()
    with StorageTracker() as tracker:
        step()
    gc.collect()
    for parameter in (p for p in gc.get_objects() if isinstance(p, nn.Parameter)):
        parameter.grad = None
    with witness.Watch() as watch:
        step()
    return watch.peak_bytes, tracker.peak_bytes


@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_both_witnesses_agree_in_float32(name: str) -> None:
    outside, inside = witness.call_outside("tests.memory.test_witness:both_witnesses", name)
    assert inside > 4 * MIB
    assert abs(outside - inside) <= 0.3 * MIB, f"outside {outside}, inside {inside}"


@pytest.mark.parametrize("name", ["lstm", "bfloat16_convolution"])
def test_the_outside_witness_sees_hidden_workspace(name: str) -> None:
    outside, inside = witness.call_outside("tests.memory.test_witness:both_witnesses", name)
    assert outside > inside + MIB, f"outside {outside}, inside {inside}"


def test_a_step_is_measured_above_the_state_before_it() -> None:
    peak = witness.peak_outside("tests.memory.test_witness:mlp")
    activations, gradients = 3 * 2048 * 2048 * 4, 2 * 2048 * 512 * 4
    assert gradients < peak < 2 * (activations + gradients)


def test_outside_a_subprocess_there_is_no_hook() -> None:
    with pytest.raises(witness.WitnessError, match="not loaded in this process"):
        witness.live_bytes()


def test_a_failure_in_the_subprocess_is_told() -> None:
    with pytest.raises(witness.WitnessError, match="KeyError: 'nothing'"):
        witness.call_outside("tests.memory.test_witness:both_witnesses", "nothing")
