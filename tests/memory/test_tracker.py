"""The tracker itself: it counts what lives, and does not disturb what it watches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import koila
from koila.planning.tracker import FakeTracker, StorageTracker, WorkspaceTracker
from koila.planning.workspace import workspace_bytes
from tests.models import language


def test_births_peak_and_current() -> None:
    with StorageTracker(births=True) as tracker:
        kept = torch.zeros(256)
        for _ in range(3):
            (kept + 1).mul_(2).view(16, 16)
    assert tracker.current_bytes == 1024
    assert tracker.peak_bytes == 2048
    assert [birth.operator for birth in tracker.births] == ["aten.zeros.default"] + 3 * ["aten.add.Tensor"]
    assert str(tracker.largest) == "aten.zeros.default [256] float32, 1024 bytes"


def test_what_was_alive_before_counts_when_it_dies() -> None:
    before = torch.zeros(256)
    with StorageTracker() as tracker:
        made = before + 1
        del before
    assert tracker.current_bytes == 0 and tracker.peak_bytes == 1024
    assert made.sum() == 256


def test_nothing_after_the_scope_is_counted() -> None:
    with StorageTracker() as tracker:
        made = torch.zeros(256)
    del made
    torch.zeros(1024)
    assert tracker.current_bytes == 1024 and tracker.peak_bytes == 1024


def test_fake_tensors_have_no_bytes() -> None:
    with StorageTracker(births=True) as tracker:
        torch.zeros(256, device="meta")
        with torch._subclasses.FakeTensorMode():
            torch.zeros(256)
    assert tracker.births == []


def test_koila_records_and_traces_the_same_under_the_tracker() -> None:
    """A dispatch mode around recording, tracing and running changes no number."""

    def step(lazy: bool, tracked: bool) -> list[torch.Tensor]:
        task = language(5, torch.float64, vocabulary=23)
        batch = koila.lazy(*task.batches[0]) if lazy else task.batches[0]
        with koila.budget(chunk_size=2), StorageTracker() if tracked else nullcontext():
            task.loss(task.logits(batch), batch).backward()
        return [p.grad for p in task.model.parameters()]

    koila.metrics.reset()
    found = step(lazy=True, tracked=True)
    assert koila.metrics.counter_value("traces") == 1
    assert koila.metrics.counter_value("runs::split") == 1
    for mine, theirs in zip(found, step(lazy=True, tracked=False), strict=True):
        assert torch.equal(mine, theirs)
    torch.testing.assert_close(found, step(lazy=False, tracked=False), rtol=1e-10, atol=1e-14)


aten = torch.ops.aten
LARGE = (256, 1024)


def inside(step: Callable[[], Any]) -> int:
    """By how much the peak with workspaces is above the one without."""
    with StorageTracker() as plain, WorkspaceTracker() as tracker:
        step()
    return tracker.peak_bytes - plain.peak_bytes


def tensors() -> dict[str, torch.Tensor]:
    x = torch.randn(LARGE)
    index = torch.zeros(256, 8, dtype=torch.long)
    half = x.bfloat16()
    return {"x": x, "half": half, "index": index, "part": half[:, :8].contiguous(), "into": torch.empty(LARGE)}


FORMS: dict[str, tuple[Callable[..., Any], int]] = {
    "add": (lambda x, half, **_: aten.add.Tensor(half, x), 4 * 256 * 1024),
    "add_": (lambda x, half, **_: aten.add_.Tensor(x, half), 4 * 256 * 1024),
    "add_ to half precision": (lambda x, half, **_: aten.add_.Tensor(half, x), 8 * 256 * 1024),
    "add.out": (lambda x, half, into, **_: aten.add.out(half, x, out=into), 4 * 256 * 1024),
    "add.out of one type": (lambda x, into, **_: aten.add.out(x, x, out=into), 0),
    "scatter_": (lambda half, index, part, **_: aten.scatter_.src(half, 1, index, part), 4 * 256 * 1024),
    "softmax.out": (
        lambda x, into, **_: aten._softmax.out(x, 1, False, out=into),
        (16 << 10) + 64 * torch.get_num_threads(),
    ),
    "mm.out": (lambda x, **_: aten.mm.out(x[:, ::4], x[:, ::4], out=torch.empty(256, 256)), 2 * 4 * 256 * 256),
}
"""Calls with the bytes inside them, in forms that a split run uses and as users write them."""


@pytest.mark.parametrize("name", FORMS)
def test_forms_that_write_into_given_memory_have_the_workspace_of_the_plain_one(name: str) -> None:
    call, expected = FORMS[name]
    given = tensors()
    assert inside(lambda: call(**given)) == expected


def model_step(context: Callable[[], AbstractContextManager[Any]]) -> Callable[[], None]:
    convolutions = (nn.Conv2d(*sizes, 5, padding=2, dtype=torch.float64) for sizes in ((3, 32), (32, 3)))
    model = nn.Sequential(next(convolutions), nn.ReLU(), next(convolutions))
    x = torch.randn(4, 3, 32, 32, dtype=torch.float64)

    def step() -> None:
        with context():
            loss = model(x).square().mean()
            if loss.requires_grad:
                loss.backward()

    return step


@pytest.mark.parametrize("context", [nullcontext, torch.no_grad, torch.inference_mode])
def test_a_real_run_and_a_fake_run_have_one_peak(context: Callable[[], AbstractContextManager[Any]]) -> None:
    with WorkspaceTracker(frees=False) as real:
        model_step(context)()
    with FakeTensorMode(), FakeTracker() as fake:
        model_step(context)()
    with StorageTracker() as plain:
        model_step(context)()
    assert real.peak_bytes == fake.peak_bytes > plain.peak_bytes


def test_what_a_storage_shows_is_not_counted_again() -> None:
    """A reduced loss keeps the storage of the unreduced one: a real storage says so, a fake one does not."""

    def step() -> tuple[int, int]:
        x = torch.zeros(LARGE)
        with WorkspaceTracker() if type(x) is torch.Tensor else FakeTracker() as tracker:
            kept = nn.functional.mse_loss(x, x)
        assert kept.dim() == 0
        return tracker.current_bytes, tracker.peak_bytes

    with FakeTensorMode():
        fake = step()
    whole = 4 * 256 * 1024
    assert step() == (whole, 2 * whole)
    assert fake == (whole + 4, 2 * whole + 4)


def test_a_recurrent_layer_keeps_its_workspace_once() -> None:
    layer, x = nn.LSTM(32, 64, batch_first=True), torch.randn(16, 32, 32)
    with WorkspaceTracker() as tracker:
        kept = layer(x)[0]
    with StorageTracker() as plain:
        kept = layer(x)[0]
    assert kept.grad_fn is not None
    assert tracker.current_bytes == plain.current_bytes
    assert tracker.peak_bytes > plain.peak_bytes


def test_an_operator_with_several_forms_is_looked_up_once() -> None:
    x, half = tensors()["x"], tensors()["half"]
    into = torch.empty(LARGE)
    given = workspace_bytes(aten.add.out, (half, x), into, {"out": into})
    assert given == workspace_bytes(aten.add.Tensor, (half, x), x) > 0
