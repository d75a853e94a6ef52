"""A check of koila on a device at hand: `python -m koila.selfcheck --device cuda`.

*Takes* a device. *Gives* a report: whether programs have eager's numbers there, whether budgets hold by the device's
own counter, whether a step that runs out of memory is finished, and how long runs take beside eager. Koila's own tests
know a simulated device only; this is how a person who has a real one finds out. It takes some minutes.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import koila

Tensors = tuple[torch.Tensor, ...]
Scope = Callable[[], AbstractContextManager[Any]]
SHARES = (0.75, 0.5)
"""Budgets, as shares of what eager takes."""
FLOAT32 = 1e-4
"""How far results in float32 may be from eager's; with batch normalisation eager's own are 1.5e-5 from its float64."""
BALLAST_SHARES = (0.97, 0.5)
"""What is left of the device's memory, as shares of what eager takes, where no budget is named."""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    program: str
    check: str
    is_right: bool | None
    """None: nothing to be right or wrong about."""
    text: str


# Programs.


class _Decoder(nn.Module):
    """A small decoder with dropout."""

    def __init__(self, width: int, length: int, vocabulary: int = 512) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1))
        self.back, self.head = nn.Linear(4 * width, width), nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.mix(x).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return self.head(x + self.back(self.feed(x)))


def _decoder(size: int) -> tuple[nn.Module, Tensors]:
    given = torch.randint(512, (8 * size, 64))
    return _Decoder(16 * size, 64), (given, given.roll(-1, 1))


def _images(size: int) -> tuple[nn.Module, Tensors]:
    channels = 4 * size
    layers = [nn.Conv2d(3, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(), nn.Dropout(0.1)]
    again = [nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
    model = nn.Sequential(*layers, *again, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))
    return model, (torch.randn(8 * size, 3, 32, 32), torch.randint(10, (8 * size,)))


class _Last(nn.Module):
    """The last state of a recurrent layer, classified."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(width, width, batch_first=True), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x)[0][:, -1])


def _sequences(size: int) -> tuple[nn.Module, Tensors]:
    return _Last(8 * size), (torch.randn(8 * size, 16, 8 * size), torch.randint(10, (8 * size,)))


PROGRAMS: dict[str, Callable[[int], tuple[nn.Module, Tensors]]] = {
    "decoder": _decoder,
    "images": _images,
    "sequences": _sequences,
}


def _loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


# One step.


@dataclass(frozen=True)
class _Step:
    gradients: list[torch.Tensor]
    generator: torch.Tensor
    peak_bytes: int
    seconds: float


class _Checker:
    """Runs one program on a device, by eager and by koila."""

    def __init__(self, name: str, device: torch.device, size: int, dtype: torch.dtype, during: Scope) -> None:
        self.name, self.device, self.during = name, device, during
        torch.manual_seed(0)
        model, batch = PROGRAMS[name](size)
        self.model = model.to(device, dtype)
        self.batch = tuple((each.to(dtype) if each.is_floating_point() else each).to(device) for each in batch)
        self.buffers = [buffer.clone() for buffer in self.model.buffers()]
        self.eager = self.step()
        self.eager = self.step()  # Libraries have made their workspaces now.
        self.noise = distance(self.step(), self.eager)

    def step(self, lazy: Callable[..., Any] | None = None, around: Scope = nullcontext) -> _Step:
        """One step from the same state."""
        self.model.zero_grad()
        with torch.no_grad():
            for buffer, before in zip(self.model.buffers(), self.buffers, strict=True):
                buffer.copy_(before)
        torch.manual_seed(7)
        gc.collect()
        torch.accelerator.synchronize(self.device)
        torch.accelerator.reset_peak_memory_stats(self.device)
        before_bytes, started = torch.accelerator.memory_allocated(self.device), time.perf_counter()
        batch = self.batch if lazy is None else tuple(map(lazy, self.batch))
        with around():
            with self.during():
                loss = _loss(self.model, batch)
            loss.backward()
        torch.accelerator.synchronize(self.device)
        seconds = time.perf_counter() - started
        peak = torch.accelerator.max_memory_allocated(self.device) - before_bytes
        gradients = [p.grad.detach().cpu() for p in self.model.parameters() if p.grad is not None]
        generator = torch.get_device_module(self.device).get_rng_state(self.device)
        return _Step([*gradients, *(buffer.cpu() for buffer in self.model.buffers())], generator, peak, seconds)

    def findings(self, tolerance: float) -> Iterator[Finding]:
        """All checks of this program."""
        self.step(koila.lazy)
        whole = self.step(koila.lazy)
        yield self._numbers("not cut", whole, self.noise)
        ratio = whole.seconds / self.eager.seconds
        yield Finding(self.name, "not cut, time", None, f"{ratio:.2f} times eager's")
        yield self._numbers("in chunks of 3", self.step(koila.lazy, partial(koila.budget, chunk_size=3)), tolerance)
        for share in SHARES:
            yield from self._budget(share, tolerance)
        for share in BALLAST_SHARES:
            yield from self._without_budget(share, tolerance)

    def _numbers(self, check: str, found: _Step, tolerance: float) -> Finding:
        away = distance(found, self.eager)
        text = f"{away:.1e} from eager, which is {self.noise:.1e} from itself"
        if not torch.equal(found.generator, self.eager.generator):
            return Finding(self.name, check, False, "the generator does not stand where eager's does")
        return Finding(self.name, check, away <= max(tolerance, 2 * self.noise), text)

    def _budget(self, share: float, tolerance: float) -> Iterator[Finding]:
        check, lazy = f"budget of {share:.0%}", partial(koila.lazy, budget=int(share * self.eager.peak_bytes))
        try:
            self.step(lazy)
            found = self.step(lazy)
        except koila.BudgetError as refused:
            yield Finding(self.name, check, None, f"refused: {str(refused).splitlines()[0]}")
            return
        self.step(lazy, koila.measure)  # What the forward pass makes itself, such as a first state, is not the run's.
        report = koila.last_report()
        measured = report.measured_bytes or 0
        kept = 0 < measured <= (report.projected_bytes or 0) <= (report.allowed_bytes or 0)
        text = f"measured {measured}, projected {report.projected_bytes}, allowed {report.allowed_bytes}"
        yield Finding(self.name, f"{check}, bytes", kept and not report.retries, text)
        yield self._numbers(check, found, tolerance)
        ratio = found.seconds / self.eager.seconds
        yield Finding(self.name, f"{check}, time", None, f"{ratio:.2f} times eager's")

    def _without_budget(self, share: float, tolerance: float) -> Iterator[Finding]:
        """Fill the device so that eager does not fit, and name no budget."""
        check = f"no budget, {share:.0%} of what eager takes is left"
        with _ballast(self.device, int(share * self.eager.peak_bytes)):
            try:
                found = self.step(koila.lazy)
            except (torch.OutOfMemoryError, koila.BudgetError) as error:
                yield Finding(self.name, check, False, str(error).splitlines()[0])
                return
            retries = koila.last_report().retries
        finding = self._numbers(check, found, tolerance)
        yield Finding(self.name, check, finding.is_right and retries <= 1, f"{finding.text}; {retries} tries failed")


@contextmanager
def _ballast(device: torch.device, left_bytes: int) -> Iterator[None]:
    """All memory of a device but so many bytes is taken."""
    gc.collect()
    torch.accelerator.empty_cache()
    free, _ = torch.accelerator.get_memory_info(device)
    kept = torch.empty(max(0, free - left_bytes), dtype=torch.uint8, device=device)
    yield
    del kept


def distance(one: _Step, other: _Step) -> float:
    """The largest relative distance of gradients and buffers."""
    pairs = ((a.double(), b.double()) for a, b in zip(one.gradients, other.gradients, strict=True))
    return max(((a - b).norm() / (b.norm() + 1e-30)).item() for a, b in pairs)


# The report.


def check(device: torch.device, size: int = 8) -> Iterator[Finding]:
    """All findings on a device; larger sizes take longer and say more about time."""
    half = partial(torch.autocast, device.type, dtype=torch.bfloat16)
    for name in PROGRAMS:
        for dtype, during, tolerance, title in (
            (torch.float64, nullcontext, 1e-10, "float64"),
            (torch.float32, nullcontext, FLOAT32, "float32"),
            (torch.float32, half, 5e-2, "autocast to bfloat16"),
        ):
            for found in _Checker(name, device, size, dtype, during).findings(tolerance):
                yield Finding(f"{name}, {title}", found.check, found.is_right, found.text)
            gc.collect()


def main(arguments: list[str] | None = None) -> int:
    """Print the report; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m koila.selfcheck", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="an accelerator that is here")
    parser.add_argument("--size", type=int, default=8, help="how large the programs are")
    parser.add_argument("--json", help="a file for the report, to be sent")
    options = parser.parse_args(arguments)
    device = torch.device(options.device, 0) if ":" not in options.device else torch.device(options.device)
    findings = []
    for found in check(device, options.size):
        findings.append(found)
        mark = {True: "right", False: "WRONG", None: "     "}[found.is_right]
        print(f"{mark}  {found.program}: {found.check}: {found.text}", flush=True)
    wrong = sum(found.is_right is False for found in findings)
    print(f"{len(findings)} findings on {device}, PyTorch {torch.__version__}: {wrong} wrong")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(
                {"device": str(device), "torch": torch.__version__, "findings": list(map(asdict, findings))}, file
            )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
