"""S22: long programs cost in proportion to their length, and many steps and many programs leave nothing behind.

Work is counted in calls of Python functions, which are the same every time. `KOILA_NIGHTLY=1` runs the long forms:
100,000 chained calls, 1,000 steps, 300 programs.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import koila
from koila.ir.node import Node

pytestmark = pytest.mark.semantics("S22")

LONG = "KOILA_NIGHTLY" in os.environ
LENGTHS = (25_000, 100_000) if LONG else (1_000, 4_000)
NUM_STEPS = 1_000 if LONG else 60
NUM_PROGRAMS = 300 if LONG else 30


def work(run: Callable[[], Any]) -> int:
    """How many Python functions are called, by whatever runs."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def chain(length: int, grad: bool) -> float:
    weight = torch.ones(2, dtype=torch.float64, requires_grad=grad)
    value = koila.lazy(torch.ones(3, 2, dtype=torch.float64)) * weight
    for _ in range(length):
        value = value * 0.5 + 1
    total = value.sum()
    if grad:
        total.backward()
    return total.item()


@pytest.mark.parametrize("grad", [False, True])
def test_a_chain_of_calls_costs_in_proportion_to_its_length(grad: bool) -> None:
    chain(LENGTHS[0] // 10, grad)
    short, long = (work(lambda length=length: chain(length, grad)) for length in LENGTHS)  # type: ignore[misc]
    assert long <= 1.5 * LENGTHS[1] / LENGTHS[0] * short, f"{short} calls, then {long}"
    assert chain(LENGTHS[1], grad) == pytest.approx(12.0)


@pytest.mark.asks_laziness("it counts pending nodes")
def test_a_chain_that_nobody_reads_is_forgotten() -> None:
    before = num_nodes()
    value = koila.lazy(torch.ones(3, 2))
    for _ in range(LENGTHS[0]):
        value = value + 1
    assert num_nodes() - before == LENGTHS[0]
    del value
    assert num_nodes() == before


def num_nodes() -> int:
    gc.collect()
    return sum(type(each) is Node for each in gc.get_objects())


def held_bytes() -> tuple[int, int]:
    """Bytes of all tensors that are alive, and how many objects there are."""
    gc.collect()
    objects = gc.get_objects()
    # By type: lazy, fake and meta tensors have no bytes, and some objects answer `isinstance` with a warning.
    tensors = [each for each in objects if type(each) in (torch.Tensor, nn.Parameter) and not each.is_meta]
    return sum(each.numel() * each.element_size() for each in tensors), len(objects)


@pytest.mark.parametrize("budget", ["none", "chunks", "bytes"])
def test_many_steps_leave_nothing_behind(budget: str) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(net.parameters())
    losses = []

    def step(number: int) -> None:
        x, y = koila.lazy(torch.randn(8, 4), torch.randint(0, 3, (8,)))
        out = net(x)
        loss = nn.functional.cross_entropy(out, y) * (1 + number / 1000)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if number % 5 == 0:
            losses.append((out.argmax(1) == y).sum().item())

    scopes = {"none": nullcontext, "chunks": lambda: koila.budget(chunk_size=3), "bytes": lambda: koila.budget("64KiB")}
    with scopes[budget]():  # type: ignore[operator]
        for number in range(30):
            step(number)
        before = held_bytes()
        for number in range(NUM_STEPS):
            step(number)
        after = held_bytes()
    assert after[0] == before[0], "bytes of tensors"
    assert after[1] <= before[1] + 200, "objects: reports and metrics keep a bounded number of numbers"


def program(number: int, chunk_size: int | None) -> None:
    """One of many programs, each with sizes and calls of its own."""
    width = 2 + number % 7
    net = nn.Sequential(*(nn.Linear(width, width) for _ in range(1 + number % 5)), nn.LayerNorm(width))
    x = koila.lazy(torch.randn(4 + number % 3, width))
    with koila.budget(chunk_size=chunk_size) if chunk_size else nullcontext():
        (net(x).tanh() * (number + 1)).square().mean().backward()


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_many_programs_leave_no_tensors_behind(chunk_size: int | None) -> None:
    for number in range(3):
        program(number, chunk_size)
    before, _ = held_bytes()
    for number in range(NUM_PROGRAMS):
        program(number, chunk_size)
    after, _ = held_bytes()
    assert after <= before + 1024, "what traces remember of constants is small"
