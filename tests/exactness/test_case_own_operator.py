"""A user's own operator: it runs whole, until a line says how it can be cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import koila
from tests.exactness.cases import PRIME, Sizes, check

CALLS: list[int] = []
"""The number of rows of each call."""


@torch.library.custom_op("koila_cases::smooth", mutates_args=())
def smooth(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    CALLS.append(x.shape[0])
    return torch.tanh(x) * weight + x.mean(-1, keepdim=True)


@smooth.register_fake
def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("koila_cases::smooth_backward", mutates_args=())
def smooth_backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    CALLS.append(x.shape[0])
    inner = (1 - torch.tanh(x).square()) * weight * grad + grad.sum(-1, keepdim=True) / x.shape[-1]
    return inner, (grad * torch.tanh(x)).sum(0)


@smooth_backward.register_fake
def _(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: torch.Tensor) -> Any:
    return smooth_backward(grad, *ctx.saved_tensors)


smooth.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op("koila_cases::ranks", mutates_args=())
def ranks(x: torch.Tensor) -> torch.Tensor:
    """Without a gradient."""
    CALLS.append(x.shape[0])
    return x.argsort(-1).argsort(-1).to(x.dtype)


@ranks.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


RULES = {
    "smooth": (torch.ops.koila_cases.smooth.default, "x=b_ weight=_ -> b_"),
    "smooth_backward": (torch.ops.koila_cases.smooth_backward.default, "grad=b_ x=b_ weight=_ -> b_ _+"),
    "ranks": (torch.ops.koila_cases.ranks.default, "x=b_ -> b_"),
}


class _Net(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(s.D, s.D), nn.Linear(s.D, s.C)
        self.weight = nn.Parameter(torch.randn(s.D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(smooth(self.before(x), self.weight)).square().mean()


class _Ranked(_Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.before(x)
        return self.after(hidden * ranks(hidden.detach())).square().mean()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Rules are global: tests before and after start without these."""
    from koila.analysis.rules import RULES as known
    from koila.analysis.rules import rule_for
    from koila.planning.in_force import forget_decisions

    def forget() -> None:
        for target, _ in RULES.values():
            known.pop(target, None)
        rule_for.cache_clear()
        forget_decisions()

    forget()
    CALLS.clear()
    yield
    forget()


NETS = {"with a gradient": (_Net, ("smooth", "smooth_backward")), "without a gradient": (_Ranked, ("ranks",))}


@pytest.mark.semantics("S9")
@pytest.mark.parametrize("name", NETS)
def test_own_operator_without_a_rule(name: str) -> None:
    net, _ = NETS[name]
    check(lambda net, x: net(x), lambda s: s.x(s.B, s.D), net)
    s = PRIME
    explanation = koila.explain(net(s).double()(koila.lazy(s.x(s.B, s.D))), backward=True)
    assert any("koila_cases" in text for text in explanation.gathers), str(explanation)
    assert set(CALLS) <= {7, 4}


@pytest.mark.semantics("S9")
@pytest.mark.parametrize("name", NETS)
def test_own_operator_with_a_rule(name: str) -> None:
    net, operators = NETS[name]
    for operator in operators:
        koila.rule(*RULES[operator])
    check(lambda net, x: net(x), lambda s: s.x(s.B, s.D), net)
    assert {1, 2, 3} <= set(CALLS)
    s = PRIME
    explanation = koila.explain(net(s).double()(koila.lazy(s.x(s.B, s.D))), backward=True)
    assert not any("koila_cases" in text for text in explanation.gathers), str(explanation)


def test_own_operator_whose_forward_has_a_rule_and_its_backward_none() -> None:
    koila.rule(*RULES["smooth"])
    check(lambda net, x: net(x), lambda s: s.x(s.B, s.D), _Net)


def test_own_operator_rule_takes_effect_after_a_run() -> None:
    check(lambda net, x: net(x), lambda s: s.x(s.B, s.D), _Ranked, sizes=(PRIME,), chunks=(2,))
    assert set(CALLS) == {7}
    koila.rule(*RULES["ranks"])
    CALLS.clear()
    check(lambda net, x: net(x), lambda s: s.x(s.B, s.D), _Ranked, sizes=(PRIME,), chunks=(2,))
    assert set(CALLS) == {7, 2, 1}


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 3 * ctx.saved_tensors[0] * grad


@pytest.mark.semantics("S13")
def test_own_autograd_function() -> None:
    """Its backward is not the derivative of its forward: it must be the one that is called."""
    check(
        lambda net, x: _Square.apply(net(x)),
        lambda s: s.x(s.B, s.D),
        lambda s: nn.Linear(s.D, s.C),
    )
