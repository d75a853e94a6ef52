"""The transient peak falls in proportion to the chunk size, and at chunk one nothing of the batch's size exists."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

import pytest
import torch

import koila
from koila.planning.tracker import Birth, StorageTracker
from tests.models import Task, gradient_bytes, language, vision

BATCH = 16

# No size is 8 or 16: what depends on the batch is told by its size.
TASKS: dict[str, Callable[[int], Task]] = {
    "gpt": lambda batch: language(batch, torch.float32, context=32, width=24, heads=2, vocabulary=64),
    "cnn": lambda batch: vision(batch, torch.float32, size=16, channels=6, layers=4),
}


def measure(task: Task, chunk_size: int | None, lazy: bool = True) -> tuple[StorageTracker, StorageTracker]:
    """One step: what was born while it was recorded, and while it ran."""
    torch.manual_seed(0)
    task.model.zero_grad()
    recording, running = StorageTracker(births=True), StorageTracker(births=True)
    batch = koila.lazy(*task.batches[0]) if lazy else task.batches[0]
    with koila.budget(chunk_size=chunk_size):
        with recording:
            loss = task.loss(task.logits(batch), batch)
        with running:
            loss.backward()
    assert [counter for counter in koila.metrics.counter_names() if counter.startswith("fallback::")] == []
    return recording, running


def shapes_listed(task: Task) -> Counter[tuple[int, ...]]:
    """Shapes of the values that `koila.explain` lists as kept or gathered."""
    batch = koila.lazy(*task.batches[0])
    explanation = koila.explain(task.loss(task.logits(batch), batch), backward=True, chunk_size=1)
    found = [re.search(r"\[([\d, ]*)\]", line) for line in (*explanation.kept, *explanation.gathers)]
    return Counter(tuple(int(size) for size in match.group(1).split(",")) for match in found if match is not None)


def depends_on_batch(task: Callable[[int], Task], which: int) -> list[Birth]:
    """Storages of a step at chunk one that a step of twice the batch does not have: their size is the batch's."""
    small = {(birth.operator, birth.shape) for birth in measure(task(BATCH // 2), 1)[which].births}
    return [birth for birth in measure(task(BATCH), 1)[which].births if (birth.operator, birth.shape) not in small]


@pytest.mark.parametrize("name", TASKS)
def test_the_peak_is_a_fixed_part_and_a_part_in_proportion_to_the_chunk(name: str) -> None:
    task = TASKS[name](BATCH)
    peaks = {size: measure(task, size)[1].peak_bytes for size in (1, 2, 4, 8)}
    slope = (peaks[8] - peaks[4]) / 4
    fixed = peaks[8] - 8 * slope
    for size, peak in peaks.items():
        assert abs(peak - fixed - size * slope) <= 0.1 * size * slope, f"chunk {size}: {peaks}"
    # The fixed part is what must be there: gradients, and what is kept between phases.
    kept = sum(torch.Size(shape).numel() * 4 * number for shape, number in shapes_listed(task).items())
    assert fixed <= 1.1 * (gradient_bytes(task.model) + kept), f"fixed {fixed}, kept {kept}"


def test_the_transient_peak_of_a_gpt_falls_with_the_chunk() -> None:
    task = TASKS["gpt"](BATCH)
    whole = sum(tracker.peak_bytes for tracker in measure(task, None, lazy=False)) - gradient_bytes(task.model)
    for size in (8, 4, 2, 1):
        transient = measure(task, size)[1].peak_bytes - gradient_bytes(task.model)
        assert transient <= 1.25 * whole * size / BATCH, f"chunk {size}: {transient} of {whole}"


@pytest.mark.parametrize("name", TASKS)
def test_what_runs_at_chunk_one_does_not_know_the_batch(name: str) -> None:
    """Every storage of the run has the size of one sample, except those that the explanation lists."""
    found = Counter(birth.shape for birth in depends_on_batch(TASKS[name], 1))
    assert not found - shapes_listed(TASKS[name](BATCH)), found


@pytest.mark.parametrize("name", TASKS)
def test_what_is_drawn_while_recording_is_a_quarter_of_its_size_and_kept_as_bits(name: str) -> None:
    """Dropout masks are drawn whole by eager's kernel, in bytes instead of floats, and packed at once."""
    task = TASKS[name](BATCH)
    eager = measure(task, None, lazy=False)[0]
    noise = max(birth.num_bytes for birth in eager.births if birth.operator.startswith("aten.empty_like"))
    measure(task, 1)  # The first draw of a process tests the generator.
    recording = measure(task, 1)[0]
    assert recording.largest.num_bytes <= noise / 4, str(recording.largest)
    elements = sum(birth.num_bytes // 4 for birth in eager.births if birth.operator.startswith("aten.empty_like"))
    # What does not depend on the lazy input (positions, causal masks) is computed at once, as in eager.
    at_once = 2 * 32 * 32 + 32 * 8 + 32 * 24 * 4 if name == "gpt" else 0
    assert recording.current_bytes == elements // 8 + at_once


def test_without_a_run_nothing_is_allocated() -> None:
    task = vision(BATCH, torch.float32, dropout=0.0)
    recording, _ = measure(task, 1)
    assert recording.peak_bytes == 0, str(recording.largest)
