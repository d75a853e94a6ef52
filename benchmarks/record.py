"""What being lazy costs small programs: `./scripts/bench record`.

*Takes* nothing but the number of rounds. *Gives* a table on stdout: recording per call over the same calls on a bare
wrapper subclass, which does nothing but make a wrapper; a run with nothing in it over eager's `x.sum().item()`; steps
of small programs over eager's. Beside `eager="auto"` stands its floor: the same steps on a subclass of tensors that
runs each call and gives the result its own class, and does nothing else. All ways of a row take turns in one process,
and their CPU time is compared within a round, so that neighbours on the machine disturb little; the ratio is the median
over rounds.

`--flat` runs many steps of the tiny MLP instead, and prints how time per step and memory go on.
"""

from __future__ import annotations

import argparse
import platform
import resource
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import koila
from koila._torch import C_METHODS, plain_call, without_torch_function

Step = Callable[[], object]
Make = Callable[..., Any]
"""What makes the tensors of a step, as `koila.lazy` does: one tensor in, one out."""
Ways = tuple[Step, Step, Step, Step]
"""A step lazily, eagerly, with `eager="auto"`, and on `Intercepting` tensors."""
Measured = tuple[float, float, float]
"""Seconds, seconds of the reference, and the ratio; each is a median."""
auto = partial(koila.lazy, eager="auto")
WIDTH = 64
NUM_LAYERS = 16


class Bare(torch.Tensor):
    """A wrapper subclass that makes a wrapper for each call, and nothing else: the floor of recording."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return bare()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError


def bare() -> Any:
    """A bare wrapper of the one shape that the recorded programs have."""
    return torch.Tensor._make_wrapper_subclass(Bare, (WIDTH, WIDTH))  # type: ignore[attr-defined]


class Intercepting(torch.Tensor):
    """A real tensor whose calls run at once on PyTorch's engine and give tensors of this class, and nothing else: the
    floor of `eager="auto"`. Its methods do without PyTorch's own dispatch, as those of `EagerTensor` do."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = plain_call(func, types, args, kwargs or {})
        if type(result) is torch.Tensor:
            result.__class__ = Intercepting
        return result

    def backward(self, *args: Any, **kwargs: Any) -> None:
        with without_torch_function():
            torch.Tensor.backward(self, *args, **kwargs)

    def item(self) -> Any:
        with without_torch_function():
            return torch.Tensor.item(self)


def _intercepted(method: Any) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return Intercepting.__torch_function__(method, (Intercepting,), (self, *args), kwargs)

    return call


for _name, _method in C_METHODS.items():
    if _name not in vars(Intercepting) and getattr(torch.Tensor, _name) is _method:
        setattr(Intercepting, _name, _intercepted(_method))


def eagerly(*tensors: torch.Tensor) -> Any:
    """The tensors themselves."""
    return tensors[0] if len(tensors) == 1 else tensors


def intercepting(*tensors: torch.Tensor) -> Any:
    """Other tensors with the same memory, whose calls are intercepted."""
    made = [tensor.detach() for tensor in tensors]
    for each in made:
        each.__class__ = Intercepting
    return made[0] if len(made) == 1 else tuple(made)


MAKES: tuple[Make, ...] = (koila.lazy, eagerly, auto, intercepting)


def ways_of(step: Callable[[Make], object]) -> Ways:
    """A step in all ways."""
    lazily, eager, at_once, floor = (partial(step, make) for make in MAKES)
    return lazily, eager, at_once, floor


def cpu_seconds(step: Step, times: int) -> float:
    """The CPU time of one step."""
    started = time.process_time()
    for _ in range(times):
        step()
    return (time.process_time() - started) / times


# Recording.


@dataclass(frozen=True)
class Recording:
    """A program of which only the recording is timed."""

    name: str
    layer: Callable[[], Callable[[Any], Any]]
    """Makes one layer; the program is `NUM_LAYERS` of them."""
    num_calls: int
    """Calls per layer."""
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext


def linear_layer() -> Callable[[Any], Any]:
    weight, bias = torch.randn(WIDTH, WIDTH, requires_grad=True), torch.zeros(WIDTH, requires_grad=True)
    return lambda h: torch.relu(F.linear(h, weight, bias))


def norm_layer() -> Callable[[Any], Any]:
    linear, mean, variance = linear_layer(), torch.zeros(WIDTH), torch.ones(WIDTH)
    return lambda h: F.batch_norm(linear(h), mean, variance, training=True)


def budget() -> AbstractContextManager[Any]:
    return koila.budget("1GiB")


RECORDINGS = (
    Recording("no budget", linear_layer, 2),
    Recording("budget", linear_layer, 2, budget),
    Recording("BatchNorm", norm_layer, 3),
    Recording("BatchNorm, budget", norm_layer, 3, budget),
)


def measure_recording(recording: Recording, rounds: int) -> Measured:
    """Seconds per call, lazily and on bare wrappers, and the ratio; medians over rounds."""
    layers = [recording.layer() for _ in range(NUM_LAYERS)]
    x, pairs = torch.randn(WIDTH, WIDTH), list[tuple[float, float]]()
    for _ in range(rounds + 5):
        with recording.scope():
            made, lazy = _recorded(layers, koila.lazy(x))
            made.sum().backward()
        pairs.append((lazy, _recorded(layers, bare())[1]))
    calls, pairs = NUM_LAYERS * recording.num_calls, pairs[5:]
    lazy, floor, ratio = _medians(pairs)
    return lazy / calls, floor / calls, ratio


def _recorded(layers: Sequence[Callable[[Any], Any]], h: Any) -> tuple[Any, float]:
    """What the layers make of a tensor, and the CPU seconds that they took."""
    started = time.process_time()
    for layer in layers:
        h = layer(h)
    return h, time.process_time() - started


# Steps.


def training(model: nn.Module, loss: Callable[..., torch.Tensor], *batch: torch.Tensor) -> Ways:
    """A training step, on the same model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(make: Make) -> None:
        given = make(*batch)
        optimizer.zero_grad()
        loss(*(given if isinstance(given, tuple) else (given,))).backward()
        optimizer.step()

    return ways_of(step)


def tiny_mlp() -> Ways:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    return training(
        model, lambda x, y: F.cross_entropy(model(x), y), torch.randn(64, 64), torch.randint(0, 10, (64,))
    )  # fmt: skip


def regression() -> Ways:
    model = nn.Linear(32, 1)
    return training(model, lambda x, y: F.mse_loss(model(x), y), torch.randn(256, 32), torch.randn(256, 1))


def lstm() -> Ways:
    body, head = nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 4)
    loss = lambda x, y: F.cross_entropy(head(body(x)[0][:, -1]), y)  # noqa: E731
    return training(nn.ModuleList([body, head]), loss, torch.randn(16, 20, 16), torch.randint(0, 4, (16,)))


def gcn() -> Ways:
    first, second = nn.Linear(32, 64), nn.Linear(64, 8)
    links = torch.rand(128, 128).softmax(1)
    loss = lambda x, y: F.cross_entropy(links @ second(torch.relu(links @ first(x))), y)  # noqa: E731
    return training(nn.ModuleList([first, second]), loss, torch.randn(128, 32), torch.randint(0, 8, (128,)))


def reinforcement() -> Ways:
    """Twenty actions of a policy, each read as a number, then one backward pass through all of them."""
    policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-3)
    returns = torch.randn(20)

    def episode(make: Make) -> None:
        chosen, state = [], torch.zeros(4)
        for _ in range(20):
            logs = F.log_softmax(policy(make(state)), dim=-1)
            action = int(logs.exp().argmax().item())
            chosen.append(logs[action])
            state = torch.roll(state, 1) + action
        optimizer.zero_grad()
        (-(torch.stack(chosen) * returns).sum()).backward()
        optimizer.step()

    return ways_of(episode)


def empty() -> Ways:
    """One sum of a tensor that is made lazy once; with `eager="auto"` once more, when the sum is known."""
    x = torch.randn(WIDTH, WIDTH)
    z = koila.lazy(x)
    for _ in range(5):
        known = auto(x)
        known.sum().item()
    assert type(known) is koila.EagerTensor
    floor = intercepting(x)
    return lambda: z.sum().item(), lambda: x.sum().item(), lambda: known.sum().item(), lambda: floor.sum().item()


STEPS: dict[str, tuple[Callable[[], Ways], float]] = {
    "a run with nothing in it": (empty, 15.0),
    "tiny MLP": (tiny_mlp, 1.3),
    "regression": (regression, 1.6),
    "LSTM": (lstm, 1.6),
    "gcn": (gcn, 1.6),
    "reinforcement learning": (reinforcement, 3.0),
}
"""Name → what makes the step, and the largest ratio that is aimed at."""
AUTO_AIM = 1.3
"""The same for all of them with `eager="auto"`."""


def measure_step(make: Callable[[], Ways], rounds: int) -> tuple[Measured, Measured, Measured]:
    """Seconds of a step and of eager's, and the ratio, lazily, with `eager="auto"`, and on tensors that only intercept;
    medians over rounds."""
    torch.manual_seed(0)
    ways = make()
    for step in ways:
        cpu_seconds(step, 5)
    times = max(1, int(2e-3 / cpu_seconds(ways[0], 5)))
    found = [[cpu_seconds(way, times) for way in ways] for _ in range(rounds)]
    lazy, at_once, floor = (_medians([(each[way], each[1]) for each in found]) for way in (0, 2, 3))
    return lazy, at_once, floor


def _medians(pairs: Sequence[tuple[float, float]]) -> Measured:
    return median(a for a, _ in pairs), median(b for _, b in pairs), median(a / b for a, b in pairs)


def table(title: str, rows: Sequence[tuple[str, float, float, float, float]]) -> None:
    """Rows of (name, seconds, seconds of the reference, ratio, aim)."""
    print(f"\n| {title} | koila | reference | ratio | aim |\n|---|---|---|---|---|")
    for name, lazy, reference, ratio, aim in rows:
        print(f"| {name} | {lazy * 1e6:.1f} µs | {reference * 1e6:.1f} µs | {ratio:.2f} | {aim:g} |")


def floor_table(title: str, rows: Sequence[tuple[str, Measured, Measured, float]]) -> None:
    """Rows of (name, koila, floor, aim)."""
    print(f"\n| {title} | koila | floor | reference | ratio | floor's ratio | aim |\n|---|---|---|---|---|---|---|")
    for name, (lazy, reference, ratio), (floor, _, least), aim in rows:
        shown = " | ".join(f"{seconds * 1e6:.1f} µs" for seconds in (lazy, floor, reference))
        print(f"| {name} | {shown} | {ratio:.2f} | {least:.2f} | {aim:g} |")


# Many steps.


def resident_bytes() -> int:
    """The resident set of this process, now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def flat(num_steps: int, parts: int = 10) -> list[tuple[float, int]]:
    """(CPU seconds per step, resident bytes after it) of each tenth of many steps of the tiny MLP."""
    torch.manual_seed(0)
    lazy, *_ = tiny_mlp()
    cpu_seconds(lazy, 50)
    return [(cpu_seconds(lazy, num_steps // parts), resident_bytes()) for _ in range(parts)]


def print_flat(num_steps: int) -> None:
    found = flat(num_steps)
    print(f"\n{num_steps} steps of the tiny MLP, by tenths\n\n| CPU time per step | resident |\n|---|---|")
    for seconds, num_bytes in found:
        print(f"| {seconds * 1e6:.0f} µs | {num_bytes / 2**20:.1f} MiB |")
    grown = found[-1][1] - found[0][1]
    print(f"\nlast over first: time {found[-1][0] / found[0][0]:.2f}, memory {grown / 2**20:+.1f} MiB")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench record", description=__doc__)
    parser.add_argument("--rounds", type=int, default=101, help="rounds of interleaved steps")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch; one is disturbed least by neighbours")
    parser.add_argument("--flat", type=int, metavar="STEPS", help="run so many steps of the tiny MLP instead")
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    print(f"torch {torch.__version__}, {given.threads} threads, {platform.machine()}; CPU time, medians")
    if given.flat is not None:
        print_flat(given.flat)
        return
    found = [(recording.name, *measure_recording(recording, given.rounds), 5.0) for recording in RECORDINGS]
    table("recording, per call", found)
    steps = {name: measure_step(make, given.rounds) for name, (make, _) in STEPS.items()}
    table("steps", [(name, *lazy, STEPS[name][1]) for name, (lazy, _, _) in steps.items()])
    rows = [(name, at_once, floor, AUTO_AIM) for name, (_, at_once, floor) in steps.items()]
    floor_table('steps, eager="auto"', rows)
