"""Ways to run the step of a program: eager, koila inside a budget, and what users do by hand.

*Takes* a `Program` and a `Way`. *Gives* the step as a function, its peaks by both witnesses, and its gradients.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch._functorch.config
from torch.utils.checkpoint import checkpoint

import koila
from benchmarks.programs import Program, make
from benchmarks.witness import Watch
from koila._torch import RunMode
from koila.planning import trials
from koila.planning.in_force import are_trials_over
from koila.planning.placement import switched
from koila.planning.tracker import StorageTracker
from koila.planning.workspace import workspace_bytes

Step = Callable[[], torch.Tensor]


OFFLOAD = "koila offload"
"""The kind of a budget that may put values into files."""


@dataclass(frozen=True)
class Way:
    """How a step runs: a kind and its number, a budget in bytes or a size."""

    kind: str
    number: float | None = None

    @property
    def is_koila(self) -> bool:
        """Whether the number is a budget."""
        return self.kind in ("koila", OFFLOAD)

    def __str__(self) -> str:
        if self.is_koila:
            return f"{self.kind} {(self.number or 0) / 2**20:.1f} MiB"
        return self.kind if self.number is None else f"{self.kind} {self.number:g}"


def peers(program: Program, compiled: bool) -> list[Way]:
    """What users can do by hand to a program, exactly."""
    found: list[Way] = []
    if program.weight is not None:
        sizes = {max(1, program.num_samples // part) for part in (2, 4)} | {1}
        found += [Way("micro-batch", size) for size in sorted(sizes, reverse=True) if size < program.num_samples]
    if program.blocks and program.is_training:
        found.append(Way("checkpoint"))
    if program.fused_loss is not None:
        found += [Way("linear_cross_entropy"), Way("linear_cross_entropy", 256)]
    if compiled and program.is_training:
        found += [Way("compile", 1.0), Way("compile", 0.5)]
    return found


def step_of(program: Program, way: Way) -> Step:
    """The step, forward and backward; it returns the loss or the output."""
    if way.is_koila:
        return lambda: _koila(program, int(way.number or 0), way.kind == OFFLOAD)
    if way.kind == "micro-batch":
        return lambda: _micro_batches(program, int(way.number or 1))
    if way.kind == "linear_cross_entropy":
        size = None if way.number is None else int(way.number)
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=size)
        fused = program.fused_loss
        assert fused is not None
        return lambda: _backward(program, fused(program.batch, options))
    if way.kind == "compile":
        return _compiled(program, way.number or 1.0)
    if way.kind == "checkpoint":
        return lambda: _checkpointed(program)
    return lambda: _backward(program, program.step(program.batch))


def without_arena(step: Step) -> Step:
    """The step by the same plan, with every result in memory of its own."""

    def plain() -> torch.Tensor:
        with switched.inside("off"):
            return step()

    return plain


def _backward(program: Program, loss: torch.Tensor) -> torch.Tensor:
    if program.is_training:
        loss.backward()
    return loss


def _koila(program: Program, allowed_bytes: int, offload: bool) -> torch.Tensor:
    with koila.budget(allowed_bytes, offload=offload):
        batch = koila.lazy(*program.batch)
        batch = batch if isinstance(batch, tuple) else (batch,)
        result = program.step(batch)
        if program.is_training:
            result.backward()
            return result
        return koila.run(result)


def _micro_batches(program: Program, size: int) -> torch.Tensor:
    assert program.weight is not None
    total, results = program.weight(program.batch), []
    for start in range(0, program.num_samples, size):
        batch = program.chunk(start, start + size)
        result = program.step(batch)
        if program.is_training:
            result = result * (program.weight(batch) / total)
            result.backward()
        results.append(result.detach())
        del result
    return torch.stack(results).sum() if program.is_training else torch.cat(results)


@contextmanager
def _checkpoints(blocks: list[torch.nn.Module]) -> Iterator[None]:
    def wrapped(forward: Any) -> Any:
        return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)

    for block in blocks:
        block.forward = wrapped(block.forward)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def _checkpointed(program: Program) -> torch.Tensor:
    with _checkpoints(program.blocks):
        return _backward(program, program.step(program.batch))


def _compiled(program: Program, share: float) -> Step:
    torch._functorch.config.activation_memory_budget = share
    compiled = torch.compile(program.step)
    return lambda: _backward(program, compiled(program.batch))


# Measuring, in a subprocess.


class HiddenBytes(RunMode):
    """What each operator allocates beyond its results, and what the table of workspaces says of it."""

    def __init__(self) -> None:
        super().__init__()
        self.most: dict[str, tuple[int, int]] = {}
        """Operator → (measured, by the table) of the call where they are furthest apart."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with Watch() as watch:
            result = func(*args, **(kwargs or {}))
        hidden = watch.peak_bytes - max(0, watch.kept_bytes)
        formula = workspace_bytes(func, args, result, kwargs)
        known = self.most.get(str(func), (0, 0))
        if hidden - formula > known[0] - known[1]:
            self.most[str(func)] = hidden, formula
        return result

    def __str__(self) -> str:
        apart = sorted(self.most.items(), key=lambda item: item[1][1] - item[1][0])
        large = [(name, pair) for name, pair in apart if pair[0] - pair[1] > 64 * 1024][:4]
        return ", ".join(f"{name} {a / 2**20:.2f} MiB (table {b / 2**20:.2f})" for name, (a, b) in large)


@dataclass(frozen=True)
class Refusal:
    """A budget that was refused before anything ran."""

    needed_bytes: int
    is_clean: bool
    """No gradient and no running statistic changed."""
    message: str


@dataclass(frozen=True)
class Peaks:
    """What a step allocated above the state before it, and how far its gradients are from eager's."""

    outside_bytes: int
    inside_bytes: int
    projected_bytes: int | None
    difference: float
    """‖a − b‖ / ‖b‖ over all gradients, or over the output."""
    worst_difference: float
    """The same for the worst tensor whose norm is at least a thousandth of all."""
    exact_difference: float | None = None
    """How far they are from eager's in float64, where that was asked for."""
    file_bytes: int | None = None
    """File pages that were resident at the peak, where values may go into files."""
    plain_bytes: int | None = None
    """By the malloc hook, for koila: the same plan where every result has memory of its own, none lies in an arena."""


class FilePages:
    """The most pages of koila's files that are resident while it is watched; it looks every few milliseconds."""

    def __enter__(self) -> FilePages:
        self.peak_bytes, self._ends = _file_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ends.wait(0.002):
            self.peak_bytes = max(self.peak_bytes, _file_bytes())


def _file_bytes() -> int:
    """Resident pages of files without a name, as the kernel counts them for this process: koila's files are such.

    They stay for the next step, so what matters is how many there are, and not how many more.
    """
    found, is_nameless = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "Rss" and is_nameless:
            found += int(rest.split()[0]) << 10
        elif "-" in line.partition(" ")[0]:
            is_nameless = line.endswith("(deleted)")
    return found


class Subject:
    """A program in this process, with eager's gradients to compare with."""

    def __init__(self, name: str, num_threads: int = 1, seed: int = 0) -> None:
        torch.set_num_threads(num_threads)
        self.name, self.num_threads = name, num_threads
        self.program = make(name, seed)
        self.dtype = next(self.program.model.parameters()).dtype
        self.expected = self._numbers(step_of(self.program, Way("eager")))
        self._exact: list[torch.Tensor] | None = None

    def exact(self) -> list[torch.Tensor]:
        """What eager gives in float64, as far as a float64 program can stand for the same one."""
        if self._exact is None:
            own, self.program = self.program, in_float64(self.program)
            self._exact = self._numbers(step_of(self.program, Way("eager")))
            self.program = own
            own.model.to(self.dtype)
        return self._exact

    @cached_property
    def eager_error(self) -> float:
        """How far eager's own gradients are from those in float64."""
        return differences(self.expected, self.exact())[0]

    @cached_property
    def eager_errors(self) -> list[float]:
        """The same for other weights and data: rounding decides near ties of a maximum, and sometimes decides much."""
        return [Subject(self.name, self.num_threads, seed).eager_error for seed in OTHER_SEEDS]

    def difference_in_float64(self, way: Way) -> float:
        """How far a way is from eager if both calculate in float64; its budget is for values twice as large, or the
        least that suffices: some workspaces grow by more.
        """
        expected = self.exact()
        own, self.program = self.program, in_float64(self.program)
        wide = replace(way, number=2 * (way.number or 0)) if way.is_koila else way
        try:
            found = self._numbers(step_of(self.program, wide))
        except koila.BudgetError as error:
            found = self._numbers(step_of(self.program, replace(way, number=error.needed_bytes)))
        self.program = own
        own.model.to(self.dtype)
        return differences(found, expected)[0]

    def peaks(self, way: Way) -> Peaks | Refusal:
        """Measure a way; the first step fills caches and is not measured."""
        step = step_of(self.program, way)
        self.reset()
        buffers = [buffer.clone() for buffer in self._statistics()]
        try:
            found = self._numbers(step)
            difference, worst = differences(found, self.expected)
            exact = differences(found, self.exact())[0] if difference > CLOSE else None
            del found
        except koila.BudgetError as error:
            # Generators stand where eager's would: random numbers are drawn when a call is recorded.
            clean = not self.program.gradients()
            pairs = zip(buffers, self._statistics(), strict=True)
            return Refusal(error.needed_bytes, clean and all(torch.equal(*pair) for pair in pairs), str(error))
        self.reset()
        with Watch() as watch:
            kept = step()
        del kept
        self.reset()
        with StorageTracker() as tracker:
            kept = step()
        del kept
        projected = getattr(self._report(), "projected_bytes", None) if way.is_koila else None
        in_files = self._file_pages(step) if way.kind == OFFLOAD else None
        plain = self._plain_bytes(step) if way.is_koila else None
        return Peaks(watch.peak_bytes, tracker.peak_bytes, projected, difference, worst, exact, in_files, plain)

    def _file_pages(self, step: Step) -> int:
        self.reset()
        with FilePages() as pages:
            kept = step()
        del kept
        return pages.peak_bytes

    def _plain_bytes(self, step: Step) -> int:
        """The peak of a step without an arena; the first one makes its code."""
        plain = without_arena(step)
        for _ in range(2):
            self.reset()
            with Watch() as watch:
                kept = plain()
            del kept
        return watch.peak_bytes

    def hidden(self, way: Way) -> str:
        """The operators of a step that allocate more than the table of workspaces says."""
        self.reset()
        with HiddenBytes() as found:
            step_of(self.program, way)()
        return str(found) or "nothing"

    def reset(self) -> None:
        """The state before every step."""
        self.program.zero_grad()
        gc.collect()
        torch.manual_seed(1)

    def seconds(self, step: Step, clock: Callable[[], float]) -> float:
        """How long a step takes by a clock."""
        self.reset()
        started = clock()
        result = step()
        taken = clock() - started
        del result
        return taken

    def _numbers(self, step: Step) -> list[torch.Tensor]:
        self.reset()
        result = step()
        return [gradient.clone() for gradient in self.program.gradients()] or [result.detach().clone()]

    def _statistics(self) -> list[torch.Tensor]:
        """Running statistics; the number of batches is counted by the module itself, before anything is lazy."""
        return [buffer for buffer in self.program.model.buffers() if buffer.is_floating_point()]

    def _report(self) -> Any:
        report = getattr(koila, "last_report", None)
        return None if report is None else report()


OTHER_SEEDS = range(1, 6)
CLOSE = 1e-5
"""Gradients this close to eager's need no further question. oneDNN's float32 convolutions of a part of the batch are
3.5e-6 away from those of the whole, by hand as well."""


def differences(found: list[torch.Tensor], expected: list[torch.Tensor]) -> tuple[float, float]:
    """‖a − b‖ / ‖b‖ over all tensors, and for the worst one whose norm is at least a thousandth of all."""
    pairs = list(zip(found, expected, strict=True))
    distances = [float((a.double() - b.double()).norm()) for a, b in pairs]
    norms = [float(b.double().norm()) for _, b in pairs]
    total = sum(norm**2 for norm in norms) ** 0.5
    worst = max(d / norm for d, norm in zip(distances, norms, strict=True) if norm > 1e-3 * total)
    return sum(distance**2 for distance in distances) ** 0.5 / total, worst


def in_float64(program: Program) -> Program:
    """The same program in float64; its model is changed in place."""
    program.model.double()
    wide = {id(leaf): leaf.detach().double().requires_grad_() for leaf in program.leaves}
    batch = tuple(wide.get(id(t), t.double() if t.is_floating_point() else t) for t in program.batch)
    return replace(program, batch=batch, leaves=tuple(wide.values()))


ALWAYS = 1e9
"""The share of a loop's time at which plans are tried as soon as they can be."""
MOST_TRIED = 60
"""So many steps are waited for trials to end."""


@contextmanager
def trying(tuned: bool) -> Iterator[None]:
    """Loops inside of it try other plans as soon as they can, or none at all."""
    before, trials.SHARE = trials.SHARE, ALWAYS if tuned else 0.0
    try:
        yield
    finally:
        trials.SHARE = before


def live(step: Callable[[], object]) -> None:
    """Make the first steps of a loop: what comes first plans and fills caches, and then plans are tried."""
    for _ in range(2):
        step()
    for _ in range(MOST_TRIED):
        if not trials.SHARE or are_trials_over():
            return
        step()


def time_ratios(
    name: str, ways: list[Way], rounds: int, num_threads: int, tuned: bool
) -> dict[str, tuple[float, float, float | None]]:
    """Median seconds of each way, and of the ratios to eager's steps, each right after one of the way: of the way
    itself, and for koila of the same without an arena.

    One way after the other: only the plans of a few budgets stay in the caches. With one thread, CPU time: work beside
    it disturbs that least.
    """
    subject, clock = Subject(name, num_threads), time.process_time if num_threads == 1 else time.perf_counter
    eager, found = step_of(subject.program, Way("eager")), dict[str, tuple[float, float, float | None]]()
    for way in (Way("eager"), *ways):
        step = step_of(subject.program, way)
        with trying(tuned):
            live(lambda: subject.seconds(step, clock))  # noqa: B023
        both = (step, without_arena(step)) if way.is_koila else (step,)
        with trying(False):
            rows = [[subject.seconds(each, clock) for each in (*both, eager)] for _ in range(rounds + 1)][1:]
        plain = median(row[1] / row[-1] for row in rows) if way.is_koila else None
        found[str(way)] = median(row[0] for row in rows), median(row[0] / row[-1] for row in rows), plain
    return found
