"""The code of prepared runs: what it says of an error, what it loses, when it lets values go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import koila
from koila import events

REGULAR = torch.eye(3, dtype=torch.float64) * 2
SINGULAR = torch.ones(3, 3, dtype=torch.float64)
X = torch.arange(12, dtype=torch.float64).view(4, 3) / 7


def counted(name: str) -> int:
    return events.counters().get(name, 0)


def prepared(step: Callable[[], Any]) -> None:
    """Make a step known, and see that it is prepared."""
    for _ in range(4):
        step()
    before = counted("prepared runs")
    step()
    assert counted("prepared runs") > before


def test_an_error_names_the_line_of_its_call_and_leaves_everything_pending() -> None:
    weight = torch.ones(3, 3, dtype=torch.float64, requires_grad=True)

    def loss(matrix: torch.Tensor) -> Any:
        inverse = torch.linalg.inv(koila.lazy(matrix))
        return (inverse @ weight).tanh().sum()

    prepared(lambda: loss(REGULAR).backward())
    weight.grad, failing = None, loss(SINGULAR)
    for _ in range(2):  # The second time it has nodes.
        with pytest.raises(torch.linalg.LinAlgError, match="singular") as raised:
            failing.backward()
        assert any("linalg_inv was recorded at" in note and __file__ in note for note in raised.value.__notes__)
        assert len(raised.value.__notes__) == 1
        assert weight.grad is None
    loss(REGULAR).backward()
    expected = torch.autograd.grad((torch.linalg.inv(REGULAR) @ weight).tanh().sum(), weight)[0]
    assert torch.equal(weight.grad, expected)


def test_a_call_that_nobody_requires_may_fail_and_so_do_calls_on_its_result() -> None:
    def step(matrix: torch.Tensor) -> tuple[Any, Any, float]:
        x = koila.lazy(X)
        bias = torch.linalg.inv(koila.lazy(matrix)).sum(0)
        moved = F.linear(x, REGULAR, bias)
        return bias, moved, x.cos().sum().item()

    prepared(lambda: step(REGULAR))
    before = counted("pending::failed::LinAlgError")
    bias, moved, found = step(SINGULAR)
    assert found == X.cos().sum().item()
    assert counted("pending::failed::LinAlgError") == before + 1
    for value in (moved, bias):  # A bias that is not there is not the same as no bias.
        with pytest.raises(torch.linalg.LinAlgError):
            value.run()
    _, moved, _ = step(REGULAR)
    assert torch.equal(moved.run(), F.linear(X, REGULAR, torch.linalg.inv(REGULAR).sum(0)))


def test_values_are_let_go_after_their_last_use() -> None:
    x, num_bytes = torch.ones(1 << 18), 1 << 20

    def step() -> float:
        h = koila.lazy(x)
        for _ in range(8):
            h = torch.cos(h)
        return float(h.sum().item())

    prepared(step)
    with koila.measure() as measured:
        step()
    assert measured.peak_bytes <= 2 * num_bytes + 1024


def test_a_view_of_an_input_beside_other_inputs() -> None:
    """What a policy has chosen in each step is read, and all of it differentiated at the end."""
    weight = torch.linspace(-1, 1, 9, dtype=torch.float64).view(3, 3).requires_grad_()

    def episode(make: Callable[[torch.Tensor], Any]) -> None:
        chosen = []
        for row in X:
            scores = make(row) @ weight
            chosen.append(scores[int(scores.argmax().item())])
        torch.stack(chosen).tanh().sum().backward()

    episode(lambda row: row)
    expected, weight.grad = weight.grad, None
    prepared(lambda: episode(koila.lazy))
    weight.grad, before, forward = None, counted("prepared runs"), counted("runs")
    episode(koila.lazy)
    assert torch.equal(weight.grad, expected)
    assert counted("prepared runs") - before == counted("runs") - forward == len(X) + 1


def test_inputs_that_share_memory_may_stop_to() -> None:
    both = torch.arange(8.0)

    def step(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        a, b = koila.lazy(left, right)
        return (a.view(2, 2) * b.view(2, 2)).sum(1).run()

    prepared(lambda: step(both[:4], both[4:]))
    for left, right in ((both[:4], both[:4]), (both[:4], both.clone()[4:])):
        assert torch.equal(step(left, right), (left.view(2, 2) * right.view(2, 2)).sum(1))
