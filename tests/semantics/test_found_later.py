"""More programs that were written to break koila: equal numbers that are not the same, errors, budgets at breaks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import koila
from koila._torch import TorchDispatchMode
from koila.capture.pending import recorder

SIZES = (None, 1, 3)
Lazy = Callable[[Tensor], Any]


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def scope(size: int | None) -> AbstractContextManager[Any]:
    return koila.budget(chunk_size=size) if size else nullcontext()


def of_eager(x: Tensor) -> Any:
    return x


# Numbers that are equal and not the same.

SIGNED: dict[str, Callable[[Any, float], Any]] = {
    "copysign": torch.copysign,
    "clamp": lambda x, zero: torch.copysign(torch.ones(()).double(), x.clamp(min=zero, max=zero)),
    "where": lambda x, zero: 1 / torch.where(x > 100, x, zero),
    "full": lambda x, zero: 1 / torch.full_like(x, zero) + x,
    "threshold": lambda x, zero: 1 / F.threshold(x, 100.0, zero),
}


@pytest.mark.semantics("S17")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SIGNED)
def test_a_negative_zero_is_another_number(name: str, size: int | None) -> None:
    given = randn(7, 3)
    for zero in (0.0, -0.0, 0.0, -0.0, -0.0, 0.0):
        expected = SIGNED[name](given, zero)
        with scope(size):
            assert SIGNED[name](koila.lazy(given), zero).tolist() == expected.tolist()


class Two(IntEnum):
    TWO = 2


@pytest.mark.semantics("S5")
@pytest.mark.parametrize("size", SIZES)
def test_numbers_of_other_classes_are_other_programs(size: int | None) -> None:
    given = torch.arange(7)
    for number in (np.int64(2), np.float64(2.0), np.float32(2.0), np.int64(2), 2, 2.0, Two.TWO, True):
        expected = given * number
        with scope(size):
            found = koila.lazy(given) * number
            assert found.dtype is expected.dtype
            assert found.tolist() == expected.tolist()


@pytest.mark.semantics("S6")
@pytest.mark.parametrize("size", SIZES)
def test_an_array_that_was_an_index_may_be_used_again(size: int | None) -> None:
    with scope(size):
        index = np.array([0, 2, 4])
        taken = koila.lazy(torch.arange(5.0))[index]
        index.fill(1)
        assert taken.tolist() == [0.0, 2.0, 4.0]


@pytest.mark.semantics("S17")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("orders", [(-1, -2, 6, 2), (3, 4, -2), (6, 3, 4, 5), (2, 3, 1, 7), (4, 8, 5)])
def test_whole_orders_of_a_norm(orders: tuple[int, ...], size: int | None) -> None:
    """Formulas of two traces fitted by chance: p - 2 is p * p / 9 for six and three."""
    given = randn(7, 4)
    given[1], given[2, 0] = 0, 0
    for order in orders:
        found = []
        for lazy in (of_eager, koila.lazy):
            weight = torch.ones(4, dtype=torch.float64, requires_grad=True)
            with scope(size):
                torch.linalg.vector_norm(lazy(given) * weight, order, dim=1).sin().sum().backward()
            found.append(weight.grad)
        torch.testing.assert_close(*found, equal_nan=True, rtol=1e-12, atol=1e-12)


@pytest.mark.semantics("S15")
@pytest.mark.parametrize("size", SIZES)
def test_the_default_dtype_is_that_of_the_call(size: int | None) -> None:
    def program(lazy: Lazy) -> Any:
        torch.set_default_dtype(torch.float64)
        try:
            return lazy(torch.arange(7)).sqrt() + 0.1
        finally:
            torch.set_default_dtype(torch.float32)

    with scope(size):
        found = program(koila.lazy).run()
    assert found.dtype is torch.float64
    assert torch.equal(found, program(of_eager))


# Conjugates.


@pytest.mark.semantics("S3")
@pytest.mark.parametrize("size", SIZES)
def test_a_resolved_conjugate_has_memory_of_its_own(size: int | None) -> None:
    def program(lazy: Lazy) -> Any:
        weight = torch.linspace(1, 2, 3, dtype=torch.float64).requires_grad_()
        z = torch.complex(lazy(real) * weight, lazy(imaginary))
        copied = z.conj().resolve_conj()
        copied.mul_(3)
        z.conj().imag.resolve_neg().mul_(5)
        torch.view_as_real(z.conj().resolve_conj()).square().sum().backward()
        return z.abs().sum().item(), copied.abs().sum().item(), weight.grad

    real, imaginary = randn(7, 3), randn(7, 3)
    with scope(size):
        torch.testing.assert_close(program(koila.lazy), program(of_eager), rtol=1e-12, atol=1e-12)


@pytest.mark.semantics("S12")
@pytest.mark.parametrize("size", SIZES)
def test_a_hook_on_a_leaf_takes_part_in_a_recorded_gradient(size: int | None) -> None:
    def program(lazy: Lazy) -> Any:
        weight = torch.ones(1, dtype=torch.float64, requires_grad=True)
        x = lazy(given)
        scaled = weight * x
        weight.register_hook(lambda gradient: gradient * 0.5)
        return (x * torch.autograd.grad(scaled.sum(), weight, create_graph=True)[0].mean()).sum().item()

    given = randn(5, 4)
    with scope(size):
        assert program(koila.lazy) == pytest.approx(program(of_eager), rel=1e-12)


# Errors and statistics.


@pytest.mark.semantics("S10")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("beta", [-0.3, -1.0])
def test_a_number_that_only_the_kernel_refuses(beta: float, size: int | None) -> None:
    weight = torch.ones(4, dtype=torch.float64, requires_grad=True)
    with scope(size):
        for good in (0.5, 0.7):
            F.smooth_l1_loss(koila.lazy(randn(7, 4)) * weight, randn(7, 4), beta=good).backward()
        with pytest.raises(RuntimeError, match="negative values for beta"):
            F.smooth_l1_loss(koila.lazy(randn(7, 4)) * weight, randn(7, 4), beta=beta).backward()
    recorder.forget()


@pytest.mark.semantics("S10")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("eps", [0.0, -1.0])
def test_a_number_that_batch_norm_refuses(eps: float, size: int | None) -> None:
    weight = torch.ones(4, dtype=torch.float64, requires_grad=True)
    with scope(size):
        for good in (1e-5, 1e-3, 1e-4):
            F.batch_norm(koila.lazy(randn(7, 4)) * weight, None, None, training=True, eps=good).sum().backward()
        with pytest.raises(ValueError, match="eps must be positive"):
            F.batch_norm(koila.lazy(randn(7, 4)) * weight, None, None, training=True, eps=eps).sum().backward()
    recorder.forget()


@pytest.mark.semantics("S6")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("wrong", [4, -5])
def test_an_index_that_is_not_there(wrong: int, size: int | None) -> None:
    weight, places = torch.ones(4, dtype=torch.float64, requires_grad=True), torch.tensor([0, 1, 2, 3, 2, wrong, 0])

    def program(lazy: Lazy) -> None:
        (lazy(given) * weight)[torch.arange(7), lazy(places)].sum().backward()

    given = randn(7, 4)
    with pytest.raises(IndexError) as eager:
        program(of_eager)
    with scope(size), pytest.raises(IndexError) as lazy:
        program(koila.lazy)
    assert str(lazy.value) == str(eager.value)
    recorder.forget()


@pytest.mark.semantics("S5")
@pytest.mark.parametrize("place", [0, 3, 6])
@pytest.mark.parametrize("shape", [(7, 2), (7, 2, 3, 3)])
def test_statistics_of_data_with_an_infinity(shape: tuple[int, ...], place: int) -> None:
    given = randn(*shape)
    given[place, 0] = float("-inf")
    kind = nn.BatchNorm1d if len(shape) == 2 else nn.BatchNorm2d
    eager = kind(2).double()
    eager(given).sum().backward()
    for size in (1, 2, 3, 4, 5):
        chunked = kind(2).double()
        with koila.budget(chunk_size=size):
            chunked(koila.lazy(given)).sum().backward()
        torch.testing.assert_close(chunked.state_dict(), eager.state_dict(), equal_nan=True, rtol=1e-12, atol=1e-12)


@pytest.mark.semantics("S9")
@pytest.mark.parametrize("size", SIZES)
def test_functions_that_go_element_by_element(size: int | None) -> None:
    def program(lazy: Lazy) -> Any:
        x = lazy(torch.arange(7.0)) * 1
        y = x * 3
        x.apply_(lambda each: each * 2)
        return (x.map_(y, lambda a, b: a + b) + y).tolist()

    with scope(size):
        assert program(koila.lazy) == program(of_eager)


# Entrances.


@pytest.mark.semantics("S5")
def test_a_meta_tensor_leaves_other_programs_alone() -> None:
    made = (koila.lazy(torch.ones(3, 4, device="meta")) * 2).sum()
    assert made.run().device.type == "meta"
    assert koila.lazy(torch.ones(3)).sum().item() == 3


@pytest.mark.semantics("S5")
def test_a_variable_of_a_lazy_tensor_is_lazy() -> None:
    x = Variable(koila.lazy(torch.randn(512, 64)))
    assert isinstance(x, koila.LazyTensor)
    layer = nn.Linear(64, 256)
    with koila.budget("64KiB"), pytest.raises(koila.BudgetError):
        layer(x).relu().sum().backward()
    recorder.forget()
    leaf = Variable(koila.lazy(torch.ones(5)), requires_grad=True)
    (leaf * 3).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [3.0] * 5
    assert type(Variable(torch.ones(2))) is Tensor
    assert Variable(data=torch.ones(2), requires_grad=True).requires_grad


@pytest.mark.semantics("S5")
def test_what_is_a_leaf() -> None:
    for lazy in (of_eager, koila.lazy):
        x = lazy(torch.ones(7, 4))
        leaf = (x * 2).detach().requires_grad_()
        made = (x * 2).detach().mul_(torch.ones(4, requires_grad=True))
        assert (leaf.is_leaf, made.is_leaf, (leaf * 1).is_leaf, (x > 0).is_leaf) == (True, False, False, True)
        torch.optim.SGD([leaf], 0.1)


def test_a_program_without_a_batch_says_so() -> None:
    with koila.budget(chunk_size=3):
        koila.lazy(torch.ones(()), torch.ones(()))[0].exp().item()
    assert koila.metrics.counter_value("whole::no batch is known") == 1


@pytest.mark.semantics("S9")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", [nn.LazyBatchNorm1d, nn.LazyInstanceNorm1d, lambda: nn.LazyLinear(3)])
def test_modules_that_learn_their_sizes(kind: Any, size: int | None) -> None:
    given = randn(7, 3, 4)
    found = []
    for lazy in (of_eager, koila.lazy):
        torch.manual_seed(0)
        module = kind().double()
        with scope(size):
            module(lazy(given)).square().sum().backward()
        found.append([*module.state_dict().values(), *(parameter.grad for parameter in module.parameters())])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


# Budgets of steps that have a break in them.


def _network() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32)).double()


def _masked(first: nn.Module, second: nn.Module, x: Any) -> Any:
    h = first(x)
    return second(h[h[:, 0] > 0]).square().mean()


def _read(first: nn.Module, second: nn.Module, x: Any) -> Any:
    h = first(x)
    h.tolist()
    return second(h).square().mean()


def _accuracy(first: nn.Module, second: nn.Module, x: Any) -> Any:
    o = second(first(x))
    (o.argmax(1) == 3).sum().item()
    return o.square().mean()


def _scaled(first: nn.Module, second: nn.Module, x: Any) -> Any:
    loss = second(first(x)).square().mean()
    loss.item()
    return loss / 1


@pytest.mark.semantics("S17")
@pytest.mark.parametrize("program", [_masked, _read, _accuracy, _scaled])
def test_budgets_hold_where_a_step_has_a_break(program: Callable[..., Any]) -> None:
    """A backward pass runs the first half again inside that of the second: both within one budget."""
    torch.manual_seed(0)
    first, second, x = _network(), _network(), randn(200, 32)
    parameters = [*first.parameters(), *second.parameters()]

    def step(**budget: Any) -> list[Any]:
        for parameter in parameters:
            parameter.grad = None
        program(first, second, koila.lazy(x, **budget)).backward()
        return [parameter.grad for parameter in parameters]

    expected, accepted = step(), list[int]()
    with pytest.raises(koila.BudgetError) as refused:
        step(budget=100_000)
    needed = refused.value.needed_bytes
    assert needed is not None
    for budget in (needed, *(size for size in range(300_000, 3_600_000, 300_000) if size > needed)):
        with koila.measure() as seen:
            for _ in range(3):
                torch.testing.assert_close(step(budget=budget), expected, rtol=1e-9, atol=1e-12)
        accepted.append(budget)
        for report in seen.reports:
            assert report.measured_bytes is not None
            assert report.projected_bytes is None or report.measured_bytes <= report.projected_bytes <= budget
    assert len(accepted) > 8  # A larger budget is never refused.


# What is asked for at one time and run at another.


@pytest.mark.semantics("S12")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("when", ["before", "after", "removed"])
def test_a_hook_on_a_leaf_sees_the_gradients_asked_for_while_it_is_there(when: str, size: int | None) -> None:
    torch.manual_seed(0)
    x, w = randn(6, 3), randn(3, 4)

    def run(lazy: Lazy) -> tuple[Any, ...]:
        seen, p = list[Tensor](), w.clone().requires_grad_()

        def hook(gradient: Tensor) -> Tensor:
            seen.append(gradient.detach().clone())
            return gradient * 2

        handle = p.register_hook(hook) if when != "after" else None
        h = lazy(x) @ p
        (g,) = torch.autograd.grad(h.square().sum(), p, create_graph=True)
        if handle is None:
            p.register_hook(hook)
        elif when == "removed":
            handle.remove()
        loss = (h * g.mean()).sum()
        loss.backward()
        return float(loss.detach()), p.grad, seen

    with scope(size):
        found = run(koila.lazy)
    torch.testing.assert_close(found, run(of_eager), rtol=1e-12, atol=0)


class _Swap(TorchDispatchMode):
    """Another function instead of tanh; counts its calls."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        func = torch.ops.aten.sigmoid.default if func is torch.ops.aten.tanh.default else func
        return func(*args, **(kwargs or {}))


@pytest.mark.semantics("S15")
@pytest.mark.parametrize("size", SIZES)
def test_a_dispatch_mode_sees_the_calls_that_are_made_inside_of_it(size: int | None) -> None:
    """In chunks it sees their operators, which may be others (`tanh_`), but none that was recorded before."""
    torch.manual_seed(0)
    x, w = randn(6, 3), randn(3, 3).requires_grad_()

    def run(lazy: Lazy) -> list[Any]:
        w.grad = None
        outside = (lazy(x) @ w).tanh().sum()
        with _Swap() as mode:
            inside = (lazy(x) @ w).tanh().sum()
            first = outside.item()
        calls = mode.calls
        (outside + inside).backward()
        assert mode.calls == calls > 0
        return [first, *([] if size else [float(inside.detach()), w.grad])]

    with scope(size):
        found = run(koila.lazy)
    torch.testing.assert_close(found, run(of_eager), rtol=1e-12, atol=0)


@pytest.mark.semantics("S3")
def test_a_write_to_elements_that_share_memory_is_refused_at_its_call() -> None:
    z = koila.lazy(torch.ones(7, 3)) * torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        z.mean(0).expand(7, 3).add_(z)


class _Assign(torch.autograd.Function):
    """Writes to a part of a buffer without a version, as solvers of differential equations do."""

    @staticmethod
    def forward(ctx: Any, buffer: Tensor, value: Tensor, index: Any) -> Tensor:
        ctx.index = index
        buffer.data[index] = value
        return buffer

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, gradient[ctx.index], None


@pytest.mark.semantics("S18")
@pytest.mark.parametrize("size", SIZES)
def test_a_part_of_a_leaf_that_nobody_reads_may_be_written(size: int | None) -> None:
    torch.manual_seed(0)
    net, y = nn.Linear(2, 2).double(), randn(7, 2)

    def run(lazy: Lazy) -> list[Any]:
        net.zero_grad()
        start = lazy(y)
        k = _Assign.apply(torch.empty(7, 2, 3).double(), net(start), (..., 0))
        for i in range(2):
            start = lazy(y) + (k[..., : i + 1].square() * 0.3).sum(-1)
            k = _Assign.apply(k, net(start), (..., i + 1))
        start.square().mean().backward()
        return [p.grad.clone() for p in net.parameters()]  # type: ignore[union-attr]

    with scope(size):
        torch.testing.assert_close(run(koila.lazy), run(of_eager), rtol=1e-12, atol=0)


@pytest.mark.semantics("S3")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("first", ["view", "product"])
def test_a_released_value_is_made_again_with_the_writes_to_its_memory(first: str, size: int | None) -> None:
    """A view of it is bound by a run in between, and the writes with it."""
    torch.manual_seed(0)
    x = randn(5, 2, 1).requires_grad_()

    def recorded(lazy: Lazy) -> dict[str, Any]:
        scale = torch.full((2,), 3.0).double()
        base = lazy(x) * 1.5
        view = base.select(-1, 0)
        base.mul_(3)
        pooled = F.adaptive_avg_pool1d(base, 2)
        total = pooled + scale
        scale.mul_(0.9)  # What is pending on it runs; the base is released.
        return {"view": view, "product": pooled * scale, "total": total}

    expected = recorded(of_eager)
    with scope(size):
        found = recorded(koila.lazy)
        for name in (first, *expected):
            torch.testing.assert_close(found[name].run(), expected[name], rtol=1e-12, atol=0)


@pytest.mark.semantics("S3")
@pytest.mark.parametrize("size", SIZES)
def test_what_is_computed_again_in_a_step_starts_from_written_memory(size: int | None) -> None:
    """A gradient that was asked for runs first: it binds a view, and the loss starts from the memory of that view."""
    torch.manual_seed(0)
    x, weight = randn(8, 4, 4), randn(4)

    def run(lazy: Lazy) -> tuple[Any, ...]:
        scale, bias = weight.clone().requires_grad_(), weight.clone().requires_grad_()

        def recorded() -> tuple[Any, Any]:
            base = lazy(x) * 1.5
            flat = base.view(-1)
            flat.mul_(3)
            normal = F.layer_norm(base, [4], scale, bias)
            (gradient,) = torch.autograd.grad(normal.square().sum(), scale, create_graph=True)
            return flat * gradient.mean(), normal.exp().sum()

        product, loss = recorded()
        loss.backward()
        return loss.item(), scale.grad, bias.grad, product.tolist()

    with scope(size):
        found = run(koila.lazy)
    torch.testing.assert_close(found, run(of_eager), rtol=1e-11, atol=1e-11)


@pytest.mark.semantics("S12")
@pytest.mark.parametrize("size", SIZES)
def test_a_gradient_that_nobody_uses_calls_its_hooks(size: int | None) -> None:
    torch.manual_seed(0)
    x, weight = randn(5, 3), randn(3, 3)

    def run(lazy: Lazy) -> tuple[Any, ...]:
        w, seen = weight.clone().requires_grad_(), list[Tensor]()
        hidden = lazy(x) @ w
        hidden.retain_grad()
        hidden.register_hook(lambda gradient: seen.append(gradient.clone()))
        torch.autograd.grad(hidden.square().sum(), w)
        return hidden.grad, seen

    with scope(size):
        found = run(koila.lazy)
    torch.testing.assert_close(found, run(of_eager), rtol=1e-12, atol=0)


@pytest.mark.semantics("S2")
@pytest.mark.parametrize("size", SIZES)
def test_a_view_is_written_after_its_base(size: int | None) -> None:
    """PyTorch takes the view for a leaf until somebody asks; a call whose result nobody holds did."""

    def run(lazy: Lazy) -> tuple[Any, ...]:
        first, second = torch.tensor(2.0).double().requires_grad_(), torch.tensor([1.0, 3.0]).double().requires_grad_()
        base = lazy(torch.ones(4, 2).double()) * 2
        view = base.unsqueeze(0)
        base.copy_(first)
        view.sin()
        view.copy_(second)
        base.square().sum().backward()
        return first.grad, second.grad

    with scope(size):
        found = run(koila.lazy)
    torch.testing.assert_close(found, run(of_eager), rtol=1e-12, atol=0)


@pytest.mark.parametrize("size", range(1, 8))
@pytest.mark.parametrize("spread", [torch.std, torch.var, lambda x, dim: torch.std_mean(x, dim)[0]])
def test_equal_samples_have_no_spread_at_all(spread: Callable[..., Any], size: int) -> None:
    """A deviation of 1e-17 instead of 0 would have a gradient."""
    x = torch.full((7, 3), 0.4).double()

    def run(lazy: Lazy) -> tuple[Any, ...]:
        w = torch.tensor([0.1, 0.7, 1.3]).double().requires_grad_()
        found = spread(lazy(x) * w, 0)
        found.sum().backward()
        return found.tolist(), w.grad

    with koila.budget(chunk_size=size):
        found = run(koila.lazy)
    torch.testing.assert_close(found, run(of_eager), rtol=0, atol=1e-16)


@pytest.mark.semantics("S4")
def test_budgets_hold_where_sparse_products_run_eagerly() -> None:
    """Their backward passes transpose and sort the sparse matrix."""
    torch.manual_seed(0)
    dense = (torch.rand(90, 90) < 0.1).double()
    graph, x = dense.to_sparse(), randn(90, 20)
    first, second = randn(20, 8).requires_grad_(), randn(8, 4).requires_grad_()

    def step(lazy: Lazy) -> list[Any]:
        first.grad = second.grad = None
        hidden = torch.spmm(graph, lazy(x) @ first).relu()
        torch.log_softmax(torch.spmm(graph, hidden @ second), 1)[:, 0].mean().backward()
        return [first.grad, second.grad]

    expected = step(of_eager)
    for budget in range(20_000, 140_000, 10_000):
        try:
            with koila.measure() as seen:
                found = step(lambda x, budget=budget: koila.lazy(x, budget=budget))
        except koila.BudgetError:
            assert budget < 100_000
            continue
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
        for report in seen.reports:
            assert report.measured_bytes is not None and report.projected_bytes is not None
            assert report.measured_bytes <= report.projected_bytes <= budget


@pytest.mark.semantics("S17")
@pytest.mark.parametrize("way", [{}, {"chunk_size": 7}, {"chunk_size": 30}, {"budget": 70_000}])
@pytest.mark.parametrize("read", ["value", "other", "write", "accuracy"])
def test_statistics_are_updated_once_where_something_is_read_in_the_middle(read: str, way: dict[str, Any]) -> None:
    """What is behind the value runs again for the rest of the network; its statistics do not move again."""
    torch.manual_seed(0)
    x, noise = randn(64, 4), randn(64)

    def train(lazy: Lazy) -> list[Tensor]:
        torch.manual_seed(1)
        layers = (nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
        net, average = nn.Sequential(*layers).double(), torch.zeros(64).double()
        for _ in range(4):
            hidden, weights = net[:2](lazy(x)), lazy(noise)
            if read == "value":
                assert hidden.sum().item() < 1e6
            elif read == "other":
                weights.sum().item()
            elif read == "write":
                with torch.no_grad():
                    average.lerp_(weights.detach(), 0.1)
            out = net[2:](hidden.relu())
            if read == "accuracy":
                (out.argmax(1) == 1).sum().item()
            net.zero_grad()
            out.square().sum().backward()
        return [*net.buffers(), *(parameter.grad for parameter in net.parameters() if parameter.grad is not None)]

    lazy = lambda x: koila.lazy(x, budget=way.get("budget"))  # noqa: E731
    with scope(way.get("chunk_size")):
        found = train(lazy)
        koila.settle()
    torch.testing.assert_close(found, train(of_eager), rtol=1e-9, atol=1e-11)


@pytest.mark.semantics("S3")
@pytest.mark.parametrize("size", SIZES)
def test_a_view_of_what_a_kernel_lays_out_in_another_way(size: int | None) -> None:
    """Eager pools along one dimension with a kernel of its own; a trace, with that for two, in another layout."""
    x = randn(8, 3, 2)

    def run(lazy: Lazy) -> Any:
        return F.max_pool1d(lazy(x).permute(0, 2, 1), 2, stride=1).view(-1).tolist()

    with scope(size):
        assert run(koila.lazy) == run(of_eager)


@pytest.mark.semantics("S13")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.filterwarnings("ignore::koila.KoilaWarning")
def test_a_selective_checkpoint_keeps_real_results(size: int | None) -> None:
    """Its modes see what is computed, and not how koila infers shapes."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).double(), randn(6, 8)
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default, torch.ops.aten.addmm.default])

    def run(lazy: Lazy) -> list[Any]:
        net.zero_grad()
        checkpoint(net, lazy(x) * 2, use_reentrant=False, context_fn=contexts).square().sum().backward()
        return [parameter.grad for parameter in net.parameters()]

    with scope(size):
        found = run(koila.lazy)
    assert all(type(gradient) is Tensor for gradient in found)
    torch.testing.assert_close(found, run(of_eager), rtol=1e-12, atol=0)


def test_a_counter_of_operators_counts_a_step_once() -> None:
    net, x = nn.Linear(8, 4), torch.randn(6, 8)

    def count(lazy: Lazy) -> int:
        with FlopCounterMode(display=False) as counter:
            net(lazy(x)).square().sum().backward()
        return counter.get_total_flops()

    assert count(koila.lazy) == count(of_eager) > 0


@pytest.mark.semantics("S3")
@pytest.mark.parametrize("size", SIZES)
def test_a_view_is_a_view_in_chunks_too(size: int | None) -> None:
    """BatchNorm's result is contiguous, so that flatten gives a view of it; a trace would see a copy."""
    x = randn(2, 6).T

    def run(lazy: Lazy) -> Any:
        normal = F.batch_norm(lazy(x), None, None, training=True)
        normal.flatten().tanh_()
        return normal.tolist()

    with scope(size):
        found = run(koila.lazy)
    torch.testing.assert_close(found, run(of_eager), rtol=1e-12, atol=1e-12)


@pytest.mark.semantics("S14")
@pytest.mark.parametrize("was_frozen", [True, False])
def test_a_parameter_that_is_frozen_after_its_use(was_frozen: bool) -> None:
    """The call was made before: in eager its history is there already, and only the accumulation asks the flag."""
    x, start = randn(5, 3), randn(2, 3)

    def run(lazy: Lazy) -> list[Any]:
        weight, bias = start.clone().requires_grad_(not was_frozen), torch.ones(2, dtype=x.dtype, requires_grad=True)
        result = F.linear(lazy(x), weight, bias)
        weight.requires_grad_(was_frozen)
        result.square().sum().backward()
        return [weight.grad, bias.grad]

    assert [None if g is None else g.tolist() for g in run(koila.lazy)] == [
        None if g is None else g.tolist() for g in run(of_eager)
    ]


@pytest.mark.semantics("S5")
def test_a_real_tensor_that_is_detached_in_place_after_its_use() -> None:
    x, weight = randn(5, 3), randn(3).requires_grad_()

    def run(lazy: Lazy) -> Any:
        scaled = weight * 2
        result = (lazy(x) * scaled).sum()
        scaled.detach_()
        return torch.autograd.grad(result, weight)[0].tolist()

    assert run(koila.lazy) == run(of_eager)


@pytest.mark.semantics("S14")
def test_a_budget_does_not_refuse_to_freeze_a_parameter() -> None:
    weight = randn(3, 3).requires_grad_()
    result = (koila.lazy(randn(5, 3), budget=1) @ weight).sum()
    weight.requires_grad_(False)
    assert not weight.requires_grad
    with pytest.raises(koila.KoilaError):
        result.item()
