"""What eager refuses is refused in chunks and in byte budgets, too; what it allows is allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import koila
from tests.semantics.modes import MODES, Scope, assert_same, plain

pytestmark = pytest.mark.semantics("S10")

Start = Callable[[], tuple[torch.Tensor, torch.Tensor]]


def _starting(lazy: Any, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    w = torch.randn(4, requires_grad=True, dtype=dtype)
    return w, lazy(torch.randn(7, 4, dtype=dtype))


def a_result_that_was_saved(w: torch.Tensor, x: torch.Tensor) -> None:
    y = (x * w).exp()
    y.add_(1)
    y.sum().backward()


def an_operand_that_was_saved(w: torch.Tensor, x: torch.Tensor) -> None:
    h = x * w
    k = h * h
    h.mul_(2)
    k.sum().backward()


def an_operand_that_nobody_holds(w: torch.Tensor, x: torch.Tensor) -> None:
    h = x * w
    k = h * h
    h.mul_(2)
    del h
    k.sum().backward()


def a_part_of_a_result(w: torch.Tensor, x: torch.Tensor) -> None:
    k = (x * w).tanh()
    k[:, 0] = 0
    k.sum().backward()


def a_value_that_was_read(w: torch.Tensor, x: torch.Tensor) -> None:
    y = (x * w).exp()
    y.sum().item()
    y.add_(1)
    y.sum().backward()


def a_value_behind_a_loss_that_was_read(w: torch.Tensor, x: torch.Tensor) -> None:
    h = x * w
    loss = h.exp().mul(h).sum()
    loss.item()
    h.mul_(2)
    loss.backward()


def a_value_that_was_run(w: torch.Tensor, x: torch.Tensor) -> None:
    y = (x * w).exp()
    if isinstance(y, koila.LazyTensor):
        koila.run(y)
    y.add_(1)
    y.sum().backward()


IN_PLACE = [
    a_result_that_was_saved, an_operand_that_was_saved, an_operand_that_nobody_holds, a_part_of_a_result,
    a_value_that_was_read, a_value_behind_a_loss_that_was_read, a_value_that_was_run,
]  # fmt: skip


@MODES
@pytest.mark.parametrize("program", IN_PLACE, ids=lambda program: program.__name__)
def test_a_saved_value_modified_in_place(program: Callable[..., None], scope: Scope) -> None:
    text = "modified by an inplace operation"
    with pytest.raises(RuntimeError, match=text):
        program(*_starting(plain))
    w, x = _starting(koila.lazy)
    with scope(), pytest.raises(RuntimeError, match=text):
        program(w, x)
    assert w.grad is None


def twice(w: torch.Tensor, x: torch.Tensor) -> None:
    loss = (x * w).exp().sum()
    loss.backward()
    loss.backward()


def twice_after_a_read(w: torch.Tensor, x: torch.Tensor) -> None:
    loss = (x * w).exp().sum()
    loss.item()
    loss.backward()
    loss.backward()


def two_losses(w: torch.Tensor, x: torch.Tensor) -> None:
    h = (x * w).exp()
    first, second = h.sum(), (h * h).sum()
    first.backward()
    second.backward()


def two_losses_one_after_the_other(w: torch.Tensor, x: torch.Tensor) -> None:
    h = (x * w).exp()
    h.sum().backward()
    (h * h).sum().backward()


def two_losses_that_were_read(w: torch.Tensor, x: torch.Tensor) -> None:
    h = (x * w).exp()
    first, second = h.sum(), (h * h).sum()
    assert first.item() > 0 < second.item()
    first.backward()
    second.backward()


def a_carried_state(w: torch.Tensor, x: torch.Tensor) -> None:
    state = torch.zeros_like(x)
    for _ in range(2):
        state = (state + x * w).tanh()
        state.sum().backward()


def grad_then_backward(w: torch.Tensor, x: torch.Tensor) -> None:
    loss = (x * w).exp().sum()
    (gradient,) = torch.autograd.grad(loss, w)
    assert gradient.sum().item() != 0
    loss.backward()


TWICE = [
    twice, twice_after_a_read, two_losses, two_losses_one_after_the_other, two_losses_that_were_read, a_carried_state,
    grad_then_backward,
]  # fmt: skip


@MODES
@pytest.mark.parametrize("program", TWICE, ids=lambda program: program.__name__)
def test_a_second_backward_without_retain_graph(program: Callable[..., None], scope: Scope) -> None:
    text = "backward through the graph a second time"
    w, x = _starting(plain)
    with pytest.raises(RuntimeError, match=text):
        program(w, x)
    wanted = w.grad
    w, x = _starting(koila.lazy)
    with scope(), pytest.raises(RuntimeError, match=text):
        program(w, x)
    assert (wanted is None) == (w.grad is None)
    if wanted is not None:
        assert_same(w.grad, wanted)  # The first one counts.


def nothing_saved(w: torch.Tensor, x: torch.Tensor) -> None:
    h = x + w
    first, second = h.sum(), (h * 2).sum()
    first.backward()
    second.backward()


def retained(w: torch.Tensor, x: torch.Tensor) -> None:
    h = (x * w).exp()
    first, second = h.sum(), (h * h).sum()
    first.backward(retain_graph=True)
    second.backward()


def detached(w: torch.Tensor, x: torch.Tensor) -> None:
    h = (x * w).exp()
    first, second = (h.detach() * w).sum(), h.sum()
    first.backward()
    second.backward()


def for_some_inputs(w: torch.Tensor, x: torch.Tensor) -> None:
    other = torch.ones(4, dtype=torch.float64, requires_grad=True)
    h = (x * other).exp()
    loss = (h.detach() * w).exp().sum()
    loss.backward(inputs=[w])
    h.sum().backward(inputs=[other])


def parts_of_one_loss(w: torch.Tensor, x: torch.Tensor) -> None:
    h = (x * w).exp()
    first, second = h.sum(), (h * h).sum()
    assert first.item() > 0 < second.item()
    (first + second).backward()


def a_write_to_what_is_not_saved(w: torch.Tensor, x: torch.Tensor) -> None:
    h = x * w
    k = h + 1
    h.mul_(2)
    k.sum().backward()


def a_write_after_the_backward(w: torch.Tensor, x: torch.Tensor) -> None:
    h = (x * w).exp()
    h.sum().backward()
    h.detach().zero_()


@MODES
@pytest.mark.parametrize(
    "program",
    [nothing_saved, retained, detached, for_some_inputs, parts_of_one_loss, a_write_to_what_is_not_saved,
     a_write_after_the_backward],
    ids=lambda program: program.__name__,
)  # fmt: skip
def test_what_eager_allows(program: Callable[..., None], scope: Scope) -> None:
    wanted, x = _starting(plain)
    program(wanted, x)
    w, x = _starting(koila.lazy)
    with scope():
        program(w, x)
    assert_same(w.grad, wanted.grad)


DOUBLE, FLOAT = torch.float64, torch.float32
MIXTURES: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "binary_cross_entropy": lambda h, lazy: F.binary_cross_entropy(h.double().sigmoid(), lazy(torch.ones(7, 4))),
    "mse_loss": lambda h, lazy: F.mse_loss(h, lazy(torch.ones(7, 4, dtype=DOUBLE))),
    "huber_loss": lambda h, lazy: F.huber_loss(h, lazy(torch.ones(7, 4, dtype=DOUBLE))),
    "smooth_l1_loss": lambda h, lazy: F.smooth_l1_loss(h, lazy(torch.ones(7, 4, dtype=DOUBLE))),
    "cross_entropy, weight": lambda h, lazy: F.cross_entropy(
        h, lazy(torch.zeros(7, dtype=torch.int64)), torch.ones(4, dtype=DOUBLE)
    ),
    "cross_entropy, target": lambda h, lazy: F.cross_entropy(h, lazy(torch.zeros(7, dtype=torch.int32))),
    "batch_norm": lambda h, lazy: F.batch_norm(h.double(), torch.zeros(4), torch.ones(4), training=True).sum(),
    "linear": lambda h, lazy: F.linear(h, torch.ones(3, 4, dtype=DOUBLE)).sum(),
    "matmul": lambda h, lazy: (h.T @ h.double()).sum(),
    "index_add": lambda h, lazy: h.index_add(0, torch.arange(7), torch.zeros(7, 4, dtype=DOUBLE)).sum(),
    "add": lambda h, lazy: (h + torch.ones(4, dtype=DOUBLE)).sum(),
    "where": lambda h, lazy: torch.where(h > 0, h, torch.ones((), dtype=DOUBLE)).sum(),
    "cat": lambda h, lazy: torch.cat([h, torch.ones(7, 4, dtype=DOUBLE)], 1).sum(),
    "kl_div": lambda h, lazy: F.kl_div(h.log_softmax(1), lazy(torch.ones(7, 4, dtype=DOUBLE)), reduction="sum"),
}


@MODES
@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_of_dtypes(name: str, scope: Scope) -> None:
    """Eager's own error where eager refuses a mixture, eager's gradient where it takes it."""

    def run(lazy: Any) -> torch.Tensor | str:
        w, x = _starting(lazy, FLOAT)
        try:
            MIXTURES[name](x * w, lazy).backward()
        except RuntimeError as error:
            assert w.grad is None
            return str(error).splitlines()[0]
        assert w.grad is not None
        return w.grad

    with scope():
        found = run(koila.lazy)
    assert_same(found, run(plain))


@MODES
def test_a_seed_of_another_shape(scope: Scope) -> None:
    w, x = _starting(koila.lazy)
    with scope(), pytest.raises(RuntimeError, match="Mismatch in shape"):
        (x * w).backward(torch.ones(7, 3, dtype=DOUBLE))
    assert w.grad is None
