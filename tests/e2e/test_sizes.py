"""Loops over sizes: eager's numbers at every size, and few traces; changing numbers and layouts are no new programs.

`KOILA_NIGHTLY=1` runs all thirty sizes of `benchmarks.sizes`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import koila
from benchmarks.sizes import PROGRAMS, SIZES, tokens
from koila.analysis import program
from koila.analysis.trace import Joint, trace
from koila.ir.graph import Graph
from koila.ir.job import Demand
from koila.ir.numbers import structure_of
from koila.planning.tracker import StorageTracker

SOME = SIZES if "KOILA_NIGHTLY" in os.environ else ((8, 20), (8, 27), (6, 23), (8, 31), (13, 13), (8, 1), (3, 37))
WAYS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "chunks of 3": lambda: koila.budget(chunk_size=3),
    "bytes": lambda: koila.budget("2500KiB"),
}


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_size_has_eagers_numbers(name: str, way: str) -> None:
    torch.manual_seed(0)
    model, step = PROGRAMS[name]()
    model.double()
    error = 1e-5 if name in ("gpt2", "llama", "translation") else 1e-9  # Their losses are computed in float32.
    koila.metrics.reset()

    def stepped(number: int, batch: int, length: int, is_lazy: bool) -> torch.Tensor:
        torch.manual_seed(number)
        loss = step(model, batch, length, is_lazy)
        loss.backward()
        return loss

    for number, (batch, length) in enumerate(SOME):
        found = []
        for is_lazy in (False, True):
            state = {key: value.clone() for key, value in model.state_dict().items()}
            try:
                with WAYS[way]() if is_lazy else nullcontext():
                    loss = stepped(number, batch, length, is_lazy)
            except koila.BudgetError as refused:  # The budget that it names is accepted.
                with koila.budget(refused.needed_bytes):
                    loss = stepped(number, batch, length, is_lazy)
            found.append((float(loss.detach()), gradients(model), torch.get_rng_state()))
            model.zero_grad()
            if not is_lazy:
                model.load_state_dict(state)
        (expected, wanted, generator), (value, given, after) = found
        assert value == pytest.approx(expected, rel=error, nan_ok=True), (batch, length)
        assert torch.equal(generator, after)
        for mine, theirs in zip(given, wanted, strict=True):
            both_empty = bool(theirs.isnan().any()) and bool(mine.isnan().any())  # A loss of no words.
            assert both_empty or (mine - theirs).norm() <= error * (1e-3 + theirs.norm()), (batch, length)
    if (
        way != "bytes" and name != "lstm"
    ):  # In float64, an LSTM is one call for each position: no two lengths are alike.
        assert koila.metrics.counter_value("sizes::built") > 0


NUMBERS: dict[str, Callable[..., torch.Tensor]] = {
    "a factor": lambda h, y, t, v, s: v * F.mse_loss(h, y),
    "a temperature": lambda h, y, t, v, s: F.cross_entropy(h / v, t),
    "label smoothing": lambda h, y, t, v, s: F.cross_entropy(h, t, label_smoothing=v / 3),
    "dropout": lambda h, y, t, v, s: F.mse_loss(F.dropout(h, v / 3), y),
    "a power": lambda h, y, t, v, s: (h - y).abs().pow(1 + v).mean(),
    "a range": lambda h, y, t, v, s: F.mse_loss(h.clamp(-v, v), y),
    "huber": lambda h, y, t, v, s: F.huber_loss(h, y, delta=v),
    "a slope": lambda h, y, t, v, s: F.mse_loss(F.leaky_relu(h, v), y),
    "a filling": lambda h, y, t, v, s: F.mse_loss(h.masked_fill(y > 1, v), y),
    "a whole factor": lambda h, y, t, v, s: (s + 1) * F.mse_loss(h, y),
    "a whole divisor": lambda h, y, t, v, s: F.mse_loss(h, y) / (s + 2),
    "a shift": lambda h, y, t, v, s: F.mse_loss(h, y.roll(s + 1, 1)),
    "a slice": lambda h, y, t, v, s: F.mse_loss(h[:, s + 1 :], y[:, s + 1 :]),
    "an index": lambda h, y, t, v, s: (h * y)[:, s + 1].mean(),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_changes_is_no_new_program(name: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(16, 16, dtype=torch.float64, requires_grad=True)
    x, y, t = torch.randn(12, 16).double(), torch.randn(12, 16).double(), torch.randint(0, 16, (12,))
    traces = []
    for step in range(12):
        value = 0.1 * step + 0.15
        torch.manual_seed(step)
        loss = NUMBERS[name](x @ weight, y, t, value, step)
        (wanted,) = torch.autograd.grad(loss, weight)
        torch.manual_seed(step)
        koila.metrics.reset()
        with koila.budget(chunk_size=5):
            rows, others, targets = koila.lazy(x, y, t)
            NUMBERS[name](rows @ weight, others, targets, value, step).backward()
        assert weight.grad is not None
        torch.testing.assert_close(weight.grad, wanted, rtol=1e-10, atol=1e-12)
        weight.grad = None
        traces.append(int(koila.metrics.counter_value("traces")))
    assert sum(traces[1:]) <= 1, traces


def test_a_slice_that_begins_with_everything_takes_two_more_traces() -> None:
    """A slice of everything is no slice: the first step is a structure of its own."""
    weight = torch.randn(16, 16, dtype=torch.float64, requires_grad=True)
    x, traces = torch.randn(12, 16).double(), []
    for start in range(8):
        koila.metrics.reset()
        with koila.budget(chunk_size=5):
            (koila.lazy(x) @ weight)[:, start:].square().mean().backward()
        (wanted,) = torch.autograd.grad((x @ weight)[:, start:].square().mean(), weight)
        torch.testing.assert_close(weight.grad, wanted, rtol=1e-10, atol=1e-12)
        weight.grad = None
        traces.append(int(koila.metrics.counter_value("traces")))
    assert sum(traces[1:]) <= 2, traces


@pytest.mark.parametrize("scope", [{"chunk_size": 5}, {"nbytes": "40KiB"}])
def test_slices_of_the_data_are_one_program(scope: dict[str, Any]) -> None:
    torch.manual_seed(0)
    weight, data = torch.randn(16, 16, requires_grad=True), torch.randn(200, 16)
    koila.metrics.reset()
    for step in range(12):
        batch = data[step * 16 : step * 16 + 16]
        with koila.budget(chunk_size=5) if "chunk_size" in scope else koila.budget(scope["nbytes"]):
            (koila.lazy(batch) @ weight).square().mean().backward()
        (wanted,) = torch.autograd.grad((batch @ weight).square().mean(), weight)
        torch.testing.assert_close(weight.grad, wanted)
        weight.grad = None
    assert koila.metrics.counter_value("traces") <= 1


def test_strides_of_dimensions_of_one_are_no_new_program() -> None:
    weight = torch.ones(3, requires_grad=True)
    koila.metrics.reset()
    for step in range(12):
        data = torch.empty_strided((6, 1, 3), (3, 5 + step, 1)).fill_(1.0 + step)
        with koila.budget(chunk_size=4):
            x = koila.lazy(data)
            assert x.stride() == data.stride()
            (x * weight).sum().backward()
        torch.testing.assert_close(weight.grad, torch.full((3,), 6.0 * (1 + step)))
        weight.grad = None
    assert koila.metrics.counter_value("traces") == 1


def test_a_tensor_that_starts_later_is_asked_where_it_starts() -> None:
    data = torch.arange(24.0).view(6, 4)
    with koila.budget(chunk_size=2):
        x = koila.lazy(data[2:])
        assert x.storage_offset() == 8 and x[1].storage_offset() == 12 and (x * 2).storage_offset() == 0
        torch.testing.assert_close((x.as_strided((2, 2), (1, 1), 0) + 1).run(), data.as_strided((2, 2), (1, 1), 0) + 1)
        torch.testing.assert_close((x.as_strided((2, 2), (1, 1)) + 1).run(), data[2:].as_strided((2, 2), (1, 1)) + 1)


@pytest.mark.parametrize("kind", ["accumulated", "scaled", "closure"])
def test_loops_stay_in_the_steady_state(kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3) if kind == "closure" else None
    plain = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", enabled=True)
    traces = []

    def loss() -> torch.Tensor:
        with koila.budget(chunk_size=5):
            x, y = koila.lazy(torch.randn(12, 8), torch.randn(12, 1))
            return F.mse_loss(model(x), y)

    for _ in range(4):
        koila.metrics.reset()
        if optimizer is not None:

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                with koila.budget(chunk_size=5):
                    value = loss()
                    value.backward()
                return value

            optimizer.step(closure)  # type: ignore[arg-type]
        elif kind == "accumulated":
            for _ in range(4):
                with koila.budget(chunk_size=5):
                    (loss() / 4).backward()
            plain.step()
            plain.zero_grad()
        else:
            with koila.budget(chunk_size=5):
                scaler.scale(loss()).backward()
            scaler.step(plain)
            scaler.update()
            plain.zero_grad()
        traces.append(int(koila.metrics.counter_value("traces")))
    assert traces[0] > 0 and sum(traces[1:]) == 0, traces


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_one_trace_for_each_structure_and_answer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mask utilities of transformers ask for bools in the middle of a step: whether anything is padded, say."""
    model, _ = PROGRAMS[name]()
    traced: list[Any] = []

    def noted(graph: Graph, demand: Demand, whole_norms: bool = False) -> Joint:
        traced.append((structure_of(graph), demand))
        return trace(graph, demand, whole_norms)

    monkeypatch.setattr(program, "trace", noted)
    numbers = []
    for step in range(8):
        text = tokens(8, 20, 211)
        mask = torch.ones_like(text)
        mask[:, 17:] = step % 2
        with koila.budget(chunk_size=3):
            ids, labels, lazy_mask = koila.lazy(text, text.clone(), mask)
            model(input_ids=ids, labels=labels, attention_mask=lazy_mask).loss.backward()
        model.zero_grad()
        numbers.append(len(traced))
    assert len(traced) == len(set(traced)), "a structure was traced twice"
    assert numbers[2:] == [numbers[1]] * 6, "a trace after both answers were known"


def test_plans_of_new_sizes_hold_what_others_held() -> None:
    """A net of batch norms within few bytes: later sizes take over which values wait between its phases."""
    torch.manual_seed(0)
    model, step = PROGRAMS["resnet"]()
    model.double()
    with koila.budget("1962KiB") as budget:
        koila.metrics.reset()
        for length in (41, 43, 47, 46, 44, 42):
            state = {key: value.clone() for key, value in model.state_dict().items()}
            step(model, 8, length, False).backward()
            wanted = gradients(model)
            model.zero_grad()
            model.load_state_dict(state)
            loss = step(model, 8, length, True)
            with StorageTracker() as tracker:
                loss.backward()
            assert tracker.peak_bytes <= budget.allowed_bytes
            for mine, theirs in zip(gradients(model), wanted, strict=True):
                assert (mine - theirs).norm() <= 1e-9 * (1e-3 + theirs.norm()), length
            model.zero_grad()
        assert koila.metrics.counter_value("plan::held again") >= 2
