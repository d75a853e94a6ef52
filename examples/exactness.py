"""Trains a GPT and a BatchNorm CNN three ways side by side: eagerly, lazily, and lazily in chunks.

Shows the losses, how far the gradients are from eager's, whether buffers and random numbers are the same, and the
measured peak of a step. Fails if a promise is broken: whole, koila is eager to the bit; in chunks it is exact.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import koila

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from koila.planning.tracker import StorageTracker  # noqa: E402
from tests.models import Batch, Task, gradient_bytes, language, vision  # noqa: E402

BATCH = 11
STEPS = 5
TOLERANCE = 1e-10

TASKS: dict[str, Callable[[], Task]] = {
    "GPT (dropout, masked mean loss, one sample fully masked)": lambda: language(
        BATCH, torch.float64, STEPS, context=32, width=32, heads=4, layers=2, vocabulary=64
    ),
    "CNN (train-mode BatchNorm, dropout)": lambda: vision(BATCH, torch.float64, STEPS, size=16, channels=12, layers=4),
}


@dataclass(frozen=True)
class Way:
    """How the training runs."""

    name: str
    lazy: bool
    chunk_size: int | None = None


WAYS = (
    Way("eager", lazy=False),
    Way("koila, whole", lazy=True),
    Way("koila, chunks of 4", lazy=True, chunk_size=4),
    Way("koila, chunks of 1", lazy=True, chunk_size=1),
)


@dataclass(frozen=True)
class Run:
    """What a training left behind."""

    way: Way
    losses: list[float]
    correct: int
    """Right answers in all steps."""
    gradients: list[list[torch.Tensor]]
    """For each step, the gradient of each parameter."""
    buffers: list[torch.Tensor]
    generator: torch.Tensor
    transient_bytes: int
    """The measured peak of the last step, above its gradients."""


def train(task: Task, way: Way) -> Run:
    """The loop that everybody writes; only the line with `koila.lazy` is koila's."""
    torch.manual_seed(0)
    model = task.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, gradients, correct, peak = [], [], 0, 0
    for batch in task.batches:
        optimizer.zero_grad()
        with StorageTracker() as tracker, koila.budget(chunk_size=way.chunk_size):
            inputs: Batch = koila.lazy(*batch) if way.lazy else batch
            logits = task.logits(inputs)
            loss = task.loss(logits, inputs)
            loss.backward()
        peak = tracker.peak_bytes - gradient_bytes(model)
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        optimizer.step()
        losses.append(loss.item())
        correct += int(task.correct(logits, inputs).item())
    return Run(way, losses, correct, gradients, list(model.buffers()), torch.get_rng_state(), peak)


def difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest ‖a − b‖ / ‖b‖."""
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        distance = float((a.double() - b.double()).norm())
        worst = max(worst, distance / float(b.double().norm()) if distance else 0.0)
    return worst


@dataclass(frozen=True)
class Verdict:
    """A run against the eager one."""

    gradient_difference: float
    buffer_difference: float
    same_generator: bool
    is_identical: bool

    def holds(self, way: Way) -> bool:
        """Whether koila's promise holds."""
        if way.chunk_size is None:
            return self.is_identical
        return max(self.gradient_difference, self.buffer_difference) <= TOLERANCE and self.same_generator


def judge(run: Run, eager: Run) -> Verdict:
    gradient = max(difference(a, b) for a, b in zip(run.gradients, eager.gradients, strict=True))
    pairs = [*zip(run.buffers, eager.buffers, strict=True)]
    pairs += [pair for a, b in zip(run.gradients, eager.gradients, strict=True) for pair in zip(a, b, strict=True)]
    same_generator = torch.equal(run.generator, eager.generator)
    identical = same_generator and run.losses == eager.losses and all(torch.equal(a, b) for a, b in pairs)
    return Verdict(gradient, difference(run.buffers, eager.buffers), same_generator, identical)


def show(title: str, header: list[str], rows: list[list[str]]) -> None:
    """A table: with rich if it is installed, else in plain text."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        print(f"\n{title}")
        for row in (header, *rows):
            print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
        return
    table = Table(title=title, title_justify="left")
    for name in header:
        table.add_column(name, justify="left" if name == header[0] else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def compare(name: str, make: Callable[[], Task]) -> bool:
    """Train each way, show the table, and say whether every promise was kept."""
    runs = [train(make(), way) for way in WAYS]
    eager = runs[0]
    steps = [[str(number + 1), *(f"{run.losses[number]:.12f}" for run in runs)] for number in range(STEPS)]
    show(f"{name}: loss of each step", ["step", *(way.name for way in WAYS)], steps)
    rows, kept = [], True
    for run in runs:
        verdict = judge(run, eager)
        promise = verdict.holds(run.way)
        kept = kept and promise
        rows.append(
            [
                run.way.name,
                str(run.correct),
                "identical" if verdict.is_identical else f"{verdict.gradient_difference:.1e}",
                "identical" if verdict.buffer_difference == 0 else f"{verdict.buffer_difference:.1e}",
                "same" if verdict.same_generator else "DIFFERENT",
                f"{run.transient_bytes / 1024:.0f} KiB",
                "kept" if promise else "BROKEN",
            ]
        )
    header = ["", "right answers", "gradients", "buffers", "generator", "peak beyond gradients", "promise"]
    show(f"{name}: batch of {BATCH}, {STEPS} steps, float64", header, rows)
    return kept


def highlights() -> None:
    """What koila counted while it ran."""
    names = koila.metrics.counter_names()
    chosen = ["traces", "plans", "runs::whole", "runs::split", "chunks", "nodes_executed", "trie::hit"]
    chosen += [name for name in names if name.startswith(("forced::", "fallback::"))]
    rows = [[name, str(koila.metrics.counter_value(name))] for name in chosen]
    show("koila.metrics", ["counter", "value"], rows)


def main() -> int:
    torch.set_num_threads(1)
    koila.metrics.reset()
    kept = [compare(name, make) for name, make in TASKS.items()]
    highlights()
    print("every promise was kept" if all(kept) else "A PROMISE WAS BROKEN")
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
