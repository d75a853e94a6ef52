"""Operators that only accelerators have: their rules, and those that have none, each with its reason."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial

import pytest
import torch

import koila
from koila import events
from tests.accelerator import sim
from tests.accelerator.trial import assert_kept, distance, forget, step

OPERATORS = {
    "efficient attention": ("attention", partial(sim.attention, 2), "_scaled_dot_product_efficient_attention"),
    "overrideable attention": (
        "attention", partial(sim.attention, 3), "_scaled_dot_product_fused_attention_overrideable",
    ),
    "lstm cell": ("lstm", partial(sim.attention, 1), "_thnn_fused_lstm_cell"),
    "gru cell": ("gru", partial(sim.attention, 1), "_thnn_fused_gru_cell"),
}  # fmt: skip
"""By what it is: a program, the switch that makes the device use it, and an operator that then runs."""


@pytest.fixture(autouse=True)
def unknown() -> None:
    """The device's switches change which operators a program calls; koila does not see them."""
    forget()


@pytest.mark.parametrize("chunk", [5, 1])
@pytest.mark.parametrize("which", OPERATORS)
def test_operators_of_devices_are_cut(which: str, chunk: int) -> None:
    name, switch, operator = OPERATORS[which]
    with switch():
        expected, found = step(name), step(name, koila.lazy, partial(koila.budget, chunk_size=chunk))
    assert events.counters().get(f"executed::aten.{operator}.default", 0) >= 12 // chunk
    assert distance(found, expected) < 1e-10


def cudnn_norm() -> AbstractContextManager[None]:
    return sim.cudnn_norm()


@pytest.mark.parametrize("chunk", [12, 5, 1])
def test_the_norm_of_cudnn_is_taken_apart(chunk: int) -> None:
    with cudnn_norm():
        expected, found = step("cnn"), step("cnn", koila.lazy, partial(koila.budget, chunk_size=chunk))
    assert found.report.how == ("whole" if chunk == 12 else "split")
    assert "executed::aten.cudnn_batch_norm.default" not in events.counters()
    assert distance(found, expected) < 1e-10


def test_the_norm_of_cudnn_inside_a_budget() -> None:
    with cudnn_norm():
        expected = step("cnn")
        found = step("cnn", partial(koila.lazy, budget=int(0.5 * expected.peak_bytes)))
    assert_kept(found)
    assert distance(found, expected) < 1e-10


def test_statistics_that_the_norm_of_cudnn_hides_are_seen_by_whoever_reads_them() -> None:
    given, read = torch.randn(8, 4, device="sim"), []
    with cudnn_norm():
        for maker in (lambda tensor: tensor, koila.lazy):
            norm = torch.nn.BatchNorm1d(4, device="sim")
            norm(maker(given))
            read.append(norm.running_mean.cpu())
    assert torch.equal(*read)


def test_attention_with_dropout_runs_whole_and_says_why() -> None:
    with sim.attention(2):
        expected = step("attention with dropout")
        found = step("attention with dropout", koila.lazy, partial(koila.budget, chunk_size=5))
    assert events.counters()["forced::random numbers that depend on data"] == 1
    assert distance(found, expected) < 1e-10
