"""The measurements that the documents quote: `./scripts/bench chunks`.

*Takes* the name of a measurement. *Gives* a table on stdout. Times are ratios to eager's, interleaved with it in one
process.
"""

from __future__ import annotations

import argparse
import importlib
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

import koila
from benchmarks import curve, memory, record, scale, whole
from benchmarks.process import run as process
from koila.planning.tracker import StorageTracker
from tests.models import Task, gradient_bytes, language, vision

BATCH = 16
CHUNK_SIZES = (BATCH, 8, 4, 2, 1)

TASKS: dict[str, Callable[[], Task]] = {
    "GPT": lambda: language(BATCH, torch.float32, context=64, width=128, heads=4, layers=4, vocabulary=512),
    "CNN": lambda: vision(BATCH, torch.float32, size=32, channels=32, layers=6),
}


@dataclass(frozen=True)
class Way:
    """How a step is run."""

    name: str
    lazy: bool
    chunk_size: int | None

    def step(self, task: Task) -> None:
        batch = koila.lazy(*task.batches[0]) if self.lazy else task.batches[0]
        task.model.zero_grad()
        with koila.budget(chunk_size=self.chunk_size):
            task.loss(task.logits(batch), batch).backward()


WAYS = (
    Way("eager", False, None),
    *(Way("whole" if size == BATCH else str(size), True, None if size == BATCH else size) for size in CHUNK_SIZES),
)


def peak_bytes(way: Way, task: Task) -> int:
    """The most that lives above the start and above the gradients, in a step after the first."""
    way.step(task)
    task.model.zero_grad()
    with StorageTracker() as tracker:
        way.step(task)
    return tracker.peak_bytes - gradient_bytes(task.model)


def time_ratios(task: Task, rounds: int) -> dict[str, float]:
    """Seconds of a step over those of eager's step of the same round; the median over rounds."""
    ratios: dict[str, list[float]] = {way.name: [] for way in WAYS}
    for _ in range(rounds):
        seconds = {}
        for way in WAYS:
            started = time.perf_counter()
            way.step(task)
            seconds[way.name] = time.perf_counter() - started
        for name, value in seconds.items():
            ratios[name].append(value / seconds["eager"])
    return {name: median(values) for name, values in ratios.items()}


def chunks(rounds: int) -> None:
    """Transient peak and time against chunk size."""
    columns: dict[str, tuple[dict[str, int], dict[str, float]]] = {}
    for name, make in TASKS.items():
        task = make()
        peaks = {way.name: peak_bytes(way, task) for way in WAYS}
        columns[name] = peaks, time_ratios(task, rounds)
    print(
        f"batch of {BATCH}, float32, torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}"
    )
    print("peak: bytes of tensors above the gradients; time: a step over eager's, median of interleaved rounds\n")
    print("| chunk size | " + " | ".join(f"{name} peak | {name} time" for name in TASKS) + " |")
    print("|---" * (1 + 2 * len(TASKS)) + "|")
    for way in WAYS:
        cells = (f"{peaks[way.name] / 2**20:.1f} MiB | {times[way.name]:.2f}" for peaks, times in columns.values())
        print(f"| {way.name} | {' | '.join(cells)} |")


def measure_chunks(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench chunks", description=chunks.__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="rounds of interleaved steps for the times")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch; one is disturbed least by neighbours")
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    chunks(given.rounds)


def measure_accelerator(arguments: list[str]) -> None:
    # Not imported before: it compiles the simulated device, and gives PyTorch another accelerator.
    importlib.import_module("benchmarks.accelerator").main(arguments)


MEASUREMENTS: dict[str, Callable[[list[str]], None]] = {
    "chunks": measure_chunks,
    "accelerator": measure_accelerator,
    "curve": curve.main,
    "memory": memory.main,
    "process": process.main,
    "record": record.main,
    "scale": scale.main,
    "whole": whole.main,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("measurement", choices=list(MEASUREMENTS))
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the measurement; --help shows them")
    given = parser.parse_args()
    MEASUREMENTS[given.measurement](given.arguments)


if __name__ == "__main__":
    main()
