"""How much is done: matmuls per chunk, node executions, and nothing learned twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import koila
from koila._torch import RunMode
from koila.analysis import program as programs
from koila.analysis.trace import Joint
from tests.models import Task, language, vision

MATMULS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default")


class Operators(RunMode):
    """How often each operator runs."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def joints(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Joint]]:
    """Joint graphs that are traced during a test."""
    found: list[Joint] = []
    original = programs.trace

    def watched(*args: Any) -> Joint:
        found.append(original(*args))
        return found[-1]

    monkeypatch.setattr(programs, "trace", watched)
    yield found


def value(name: str) -> int:
    return koila.metrics.counter_value(name)


def total(prefix: str) -> int:
    return sum(value(name) for name in koila.metrics.counter_names() if name.startswith(prefix))


def step(task: Task, chunk_size: int | None) -> None:
    batch = koila.lazy(*task.batches[0])
    task.model.zero_grad()
    with koila.budget(chunk_size=chunk_size):
        task.loss(task.logits(batch), batch).backward()


@pytest.mark.parametrize(("chunk_size", "chunks"), [(1, 9), (4, 3), (5, 2)])
def test_every_matmul_of_a_gpt_runs_once_per_chunk(chunk_size: int, chunks: int) -> None:
    task = language(9, torch.float64, vocabulary=19)
    with Operators() as eager:
        batch = task.batches[0]
        task.loss(task.logits(batch), batch).backward()
    step(task, chunk_size)
    expected = sum(eager.counts[name] for name in MATMULS)
    # Six matmuls of each layer and one of the head; two more for each in backward.
    assert expected == 3 * (2 * 6 + 1)
    assert sum(value(f"executed::{name}") for name in MATMULS) == chunks * expected


def joint_operators(joint: Joint) -> int:
    """Operators that an unsplit run of the joint program executes."""
    return sum(isinstance(node.target, torch._ops.OpOverload) for node in joint.module.graph.nodes)


@pytest.mark.parametrize(("chunk_size", "chunks"), [(1, 6), (4, 2)])
def test_a_deep_batchnorm_net_costs_linear_time(chunk_size: int, chunks: int, joints: list[Joint]) -> None:
    task = vision(6, torch.float64, layers=12, channels=4 + chunk_size)
    step(task, chunk_size)
    unsplit = joint_operators(joints[-1])
    assert unsplit > 200
    executed = value("nodes_executed")
    assert executed <= 3 * chunks * unsplit, f"{executed / chunks / unsplit:.2f} times the unsplit run"
    convolutions = value("executed::aten.convolution.default")
    assert convolutions == 12 * chunks, "forward convolutions run once per chunk"


def test_sizes_that_equal_the_batch_change_no_plan() -> None:
    """A value is cut for what it is, not because one of its sizes is that of the batch."""

    def phases(batch: int, channels: int) -> int:
        task = vision(batch, torch.float64, channels=channels)
        lazy = koila.lazy(*task.batches[0])
        return koila.explain(task.loss(task.logits(lazy), lazy), backward=True).num_phases

    assert phases(6, 6) == phases(6, 4) == phases(7, 6)


def test_from_the_third_iteration_on_nothing_is_learned() -> None:
    for task in (language(7, torch.float64, steps=5), vision(7, torch.float64, steps=5)):
        for chunk_size in (None, 3):
            optimizer = torch.optim.AdamW(task.model.parameters())
            for number, batch in enumerate(task.batches):
                if number == 2:
                    koila.metrics.reset()
                optimizer.zero_grad()
                lazy = koila.lazy(*batch)
                with koila.budget(chunk_size=chunk_size):
                    logits = task.logits(lazy)
                    loss = task.loss(logits, lazy)
                    loss.backward()
                    optimizer.step()
                    assert loss.item() > 0 and task.correct(logits, lazy).item() >= 0
            made = [name for name in koila.metrics.counter_names() if "::miss" in name or name in ("traces", "plans")]
            assert made == []
            assert value("trie::hit") == total("lazy::") > 0


def annealed(lazy: bool) -> list[torch.Tensor]:
    """Gradients of five epochs with a falling coefficient and a short last batch, the loss read every tenth step."""
    full, short = language(7, torch.float64, steps=4, vocabulary=17), language(3, torch.float64, vocabulary=17)
    model, found = full.model, []
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters())
    for number, batch in enumerate(5 * [*full.batches, *short.batches]):
        batch = koila.lazy(*batch) if lazy else batch
        optimizer.zero_grad()
        with koila.budget(chunk_size=2):
            logits = model(batch[0])
            loss = full.loss(logits, batch) + 0.1 * 0.9**number * logits.square().mean()
            loss.backward()
            found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
            optimizer.step()
            if number % 10 == 9:
                assert loss.item() > 0
    return found


def test_an_annealed_coefficient_a_short_batch_and_rare_logging_make_at_most_three_traces() -> None:
    found = annealed(lazy=True)
    assert len(found) == 25
    assert value("traces") <= 3
    assert value("runs::split") >= 25
    for mine, theirs in zip(found, annealed(lazy=False), strict=True):
        assert float((mine - theirs).norm()) <= 1e-10 * float(theirs.norm())
