"""The state that a recorded call carries, for devices: autocast of the device's own type."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import koila
from koila._torch import RunMode
from tests.accelerator.trial import distance, step

autocast = partial(torch.autocast, "sim", dtype=torch.bfloat16)


def test_a_call_recorded_outside_of_autocast_runs_outside_of_it() -> None:
    first, second = torch.randn(8, 8, device="sim"), torch.randn(8, 8, device="sim")
    result = koila.lazy(first) @ second
    with autocast():
        found = result.run()
    assert torch.equal(found, first @ second)


def test_a_call_recorded_inside_of_autocast_runs_inside_of_it() -> None:
    first, second = torch.randn(8, 8, device="sim"), torch.randn(8, 8, device="sim")
    with autocast():
        result, expected = koila.lazy(first) @ second, first @ second
    assert result.dtype == torch.bfloat16
    assert torch.equal(result.run(), expected)


@pytest.mark.parametrize("name", ["gpt with dropout", "cnn"])
def test_programs_under_autocast(name: str) -> None:
    expected = step(name, during=autocast, dtype=torch.float32)
    whole = step(name, koila.lazy, during=autocast, dtype=torch.float32)
    assert distance(whole, expected) == 0
    split = step(name, koila.lazy, partial(koila.budget, chunk_size=5), during=autocast, dtype=torch.float32)
    assert split.report.how == "split"
    assert distance(split, expected) < 2e-2, "equal up to the rounding of bfloat16"


@pytest.mark.parametrize("chunk", [None, 5])
def test_autocast_does_not_reach_into_a_program_recorded_outside_of_it(chunk: int | None) -> None:
    """The backward pass of eager, too, runs under the autocast that is in force when it is called."""
    model, given = torch.nn.Linear(8, 8).to("sim"), torch.randn(12, 8, device="sim")
    losses = []
    for maker in (lambda tensor: tensor, koila.lazy):
        loss = model(maker(given)).square().mean()
        with autocast(), koila.budget(chunk_size=chunk):
            losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_gradient_scaler_of_the_device() -> None:
    found = []
    for maker in (lambda tensor: tensor, partial(koila.lazy, budget="64KiB")):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)).to("sim")
        given, optimizer = torch.randn(128, 32, device="sim"), torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("sim")
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(model(maker(given)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        found.append([parameter.detach().cpu() for parameter in model.parameters()])
    assert koila.last_report().how == "split"
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(*found, strict=True))


class StreamsOf(RunMode):
    """Notes on which stream products are made."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in str(func):
            self.seen.add(torch.accelerator.current_stream().stream_id)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("chunk", [None, 3])
def test_calls_run_on_the_stream_that_they_were_recorded_on(chunk: int | None) -> None:
    given, stream, watch = torch.randn(8, 8, device="sim"), torch.Stream("sim"), StreamsOf()
    value = koila.lazy(given)
    with stream:
        result = value @ given
    with koila.budget(chunk_size=chunk), watch:
        found = result.run()
    assert watch.seen == {stream.stream_id}
    assert torch.accelerator.current_stream() != stream
    assert torch.allclose(found, given @ given)


def test_calls_on_several_streams_run_whole() -> None:
    given, stream = torch.randn(8, 8, device="sim"), torch.Stream("sim")
    value = koila.lazy(given)
    with stream:
        result = value @ given
    with koila.budget(chunk_size=3):
        found = (result @ given).run()
    assert koila.last_report().fallbacks == ("calls were recorded on several streams of the accelerator",)
    assert torch.equal(found, given @ given @ given)


def test_the_current_device_belongs_to_a_recorded_call() -> None:
    value = koila.lazy(torch.ones(4, 2))
    koila.lazy(torch.ones(1, device="sim"))
    with torch.sim.device(1):
        result = value.to("sim") * 2
    assert result.device == result.run().device == torch.device("sim:1")
