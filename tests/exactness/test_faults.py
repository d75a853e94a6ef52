"""Fault injection (Rule 4): whatever operator of whatever chunk and phase fails, the state is as it was before the run.

A dispatch mode raises at the n-th operator of a run: 200 places, chosen once and for all by a seed, in a CNN with
batch normalisation and in a GPT with dropout, unsplit and in uneven chunks, with gradients from an earlier step and
without. After each failure the program is recorded anew and gives eager's numbers.

The commit is one call of the autograd engine, after the statistics of batch normalisation are written, as in eager;
unsplit, that call is the whole backward pass. An operator that fails inside it leaves the gradients as they were too,
and the statistics as they were or as eager's forward pass leaves them, never some of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import koila
from koila._torch import RunMode
from tests.models import Task, language, vision

BATCH = 5
PLACES_PER_SETUP = 25
TASKS: dict[str, Callable[[], Task]] = {
    "cnn": lambda: vision(BATCH, torch.float64, layers=2, size=6),
    "gpt": lambda: language(BATCH, torch.float64, context=4, layers=1, width=8),
}
SETUPS = [(name, chunk, kept) for name in TASKS for chunk in (None, 2) for kept in (False, True)]


class Fault(Exception):
    """What an operator raises here."""


class FailAt(RunMode):
    """Raises at one operator, and counts them all."""

    def __init__(self, place: int | None, error: type[BaseException] = Fault) -> None:
        super().__init__()
        self.place, self.error, self.count = place, error, 0
        self.in_commit = False
        """Whether the autograd engine was running the operator that failed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Questions about metadata (prim.device) come from C++ code that no exception may leave.
        if func.namespace == "aten":
            self.count += 1
            if self.count - 1 == self.place:
                self.in_commit = torch._C._current_graph_task_id() != -1
                raise self.error(f"operator {self.place}: {func}")
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class State:
    """Everything that a run may not change if it fails."""

    tensors: dict[str, torch.Tensor]
    """Parameters, buffers and gradients, by name."""
    identities: dict[str, int]
    """Which tensor object each gradient is."""
    generator: torch.Tensor


def state_of(model: nn.Module) -> State:
    # Of the modules' own tables: whoever else asks for the statistics runs what is pending on them.
    modules = [(place, module) for place, module in model.named_modules()]
    buffers = [(f"{place}.{name}", b) for place, m in modules for name, b in m._buffers.items() if b is not None]
    named = (*model.named_parameters(), *buffers)
    tensors = {name: tensor.detach().clone() for name, tensor in named}
    gradients = {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    tensors.update({name: gradient.clone() for name, gradient in gradients.items()})
    return State(tensors, {name: id(gradient) for name, gradient in gradients.items()}, torch.get_rng_state())


def assert_unchanged(model: nn.Module, before: State, where: str, committed: State | None = None) -> None:
    """The state is as it was; with `committed`, gradients that were there before may have been added to."""
    after = state_of(model)
    assert after.tensors.keys() == before.tensors.keys(), where
    changed = [name for name in before.tensors if not torch.equal(after.tensors[name], before.tensors[name])]
    if committed is not None:
        for name in (name for name in changed if name.startswith("gradient of ")):
            torch.testing.assert_close(after.tensors[name], committed.tensors[name], rtol=1e-10, atol=1e-14)
        changed = [name for name in changed if not name.startswith("gradient of ")]
    assert changed == [], where
    assert after.identities == before.identities, where
    assert torch.equal(after.generator, before.generator), where


def start(task: Task, kept: bool) -> None:
    """The same state before each try: gradients of an earlier step, or none; fresh statistics."""
    for index, parameter in enumerate(task.model.parameters()):
        parameter.grad = torch.full_like(parameter, 0.5 + index) if kept else None
    for module in task.model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
    torch.manual_seed(7)


def record(task: Task, lazy: bool = True) -> torch.Tensor:
    batch = koila.lazy(*task.batches[0]) if lazy else task.batches[0]
    return task.loss(task.logits(batch), batch)


def backward(task: Task, chunk_size: int | None, place: int | None = None, error: type[BaseException] = Fault) -> int:
    """Record and run from where the state is; how many operators the run had."""
    loss = record(task)
    with koila.budget(chunk_size=chunk_size), FailAt(place, error) as mode:
        loss.backward()
    return mode.count


def eager_state(name: str, kept: bool) -> State:
    task = TASKS[name]()
    start(task, kept)
    record(task, lazy=False).backward()
    return state_of(task.model)


def assert_eager(task: Task, expected: State, exact: bool, where: str) -> None:
    found = state_of(task.model)
    assert found.tensors.keys() == expected.tensors.keys(), where
    for name, tensor in expected.tensors.items():
        if exact or not tensor.is_floating_point():
            assert torch.equal(found.tensors[name], tensor), f"{name}, {where}"
        else:
            error = (found.tensors[name] - tensor).norm()
            assert error <= 1e-10 * tensor.norm(), f"{name} differs by {error:.1e}, {where}"
    assert torch.equal(found.generator, expected.generator), where


def places(name: str, chunk: int | None, kept: bool, count: int, how_many: int) -> list[int]:
    """Random places, the first and the last operators among them: the last ones are the commit."""
    chosen = random.Random(f"{name} {chunk} {kept}").sample(range(1, count - 3), how_many - 4)
    return sorted([0, *chosen, count - 3, count - 2, count - 1])


def fail_and_repeat(
    task: Task, chunk: int | None, kept: bool, expected: State, place: int, error: type[BaseException]
) -> None:
    """A failure, after which the state is as it was; then the same program again, with eager's numbers."""
    start(task, kept)
    loss = record(task)
    before = state_of(task.model)
    mode = FailAt(place, error)
    with koila.budget(chunk_size=chunk), pytest.raises(error, match=f"operator {place}:") as raised, mode:
        loss.backward()
    assert_unchanged(
        task.model, before, f"after {raised.value}", expected if mode.in_commit and chunk is not None else None
    )
    del loss
    start(task, kept)
    backward(task, chunk)
    assert_eager(task, expected, chunk is None, f"after a failure at {raised.value}")


@pytest.mark.parametrize(("name", "chunk", "kept"), SETUPS)
def test_an_error_in_any_operator_leaves_the_state_as_it_was(name: str, chunk: int | None, kept: bool) -> None:
    task, expected = TASKS[name](), eager_state(name, kept)
    start(task, kept)
    backward(task, chunk)  # Traced and planned: what fails below is the run itself.
    start(task, kept)
    count = backward(task, chunk)
    chosen = places(name, chunk, kept, count, PLACES_PER_SETUP)
    assert len(set(chosen)) == PLACES_PER_SETUP
    for place in chosen:
        fail_and_repeat(task, chunk, kept, expected, place, Fault)


def test_the_places_are_two_hundred() -> None:
    assert len(SETUPS) * PLACES_PER_SETUP == 200


@pytest.mark.semantics("S20")
@pytest.mark.parametrize(("name", "chunk", "kept"), SETUPS)
def test_an_interrupt_leaves_the_state_as_it_was(name: str, chunk: int | None, kept: bool) -> None:
    task, expected = TASKS[name](), eager_state(name, kept)
    start(task, kept)
    backward(task, chunk)
    start(task, kept)
    count = backward(task, chunk)
    for place in places(name, chunk, kept, count, 8):
        fail_and_repeat(task, chunk, kept, expected, place, KeyboardInterrupt)


@pytest.mark.parametrize("error", [Fault, KeyboardInterrupt])
@pytest.mark.parametrize("share", [0.02, 0.3, 0.7])
def test_an_error_while_the_program_is_traced(share: float, error: type[BaseException]) -> None:
    """Nothing is traced yet: the error comes out, or the run falls back; the next run is split and exact."""
    channels = 10 + int(10 * share) + (5 if error is Fault else 0)
    make = lambda: vision(BATCH, torch.float64, layers=1, size=4, channels=channels)  # noqa: E731
    plain = make()
    start(plain, False)
    record(plain, lazy=False).backward()
    expected = state_of(plain.model)
    task = make()
    start(task, False)
    loss = record(task)
    before = state_of(task.model)
    try:
        with koila.budget(chunk_size=2), FailAt(int(400 * share), error):
            loss.backward()
    except error:
        assert_unchanged(task.model, before, f"{error.__name__} at {share}")
    else:
        assert error is Fault, "an interrupt was swallowed"
        assert_eager(task, expected, False, "after a run that fell back")
    del loss
    start(task, False)
    splits = koila.metrics.counter_value("runs::split")
    backward(task, 2)
    assert_eager(task, expected, False, "the run after")
    assert koila.metrics.counter_value("runs::split") == splits + 1


@pytest.mark.parametrize("chunk", [None, 2])
def test_the_runs_after_a_failure_are_the_program_and_nothing_else(chunk: int | None) -> None:
    """No call of the failed program is carried along, whether the user still holds its loss or not."""
    task = TASKS["cnn"]()
    start(task, False)
    backward(task, chunk)
    start(task, False)
    count = backward(task, chunk)
    start(task, False)
    kept_loss = record(task)
    with koila.budget(chunk_size=chunk), pytest.raises(Fault), FailAt(count // 3):
        kept_loss.backward()
    for _ in range(3):
        start(task, False)
        assert backward(task, chunk) == count
    del kept_loss
    start(task, False)
    assert backward(task, chunk) == count


@pytest.mark.parametrize("chunk", [None, 2])
def test_an_error_in_inference_leaves_buffers_and_generator(chunk: int | None) -> None:
    """`koila.run` under no_grad in train mode: statistics are written at the end, or not at all."""
    task = TASKS["cnn"]()

    def infer(place: int | None) -> int:
        with torch.no_grad(), koila.budget(chunk_size=chunk):
            out = task.logits(koila.lazy(*task.batches[0]))
            before = state_of(task.model)
            with FailAt(place) as mode:
                try:
                    koila.run(out)
                except Fault:
                    assert_unchanged(task.model, before, f"operator {place}")
                    raise
        return mode.count

    start(task, False)
    infer(None)
    start(task, False)
    count = infer(None)
    for place in range(0, count, max(1, count // 12)):
        start(task, False)
        with pytest.raises(Fault):
            infer(place)
    start(task, False)
    infer(None)
    found = state_of(task.model)
    start(task, False)
    with torch.no_grad():
        task.logits(task.batches[0])
    expected = state_of(task.model)
    for name, tensor in expected.tensors.items():
        torch.testing.assert_close(found.tensors[name], tensor, rtol=1e-10, atol=1e-14)
    assert torch.equal(found.generator, expected.generator)


# Hooks that raise in the commit.


def raise_in_hook(gradient: torch.Tensor) -> None:
    raise ArithmeticError("this gradient is not welcome")


def fail_in_hook(task: Task, kept: bool, chunk: int | None, lazy: bool, index: int, kind: str) -> None:
    start(task, kept)
    parameter = list(task.model.parameters())[index]
    handle = getattr(parameter, kind)(raise_in_hook)
    loss = record(task, lazy)
    with koila.budget(chunk_size=chunk), pytest.raises(ArithmeticError, match="this gradient is not welcome"):
        loss.backward()
    handle.remove()


@pytest.mark.semantics("S12")
@pytest.mark.parametrize(("name", "chunk", "kept"), SETUPS)
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_that_raises_in_the_commit_behaves_as_in_eager(
    name: str, chunk: int | None, kept: bool, kind: str
) -> None:
    """The same exception; the same statistics and generator; no gradient that eager would not have."""
    plain, task, expected = TASKS[name](), TASKS[name](), eager_state(name, kept)
    start(plain, kept)
    initial = state_of(plain.model)
    for index in range(0, len(list(plain.model.parameters())), 3):
        fail_in_hook(plain, kept, None, False, index, kind)
        fail_in_hook(task, kept, chunk, True, index, kind)
        eager, found = state_of(plain.model), state_of(task.model)
        hooked = f"gradient of {[key for key, _ in plain.model.named_parameters()][index]}"
        assert torch.equal(found.generator, eager.generator)
        for key in (key for key in eager.tensors if not key.startswith("gradient of ")):
            torch.testing.assert_close(found.tensors[key], eager.tensors[key], rtol=1e-10, atol=1e-14)
        if kind == "register_hook":
            assert (hooked in found.tensors) == (hooked in eager.tensors) == kept
        # Which other gradients eager had accumulated by then depends on its order: here they are old or complete.
        for key in (key for key in found.tensors if key.startswith("gradient of ")):
            old = initial.tensors.get(key)
            complete = torch.allclose(found.tensors[key], expected.tensors[key], rtol=1e-10, atol=1e-14)
            assert complete or (old is not None and torch.equal(found.tensors[key], old)), key
        start(task, kept)
        backward(task, chunk)
        assert_eager(task, expected, chunk is None, f"after a hook on {hooked} raised")


@pytest.mark.parametrize("chunk", [None, 2])
def test_a_hook_on_a_lazy_value_that_raises(chunk: int | None) -> None:
    task, expected = TASKS["gpt"](), eager_state("gpt", True)
    start(task, True)
    before = state_of(task.model)
    batch = koila.lazy(*task.batches[0])
    logits = task.logits(batch)
    logits.register_hook(raise_in_hook)
    with koila.budget(chunk_size=chunk), pytest.raises(ArithmeticError, match="this gradient is not welcome"):
        task.loss(logits, batch).backward()
    torch.testing.assert_close(state_of(task.model).tensors, before.tensors, rtol=0, atol=0)
    start(task, True)
    backward(task, chunk)
    assert_eager(task, expected, chunk is None, "after a hook on the logits raised")
