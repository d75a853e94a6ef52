"""Calls whose results have the sizes of operands: inferred from other sizes, they are what fake tensors say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import koila
from koila.ir.cache import clear_all
from koila.ir.infer import Inference, infer, infer_call
from koila.ir.tree import leaves

LSTM, GRU = nn.LSTM(4, 6, 2, batch_first=True, bidirectional=True), nn.GRU(4, 6)
Arguments = Callable[[int, int], tuple[Any, ...]]


def grown(*shape: int) -> torch.Tensor:
    """A value that requires grad and is no leaf."""
    return torch.empty(shape, requires_grad=True).clone()


def heads(batch: int, length: int) -> torch.Tensor:
    return grown(batch, length, 2, 8).transpose(1, 2)


def _weights(module: nn.RNNBase) -> list[torch.Tensor]:
    return list(module.parameters())


CASES: dict[str, tuple[Callable[..., Any], Arguments]] = {
    "lstm": (torch.lstm, lambda b, n: (
        grown(b, n, 4), [torch.zeros(4, b, 6), torch.zeros(4, b, 6)], _weights(LSTM), True, 2, 0.0, True, True, True)),
    "gru": (torch.gru, lambda b, n: (
        grown(n, b, 4), torch.zeros(1, b, 6), _weights(GRU), True, 1, 0.0, True, False, False)),
    "attention": (F.scaled_dot_product_attention, lambda b, n: (heads(b, n), heads(b, n + 3), heads(b, n + 3))),
    "attention with a mask": (F.scaled_dot_product_attention, lambda b, n: (
        heads(b, n), heads(b, n), heads(b, n), torch.ones(b, 1, n, n, dtype=torch.bool))),
    "attention with dropout": (F.scaled_dot_product_attention, lambda b, n: (
        heads(b, n), heads(b, n), heads(b, n), None, 0.1)),
    "dropout": (F.dropout, lambda b, n: (grown(b, n), 0.5, True)),
    "a linear layer": (F.linear, lambda b, n: (grown(b, n, 6), torch.zeros(5, 6), torch.zeros(5))),
    "one of what lies otherwise": (F.linear, lambda b, n: (grown(b, 6, n).mT, torch.zeros(5, 6))),
    "words": (F.embedding, lambda b, n: (torch.zeros(b, n, dtype=torch.long), torch.zeros(9, 4, requires_grad=True))),
    "a product": (torch.mul, lambda b, n: (grown(b, n, 6), grown(n, 6))),
    "a product of heads": (torch.Tensor.mul, lambda b, n: (heads(b, n), torch.zeros(b, 1, n, 8))),
    "an outer product": (torch.Tensor.mul, lambda b, n: (grown(b, 1), torch.zeros(n))),
    "a sum with a number": (torch.Tensor.add, lambda b, n: (grown(b, n).mT, 2)),
    "a comparison": (torch.Tensor.eq, lambda b, n: (grown(b, n, 1), grown(n))),
    "numbers of two types": (torch.Tensor.add, lambda b, n: (torch.zeros(b, n, dtype=torch.int), grown(n))),
    "a choice": (torch.where, lambda b, n: (torch.ones(n, dtype=torch.bool), grown(b, n), grown(b, 1))),
    "a mean": (torch.Tensor.mean, lambda b, n: (grown(b, n, 6), 1, True)),
    "a sum of all": (torch.Tensor.sum, lambda b, n: (grown(b, n, 6),)),
    "a sum of what lies otherwise": (torch.Tensor.sum, lambda b, n: (grown(b, n, 6).transpose(0, 1), 2)),
    "a loss": (F.cross_entropy, lambda b, n: (grown(b * n, 6), torch.zeros(b * n, dtype=torch.long))),
    "a loss for each": (F.cross_entropy, lambda b, n: (
        grown(b, 6, n), torch.zeros(b, n, dtype=torch.long), None, None, -100, None, "none")),
    "dropout of what lies otherwise": (F.dropout, lambda b, n: (grown(b, n).mT, 0.5, True)),
}  # fmt: skip


def asked(name: str, batch: int, length: int) -> tuple[Inference, Inference]:
    """What is said about a call whose structure may be known, and what fake tensors say."""
    func, arguments = CASES[name]
    args = arguments(batch, length)
    operands = [each for each in leaves(args) if isinstance(each, torch.Tensor)]
    numbers = tuple(number for each in operands for number in (*each.shape, *each.stride()))
    return infer_call("the call", func, args, {}, operands, numbers), infer(func, args, {}, operands)


@pytest.mark.parametrize("name", CASES)
def test_a_new_size_is_inferred_as_by_fake_tensors(name: str) -> None:
    clear_all()
    koila.metrics.reset()
    for batch, length in ((8, 20), (8, 27), (8, 31), (5, 31), (6, 19), (6, 6), (7, 53), (2, 2)):
        found, expected = asked(name, batch, length)
        assert found.forced is None
        assert found == expected, (batch, length)
    assert koila.metrics.counter_value("sizes::resized") >= 3


def test_sizes_that_no_longer_follow_from_each_other_are_asked_for() -> None:
    clear_all()
    for length in (5, 7, 9):
        asked("attention", 4, length)
    queries, keys = heads(4, 5), heads(4, 6)  # They were three apart.
    numbers = tuple(number for each in (queries, keys, keys) for number in (*each.shape, *each.stride()))
    args = (queries, keys, keys)
    found = infer_call("the call", F.scaled_dot_product_attention, args, {}, args, numbers)
    assert found == infer(F.scaled_dot_product_attention, args, {}, args)


def test_windows_that_overlap_are_asked_for() -> None:
    """Their dimensions have the same stride, and their sizes decide in which order the result lies in memory."""
    clear_all()
    for length in (11, 13, 15, 5, 7):
        windows = torch.zeros(length).unfold(0, 4, 1)
        numbers = (*windows.shape, *windows.stride())
        found = infer_call("the call", torch.Tensor.add, (windows, 1), {}, (windows,), numbers)
        assert found == infer(torch.Tensor.add, (windows, 1), {}, (windows,)), length
