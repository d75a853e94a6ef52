"""S2: in-place operators, slice and mask assignment, `fill_`, and `copy_` between real and lazy tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import koila

pytestmark = pytest.mark.semantics("S2")
BUDGETS: list[dict[str, Any]] = [{}, {"chunk_size": 1}, {"chunk_size": 3}, {"allowed": "1MiB"}]
Program = Callable[[torch.Tensor, torch.Tensor], Any]
PROGRAMS: dict[str, Program] = {}


def data(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def program(function: Program) -> Program:
    """A program of an input [7, 4] and a real tensor [7, 4]; it returns what the caller reads."""
    PROGRAMS[function.__name__] = function
    return function


@program
def operators(x: torch.Tensor, real: torch.Tensor) -> Any:
    h = x * 1
    h += real
    h *= 2
    h -= x.mean(0)
    h /= 3.0
    h **= 2
    k = (h > 0.5).clone()
    k &= x > 0
    k |= real > 1
    n = (h * 10).long()
    n //= 3
    n %= 4
    n <<= 1
    n ^= 3
    return h, k, n


@program
def real_operators_with_lazy_operands(x: torch.Tensor, real: torch.Tensor) -> Any:
    before = x + real
    real += x
    between = x * real
    real.mul_(2.0).sub_(x)
    real[1:3] = x[:2]
    real[x > 1] = 0.0
    return before, between, real, x + real


@program
def copied_to_a_real_tensor(x: torch.Tensor, real: torch.Tensor) -> Any:
    before = (x + real).sum()
    found = real.copy_(x * 2)
    real[0].copy_(x[1])
    assert found is real
    return before, real, x - real


@program
def copied_from_a_real_tensor(x: torch.Tensor, real: torch.Tensor) -> Any:
    h = x * 1
    before = h.sum(0)
    h.copy_(real)
    h[2] = real[3]
    h[:, 1] = real[:, 0]
    real.zero_()
    return before, h, real


@program
def copied_with_another_type(x: torch.Tensor, real: torch.Tensor) -> Any:
    small = torch.zeros(7, 4, dtype=torch.float32)
    small.copy_(x)
    h = x.float()
    h.copy_(real)
    whole = torch.zeros(7, 4, dtype=torch.int64)
    whole.copy_((x * 10).trunc())
    return small, h, whole


@program
def filled(x: torch.Tensor, real: torch.Tensor) -> Any:
    h = x * 1
    h[0].fill_(3.0)
    h[:, 2].fill_(x[0, 0])
    h[h > 1] = 9.0
    h[torch.tensor([1, 5])] = -1.0
    h[..., -1:] = real[..., :1]
    h.masked_fill_(real > 1, 0.25)
    h.index_fill_(1, torch.tensor([0]), 5.0)
    return h, h.sum()


@program
def masks_and_scatters(x: torch.Tensor, real: torch.Tensor) -> Any:
    h = x * 1
    h[x > 0.3] = x[x > 0.3] * 2
    index = torch.tensor([[0, 1, 2, 3]]).expand(7, 4)
    h.scatter_(1, index, real).scatter_add_(1, index.flip(1), x)
    h.index_put_((torch.arange(7), torch.zeros(7, dtype=torch.int64)), x[:, 3], accumulate=True)
    h.masked_scatter_(real > 0, x.flip(0))
    h.clamp_(-2, 2).tril_()
    return (h,)


@program
def clamped_and_swapped(x: torch.Tensor, real: torch.Tensor) -> Any:
    h = x * 1
    h[:, [0, 1]] = h[:, [1, 0]]
    h[2:5], h[0] = h[1:4] * 2, h[6].clone()
    h.addcmul_(x, real, value=0.5).addcdiv_(x, real.abs() + 1).lerp_(real, 0.25)
    return (h,)


@program
def a_lazy_value_written_by_real_code_after_it_was_read(x: torch.Tensor, real: torch.Tensor) -> Any:
    h = x * 2
    total = h.sum().item()
    h.add_(total)
    later = h * 3
    h.zero_()
    return h, later


def outcome(function: Program, wrap: Callable[[torch.Tensor], Any]) -> list[torch.Tensor]:
    return list(koila.run(function(wrap(data(7, 4)), data(7, 4, seed=1))))


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_equal_to_eager(name: str, budget: dict[str, Any]) -> None:
    expected = outcome(PROGRAMS[name], lambda x: x)
    with koila.budget(**budget):
        found = outcome(PROGRAMS[name], koila.lazy)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("budget", BUDGETS)
def test_gradients_through_copies_between_real_and_lazy(budget: dict[str, Any]) -> None:
    def gradients(wrap: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        w = data(4, seed=2).requires_grad_()
        x = wrap(data(7, 4))
        h = x * w
        real = torch.zeros(7, 4, dtype=torch.float64)
        real.copy_(h)
        real[0] = (w * 2).sum()
        other = x * 1
        other.copy_(data(7, 4, seed=1) * w)
        (real.square().sum() + (other * h).sum()).backward()
        assert w.grad is not None
        return [w.grad, real.detach()]

    expected = gradients(lambda x: x)
    with koila.budget(**budget):
        found = gradients(koila.lazy)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("budget", BUDGETS)
def test_lists_of_tensors_written_at_once(budget: dict[str, Any]) -> None:
    """`torch._foreach_*` returns nothing: an optimizer with a lazy gradient among real ones still steps."""

    def program(wrap: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        x, real, h = wrap(data(7, 4)), [data(4, seed=1), data(4, seed=2)], wrap(data(7, 4)) * 2
        torch._foreach_add_(real, [x.mean(0), torch.ones(4, dtype=torch.float64)])
        torch._foreach_mul_([h, real[0]], 3.0)
        return [*real, h, *torch._foreach_mul([h, x], 2.0)]

    expected = program(lambda x: x)
    with koila.budget(**budget):
        found = koila.run(program(koila.lazy))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("budget", BUDGETS[:3])
def test_what_eager_refuses_is_refused_with_its_words(budget: dict[str, Any]) -> None:
    with koila.budget(**budget):
        x = koila.lazy(data(7, 4))
        with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
            x[:1].expand(7, 4).add_(1.0).sum().item()
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            koila.run(koila.lazy(data(7, 4).requires_grad_()).mul_(2.0))
        with pytest.raises(RuntimeError, match="can't be cast"):
            koila.run((x * 10).long().add_(0.5))
