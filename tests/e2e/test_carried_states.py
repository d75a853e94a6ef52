"""Loops that carry a hidden state from batch to batch over changing lengths, as language models are trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila
from koila._budget import Budget
from koila.execution.behind import history_behind
from koila.planning.tracker import StorageTracker

LENGTHS = (9, 12, 7, 15, 11, 14, 8, 10, 13, 9, 15)
KINDS = {"GRU": nn.GRU, "LSTM": nn.LSTM, "RNN": nn.RNN}
BATCH, WORDS, WIDTH = 16, 200, 32
WAYS: dict[str, dict[str, Any]] = {"chunks": {"chunk_size": 2}, "bytes": {"allowed": "1MiB"}}


class Language(nn.Module):
    """Two recurrent layers with dropout between them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = KINDS[kind](WIDTH, WIDTH, 2, dropout=0.2)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor, state: Any) -> tuple[Tensor, Any]:
        output, state = self.layers(self.words(words), state)
        return self.head(output), state


def detached(state: Any) -> Any:
    """What a loop takes to the next batch."""
    return state.detach() if isinstance(state, Tensor) else tuple(map(detached, state))


def first_state(kind: str) -> Any:
    zeros = torch.zeros(2, BATCH, WIDTH, dtype=torch.float64)
    return (zeros, zeros.clone()) if kind == "LSTM" else zeros


def train(kind: str, is_lazy: bool) -> list[list[Tensor]]:
    """The losses and gradients of a loop."""
    torch.manual_seed(0)
    model, state, found = Language(kind).double(), first_state(kind), []
    for length in LENGTHS:
        words = torch.randint(0, WORDS, (length + 1, BATCH))
        data, targets = words[:-1], words[1:]
        if is_lazy:
            data, targets = koila.lazy(data, targets, batch=1)
        model.zero_grad()
        output, state = model(data, detached(state))
        loss = F.cross_entropy(output.flatten(0, 1), targets.flatten())
        loss.backward()
        found.append([loss.detach() + 0, *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.5)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_carried_state_takes_three_traces(kind: str, way: str) -> None:
    """Cells would be another program at each length; the first of all takes a state that nobody carried."""
    expected = train(kind, False)
    koila.metrics.reset()
    options = dict(WAYS[way])
    with koila.budget(options.pop("allowed", None), **options):
        found = train(kind, True)
    for own, theirs in zip(found, expected, strict=True):
        for mine, other in zip(own, theirs, strict=True):
            assert (mine - other).norm() <= 1e-10 * other.norm()
    assert koila.metrics.counter_value("runs::split") >= len(LENGTHS)
    assert koila.metrics.counter_value("traces") <= 4
    if way == "bytes":  # What an unsplit run would take is known from formulas, too.
        assert koila.metrics.counter_value("sizes::projected") >= len(set(LENGTHS)) - 5


def test_a_carried_state_costs_no_second_backward_pass() -> None:
    """A state that is taken detached has a history, to which no gradient comes; one that is not is counted."""
    torch.manual_seed(0)
    model, words = Language("GRU").double(), torch.randint(0, WORDS, (10, BATCH))
    with koila.budget(chunk_size=4):
        state = koila.run(model(koila.lazy(words, batch=1), first_state("GRU"))[1])
    assert state.grad_fn is not None

    def behind(state: Tensor) -> tuple[int, int]:
        loss = model(koila.lazy(words, batch=1), state)[0].square().mean()
        return history_behind(koila.graph(loss), Budget(allowed_bytes=2**30))

    state_bytes = state.numel() * state.element_size()
    assert behind(first_state("GRU")) == (0, 0)
    assert behind(detached(koila.lazy(state, batch=1))) == (state_bytes, 0)
    held, backward = behind(state)
    assert held == state_bytes and backward > 0


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_whole_run_takes_is_bounded(kind: str) -> None:
    """Its cells are not run for the projection, but what autograd keeps for them counts."""
    torch.manual_seed(0)
    model, words = Language(kind).double(), torch.randint(0, WORDS, (40, BATCH))
    with StorageTracker() as tracker:
        model(words, first_state(kind))[0].square().mean().backward()
    model.zero_grad(set_to_none=True)
    loss = model(koila.lazy(words, batch=1), first_state(kind))[0].square().mean()
    projected = koila.plan(loss, backward=True, budget="1GiB").projected_bytes
    assert tracker.peak_bytes <= projected <= 1.5 * tracker.peak_bytes + 2 * 40 * (17 << 10)
