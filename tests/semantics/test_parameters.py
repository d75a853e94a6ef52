"""S14: parameters that are frozen, shared, unused or tied, before, during and after training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from tests.semantics.compare import Lazy, same_as_eager

pytestmark = pytest.mark.semantics("S14")


class Tied(nn.Module):
    """The embedding is the head; the middle layer is used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(4, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for _ in range(3):
            hidden = hidden + self.middle(hidden).tanh()
        return self.head(hidden)


def _loss(net: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def _frozen(net: Any) -> None:
    net.middle.requires_grad_(False)


def _all_but_one_frozen(net: Any) -> None:
    net.requires_grad_(False)
    net.middle.bias.requires_grad_(True)


def _shared_with_another_module(net: Any) -> None:
    net.unused.weight = net.middle.weight
    net.unused.bias = net.head.weight.data.new_zeros(4).requires_grad_()  # type: ignore[assignment]


VARIANTS: dict[str, Callable[[Any], Any]] = {
    "tied and unused": lambda net: None,
    "frozen": _frozen,
    "all but one frozen": _all_but_one_frozen,
    "frozen bias": lambda net: net.middle.bias.requires_grad_(False),
    "frozen by a tied name": lambda net: net.head.requires_grad_(False),
    "without a parameter": lambda net: net.middle.register_parameter("bias", None),
    "a row that stays": lambda net: setattr(net.embedding, "padding_idx", 2),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_and_their_absence(name: str) -> None:
    def program(lazy: Lazy) -> Any:
        net = Tied().double()
        VARIANTS[name](net)
        tokens = lazy(torch.randint(0, 7, (5, 4)))
        optimizer = torch.optim.AdamW((p for p in net.parameters() if p.requires_grad), lr=0.05)
        seen: list[Any] = []
        for _ in range(2):
            optimizer.zero_grad()
            loss = _loss(net, tokens)
            loss.backward()
            seen += [loss.detach(), [p.grad for p in net.parameters()]]
            optimizer.step()
        return seen, [p.detach() for p in net.parameters()]

    same_as_eager(program, (1, 3), in_bytes=name == "frozen")


def test_a_parameter_that_is_frozen_and_thawed_between_steps() -> None:
    def program(lazy: Lazy) -> Any:
        net = Tied().double()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(4):
            net.middle.requires_grad_(step % 2 == 1)
            optimizer.zero_grad()
            _loss(net, lazy(torch.randint(0, 7, (5, 4)))).backward()
            optimizer.step()
        return [p.detach() for p in net.parameters()], [p.grad for p in net.parameters()]

    same_as_eager(program, (1, 3))


def test_one_parameter_under_two_names_of_a_program() -> None:
    def program(lazy: Lazy) -> Any:
        weight = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
        x = lazy(torch.randn(5, 3, dtype=torch.float64))
        alias = weight.t()
        loss = (x @ weight @ alias).square().mean() + weight.diagonal().sum() + alias.norm()
        loss.backward()
        return loss.detach(), weight.grad

    same_as_eager(program, (1, 3), in_bytes=True)


def test_a_frozen_part_behind_a_trained_one_and_before_it() -> None:
    def program(lazy: Lazy) -> Any:
        first, second, third = (nn.Linear(3, 3).double() for _ in range(3))
        first.requires_grad_(False)
        third.requires_grad_(False)
        x = lazy(torch.randn(5, 3, dtype=torch.float64))
        with torch.no_grad():
            features = first(x).relu()
        loss = third(second(features).relu()).square().mean()
        loss.backward()
        return loss.detach(), [p.grad for module in (first, second, third) for p in module.parameters()]

    same_as_eager(program, (1, 3), in_bytes=True)


def test_a_teacher_without_gradients_beside_a_student() -> None:
    def program(lazy: Lazy) -> Any:
        student, teacher = Tied().double(), Tied().double().eval().requires_grad_(False)
        tokens = lazy(torch.randint(0, 7, (5, 4)))
        goal = teacher(tokens).log_softmax(-1)
        loss = F.kl_div(student(tokens).log_softmax(-1), goal, log_target=True, reduction="batchmean")
        loss.backward()
        return loss.detach(), goal, [p.grad for p in (*student.parameters(), *teacher.parameters())]

    same_as_eager(program, (1, 3))


def test_parameters_given_by_functional_call() -> None:
    def program(lazy: Lazy) -> Any:
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
        given = {name: (p.detach() * 2).requires_grad_() for name, p in net.named_parameters()}
        x = lazy(torch.randn(5, 3, dtype=torch.float64))
        loss = functional_call(net, given, (x,)).square().mean() + functional_call(net, {}, (x,)).mean()
        loss.backward()
        buffers = [buffer.clone() for buffer in net.state_dict().values()]
        return loss.detach(), [p.grad for p in given.values()], [p.grad for p in net.parameters()], buffers

    same_as_eager(program, (1, 3))


def test_weight_and_spectral_norm_and_a_parametrisation() -> None:
    def program(lazy: Lazy) -> Any:
        first = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4).double())
        second = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 2).double())
        x, seen = lazy(torch.randn(5, 3, dtype=torch.float64)), []
        for _ in range(2):
            loss = second(first(x).relu()).square().mean()
            loss.backward()
            seen.append(loss.detach())
        state = [tensor.detach().clone() for module in (first, second) for tensor in module.state_dict().values()]
        return seen, [p.grad for module in (first, second) for p in module.parameters()], state

    same_as_eager(program, (1, 3))
