"""Errors of runs in chunks: each has the line of its call; a label that is no class raises what eager's loss does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila

pytestmark = pytest.mark.semantics("S10")

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": F.cross_entropy,
    "sum": lambda found, labels: F.cross_entropy(found, labels, reduction="sum"),
    "weighted": lambda found, labels: F.cross_entropy(found, labels, weight=torch.ones(5)),
    "module": lambda found, labels: nn.NLLLoss()(F.log_softmax(found, 1), target=labels),
    "flat": lambda found, labels: F.cross_entropy(found[:, None].flatten(0, 1), labels[:, None].flatten()),
    "real": lambda found, labels: F.cross_entropy(found, torch.tensor([0, 1, 2, 7, 3, 1, 0, 2])),
    "pixels": lambda found, labels: F.cross_entropy(found[:, :, None, None], labels[:, None, None]),
}


@pytest.mark.parametrize("label", [7, -3])
@pytest.mark.parametrize("name", LOSSES)
def test_a_label_that_is_no_class(name: str, label: int) -> None:
    loss, model = LOSSES[name], nn.Linear(3, 5)
    label = 7 if name == "real" else label
    good, bad = torch.tensor([0, 1, 2, 4, 3, 1, 0, 2]), torch.tensor([0, 1, 2, label, 3, 1, 0, 2])
    x = torch.randn(8, 3)
    with pytest.raises(IndexError) as eager:
        loss(model(x), bad)
    with koila.budget(chunk_size=2):
        for _ in range(0 if name == "real" else 4):  # A step that was prepared fails as a first one does.
            inputs, labels = koila.lazy(x, good)
            loss(model(inputs), labels).backward()
        before = None if model.weight.grad is None else model.weight.grad.clone()
        inputs, labels = koila.lazy(x, bad)
        with pytest.raises(IndexError) as lazy:
            loss(model(inputs), labels).backward()
    assert str(lazy.value) == str(eager.value)
    assert any(__file__ in note for note in lazy.value.__notes__)
    assert (before is None) == (model.weight.grad is None)
    assert before is None or torch.equal(before, model.weight.grad)


def test_a_lookup_of_the_user_keeps_its_error() -> None:
    model = nn.Linear(3, 5)
    x, labels, places = koila.lazy(torch.randn(8, 3), torch.zeros(8, dtype=torch.long), torch.full((8, 1), 7))
    with koila.budget(chunk_size=2), pytest.raises(RuntimeError, match="index 7 is out of bounds") as raised:
        looked_up = model(x).gather(1, places)
        (F.cross_entropy(model(x), labels) + looked_up.sum()).backward()
    assert any(_line_of("looked_up = ") in note and "gather" in note for note in raised.value.__notes__)


def _line_of(text: str) -> str:
    """The place of the first line of this file with a text."""
    lines = Path(__file__).read_text().splitlines()
    return f"{Path(__file__).name}:{next(number for number, line in enumerate(lines, 1) if text in line)}"


def _looked_up(table: Tensor, places: Tensor) -> Tensor:
    hidden = torch.relu(places.float()[:, None] * torch.ones(4))
    return hidden.sum() + F.embedding(places, table).sum()


@pytest.mark.parametrize("num_good", [0, 1, 4])
def test_the_error_of_a_step_names_its_line(num_good: int) -> None:
    table = torch.randn(5, 3, requires_grad=True)
    good, bad = torch.tensor([0, 1, 2, 4, 3, 1]), torch.tensor([0, 1, 2, 4, 3, 5])
    with koila.budget(chunk_size=4):
        for _ in range(num_good):
            _looked_up(table, koila.lazy(good)).backward()
        with pytest.raises(IndexError) as raised:
            _looked_up(table, koila.lazy(bad)).backward()
    assert [_line_of("F.embedding(places") in note for note in raised.value.__notes__] == [True]


@pytest.mark.asks_laziness("the error comes when a piece is computed, not at the call")
def test_the_error_of_a_streamed_value_names_its_line() -> None:
    table, places = torch.randn(5, 3), koila.lazy(torch.tensor([0, 1, 2, 4, 3, 5]))
    pieces = koila.stream(F.embedding(places, table) * 2, chunk_size=4)
    assert next(pieces).shape == (4, 3)
    with pytest.raises(IndexError) as raised:
        next(pieces)
    assert any(_line_of("koila.stream(F.embedding") in note for note in raised.value.__notes__)
