"""One decision, made before anything runs: what a plan says is what a run does, and what was accepted stays accepted.

Each test was a program that failed: a budget was lost on the way, refused at the second step, or counted otherwise
by the plan and by the run.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import koila
from koila import events
from koila.ir.cache import clear_all


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nothing is learned from other tests."""
    clear_all()
    torch.manual_seed(0)
    yield


# Budgets travel.


def test_a_program_that_starts_from_a_result_keeps_the_budget() -> None:
    w = torch.randn(64, 64, requires_grad=True)
    hidden = (koila.lazy(torch.randn(256, 64), budget="400KiB") @ w).relu()
    hidden.run()
    assert koila.last_report().allowed_bytes == 400 * 1024
    ((hidden @ w).relu() @ w).relu().sum().item()
    assert koila.last_report().allowed_bytes == 400 * 1024


def test_another_value_that_is_read_first_does_not_run_it_without_its_budget() -> None:
    w, norm = torch.randn(64, 64, requires_grad=True), nn.BatchNorm1d(64)
    hidden = (koila.lazy(torch.randn(1024, 64), budget="900KiB") @ w).relu()
    loss = (norm(hidden) @ w).square().mean()
    with koila.measure() as seen:
        assert (koila.lazy(torch.ones(3)) + 1).sum().item() == 6
        assert loss._value.real is None
        loss.backward()
        assert norm.num_batches_tracked == 1
    budgets = [report.allowed_bytes for report in seen.reports if report.num_samples == 1024]
    assert budgets and set(budgets) == {900 * 1024}
    assert all(report.measured_bytes <= 900 * 1024 for report in seen.reports)


def test_a_mask_that_is_looked_at_runs_alone_inside_a_budget() -> None:
    """What runs with it would leave a graph of eager's behind: a larger budget was refused, a smaller one accepted."""
    table, head = nn.Embedding(50, 64), nn.Linear(64, 50)
    words = torch.randint(0, 50, (64, 16))

    def step(words: torch.Tensor) -> torch.Tensor:
        hidden = table(words)
        if bool((words >= 0).all()):
            hidden = head(hidden)
        return F.cross_entropy(hidden.flatten(0, 1), words.flatten())

    def gradients(budget: int | None) -> list[torch.Tensor]:
        table.zero_grad()
        head.zero_grad()
        step(words if budget is None else koila.lazy(words, budget=budget)).backward()
        return [p.grad for p in (*table.parameters(), *head.parameters()) if p.grad is not None]

    expected, budget = gradients(None), 1
    for _ in range(3):  # The mask is refused first, then the loss.
        try:
            found = gradients(budget)
            break
        except koila.BudgetError as refused:
            assert refused.needed_bytes > budget
            budget = refused.needed_bytes
    assert all(map(torch.allclose, found, expected))
    koila.metrics.reset()
    lazy = koila.lazy(words, budget="64MiB")
    hidden = table(lazy)
    assert bool((lazy >= 0).all()) and hidden._value.real is None
    assert not koila.metrics.counter_value("executed::embedding")


def test_statistics_that_do_not_fit_are_refused_and_not_left_out() -> None:
    """A program that shares nothing with the loss updates statistics: the budget must be enough for it, too."""

    def step(budget: int, updates: bool = True) -> tuple[torch.Tensor, nn.BatchNorm1d]:
        x, norm = koila.lazy(torch.ones(256, 64), budget=budget), nn.BatchNorm1d(512)
        if updates:
            norm((x @ torch.ones(64, 512)).relu())
        return x.mean(1).square().sum(), norm

    def refused(loss: torch.Tensor) -> int:
        with pytest.raises(koila.BudgetError) as planned:
            koila.plan(loss)
        with pytest.raises(koila.BudgetError) as ran:
            loss.item()
        assert planned.value.needed_bytes == ran.value.needed_bytes
        return planned.value.needed_bytes

    alone, needed = refused(step(1, updates=False)[0]), refused(step(1)[0])
    assert alone < needed
    loss, norm = step(alone)
    assert (
        refused(loss) == needed and vars(norm)["_buffers"]["running_mean"][0] == 0
    )  # Not asked of the module: pending.
    loss, norm = step(needed)
    assert loss.item() == pytest.approx(256)
    assert norm.running_mean[0] == pytest.approx(6.4)


def test_reading_grad_fn_keeps_to_the_budget() -> None:
    w = torch.randn(64, 64, requires_grad=True)
    loss = ((koila.lazy(torch.randn(1024, 64), budget="300KiB") @ w).relu() @ w).relu().pow(2).mean()
    with koila.measure() as seen:
        assert loss.grad_fn is not None
    report = seen.reports[-1]
    assert report.how == "split"
    assert report.measured_bytes <= report.projected_bytes <= report.allowed_bytes == 300 * 1024


def test_a_stream_keeps_to_the_budget() -> None:
    w = torch.randn(64, 1024)
    rows = koila.lazy(torch.randn(512, 64), budget="600KiB") @ w  # 2 MiB in all
    sizes = [len(piece) for piece in koila.stream(rows)]
    assert sum(sizes) == 512 and 1 < max(sizes) < 150


def test_a_stream_sees_what_changes_between_its_chunks() -> None:
    w = torch.ones(4, 4)
    pieces = koila.stream(koila.lazy(torch.ones(4, 4)) @ w, chunk_size=1)
    next(pieces)
    w.add_(1)
    with pytest.raises(koila.StaleInputError, match="was changed after the call was recorded"):
        next(pieces)


# Seeds are inputs.


@pytest.mark.parametrize(("seed", "expected"), [(0.0, 0.0), (float("inf"), float("inf")), (3.0, 24.0)])
def test_a_seed_is_an_input_of_the_program(seed: float, expected: float) -> None:
    w = torch.ones(4, 4, requires_grad=True)
    with koila.budget(chunk_size=2):
        (koila.lazy(torch.ones(8, 4)) @ w).sum().backward(torch.tensor(seed))
    assert w.grad[0, 0].item() == expected


def _scaled_gradient(lazy: bool, first: bool) -> torch.Tensor:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).half()
    w1 = torch.full((16, 16), 0.01).half().requires_grad_()
    w2 = torch.full((16, 1), 1e-3).half().requires_grad_()
    loss = ((koila.lazy(x) if lazy else x) @ w1 @ w2).float().pow(2).mean() * 1e-4
    if first:
        loss.item()
    (loss * 65536.0).backward()
    return w1.grad.float()


@pytest.mark.parametrize("first", [False, True])
def test_a_scaled_loss_in_half_precision(first: bool) -> None:
    expected = _scaled_gradient(lazy=False, first=first)
    with koila.budget(chunk_size=2):
        for _ in range(3):  # The first time without, then with what was learned.
            found = _scaled_gradient(lazy=True, first=first)
            # Half precision has steps of 6e-8 this close to zero.
            torch.testing.assert_close(found, expected, rtol=1e-2, atol=2**-23)
            assert found.abs().max() > 0


def test_the_scale_of_a_loss_is_learned() -> None:
    w = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    x = torch.randn(8, 4, dtype=torch.float64)
    reruns = []
    for _ in range(3):
        koila.metrics.reset()
        with koila.budget(chunk_size=2):
            loss = (koila.lazy(x) @ w).square().mean()
            loss.item()
            (loss * 1024.0).backward()
        reruns.append(koila.metrics.counter_value("segment::rerun"))
    # The gradient of the product arrives as the seed of the value that was read: 1024, from the second time on.
    assert reruns == [1, 0, 0]


# Nobody's code on fakes.


def test_hooks_see_real_gradients_only() -> None:
    seen: list[str] = []
    w = torch.randn(4, 4, requires_grad=True)
    hidden = koila.lazy(torch.randn(8, 4), budget="1GiB") @ w
    hidden.register_hook(lambda gradient: seen.append(type(gradient).__name__))
    hidden.sum().backward()
    assert seen == ["Tensor"]


class ReadsItsData(torch.autograd.Function):
    """Its backward looks at values: no trace can follow."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 2 * (1 if x.abs().max() > 0 else 0)


def test_what_cannot_be_projected_runs_and_says_so() -> None:
    koila.metrics.reset()
    w = torch.randn(4, 4, requires_grad=True)
    ReadsItsData.apply(koila.lazy(torch.randn(8, 4), budget="1GiB") @ w).sum().backward()
    assert w.grad is not None and koila.last_report().how == "whole"
    assert any(name.startswith("projection::bounded::") for name in koila.metrics.counter_names())


# Everything is counted.


def test_eager_history_behind_a_leaf_is_part_of_the_projection() -> None:
    def projected(num_calls: int) -> int:
        parameter = torch.randn(64, 64, requires_grad=True)
        for _ in range(num_calls):
            parameter = (parameter * 1.01).exp().log()
        loss = (koila.lazy(torch.randn(64, 64), budget="64MiB") @ parameter).sum()
        loss.backward()
        return koila.last_report().projected_bytes or 0

    assert projected(100) > projected(1) + 50 * 64 * 64 * 4


def test_gradients_that_are_there_already_are_counted() -> None:
    linear = nn.Linear(1000, 1000)
    for _ in range(3):
        with koila.measure() as seen:
            linear(koila.lazy(torch.randn(8, 1000), budget="200MiB")).pow(2).mean().backward()
        report = seen.reports[-1]
        assert report.measured_bytes <= report.projected_bytes <= 200 * 2**20


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_measuring_counts_what_a_budget_counts(dtype: torch.dtype) -> None:
    """Workspaces inside kernels, too: the float64 convolution unfolds its input."""
    convolutions = (nn.Conv2d(3, 32, 9, padding=4), nn.Conv2d(32, 3, 9, padding=4))
    model, x = nn.Sequential(convolutions[0], nn.ReLU(), convolutions[1]).to(dtype), torch.randn(4, 3, 32, 32).to(dtype)
    with koila.measure() as seen:
        model(koila.lazy(x)).square().mean().backward()
    model.zero_grad()
    with koila.measure() as again:
        model(koila.lazy(x, budget=seen.peak_bytes)).square().mean().backward()
    report = again.reports[-1]
    assert report.measured_bytes <= report.projected_bytes <= report.allowed_bytes == seen.peak_bytes


# Held values obey the budget.


def test_held_logits_are_no_demand() -> None:
    linear = nn.Linear(64, 4096)
    x, y = torch.randn(512, 64), torch.randint(0, 4096, (512,))

    def step(hold: bool) -> tuple[str, int | None]:
        linear.zero_grad()
        lazy_x, lazy_y = koila.lazy(x, y, budget="4MiB")
        out = linear(lazy_x)  # 8 MB
        loss = F.cross_entropy(out, lazy_y)
        if not hold:
            del out
        loss.backward()
        return koila.last_report().how, koila.last_report().projected_bytes

    assert step(hold=False) == step(hold=True)
    assert step(hold=True)[1] <= 4 * 2**20


def test_what_does_not_fit_is_said_and_keep_overrides() -> None:
    linear = nn.Linear(64, 4096)
    x, y = koila.lazy(torch.randn(512, 64), torch.randint(0, 4096, (512,)), budget="4MiB")
    out = linear(x)
    loss = F.cross_entropy(out, y)
    planned = koila.plan(loss, backward=True)
    assert "not kept, although the program still holds it: float32[512, 4096] (8.0 MiB)" in str(planned)
    koila.keep(out)
    with pytest.raises(koila.BudgetError, match=r"kept by koila\.keep: float32\[512, 4096\]"):
        loss.backward()


# Plan is run.


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))


@pytest.mark.parametrize("scope", [{"chunk_size": 4}, {"allowed": "90KiB"}, {"allowed": "1GiB"}, {}])
@pytest.mark.parametrize("held", ["nothing", "logits", "accuracy", "item"])
def test_what_is_planned_is_what_runs(scope: dict[str, Any], held: str) -> None:
    model, x, y = _mlp(), torch.randn(48, 64), torch.randint(0, 32, (48,))
    for _ in range(3):
        model.zero_grad()
        with koila.budget(**scope), koila.measure() as seen:
            lazy_x, lazy_y = koila.lazy(x, y)
            out = model(lazy_x)
            loss = F.cross_entropy(out, lazy_y)
            correct = (out.argmax(1) == lazy_y).sum() if held == "accuracy" else None
            if held in ("nothing", "item"):
                del out
            if held == "item":
                planned = koila.plan(loss)
                loss.item()
            else:
                planned = koila.plan(loss, backward=True)
                loss.backward()
            report = seen.reports[-1]
            assert (report.how, report.chunk_size or 48) == (planned.how, planned.chunk_size)
            if scope and "allowed" in scope:
                assert report.projected_bytes == planned.projected_bytes <= planned.allowed_bytes
                assert report.measured_bytes <= report.projected_bytes
            if held == "item":
                loss.backward()
        del correct


def test_a_refusal_of_the_plan_is_the_refusal_of_the_run() -> None:
    model, x = _mlp(), torch.randn(48, 64)
    loss = model(koila.lazy(x)).square().mean()
    with koila.budget(1000):
        with pytest.raises(koila.BudgetError, match="at the smallest") as planned:
            koila.plan(loss, backward=True)
        with pytest.raises(koila.BudgetError, match="at the smallest") as run:
            loss.backward()
    assert planned.value.needed_bytes == run.value.needed_bytes


@pytest.mark.parametrize("scope", [{"allowed": "1GiB"}, {"chunk_size": 2}])
def test_a_program_with_a_hook_is_planned_as_it_runs(scope: dict[str, Any]) -> None:
    w = torch.randn(4, 4, requires_grad=True)
    hidden = koila.lazy(torch.randn(8, 4)) @ w
    hidden.register_hook(lambda gradient: None)
    with koila.budget(**scope):
        planned = koila.plan(hidden.sum(), backward=True)
        hidden.sum().backward()
    assert planned.how == koila.last_report().how == "whole"


# Accepted stays accepted.


def _convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))


def _classes() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 500))


LOOPS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, ...]], Any, bool]] = {
    "regression": (_convolutions, lambda: (torch.randn(8, 1, 8, 8), torch.randn(8, 1, 8, 8)), F.mse_loss, False),
    "accuracy": (_classes, lambda: (torch.randn(32, 20), torch.randint(0, 500, (32,))), F.cross_entropy, True),
}


def _loop(name: str, budget: int, steps: int = 3) -> None:
    make, data, loss_of, with_accuracy = LOOPS[name]
    torch.manual_seed(0)
    model = make().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        x, y = data()
        x, y = koila.lazy(x.double(), y.double() if y.is_floating_point() else y, budget=budget)
        optimizer.zero_grad()
        out = model(x)
        loss = loss_of(out, y)
        correct = (out.argmax(1) == y).sum() if with_accuracy else None
        with koila.measure() as seen:
            loss.item()
            if correct is not None:
                correct.item()
            loss.backward()
        assert seen.peak_bytes <= budget
        optimizer.step()


@pytest.mark.parametrize("name", list(LOOPS))
def test_the_budget_that_an_error_names_is_enough_for_the_loop(name: str) -> None:
    with pytest.raises(koila.BudgetError, match="at the smallest") as refused:
        _loop(name, 1000)
    clear_all()
    _loop(name, refused.value.needed_bytes)


def test_an_accuracy_that_is_read_before_the_loss_does_not_raise_the_budget() -> None:
    layers = [nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32), nn.GELU(), nn.Linear(32, 8)]
    model, x, y = nn.Sequential(*layers), torch.randn(64, 32), torch.randint(0, 8, (64,))

    def step(accuracy: bool, budget: int) -> None:
        model.zero_grad()
        lazy_x, lazy_y = koila.lazy(x, y, budget=budget)
        out = model(lazy_x)
        if accuracy:
            (out.argmax(1) == lazy_y).sum().item()
        F.cross_entropy(out, lazy_y).backward()

    with pytest.raises(koila.BudgetError, match="at the smallest") as refused:
        step(accuracy=False, budget=1000)
    for _ in range(3):
        step(accuracy=True, budget=refused.value.needed_bytes)


# Whole is eager.


def test_a_budget_that_fits_gives_eagers_bits() -> None:
    x, start = torch.randn(64, 64), torch.randn(64, 64)

    def gradient(batch: torch.Tensor) -> torch.Tensor:
        w = start.clone().requires_grad_()
        h = batch @ w
        parts = torch.tanh(h) * 1.37, torch.sin(h) * 0.71, torch.exp(-h * h) * 2.13, torch.cos(h) * 3.3
        first = parts[2].mean()
        first.item()
        (first + parts[0].mean() + parts[1].mean() + parts[3].mean()).backward()
        return w.grad

    assert torch.equal(gradient(koila.lazy(x, budget="1GiB")), gradient(x))


# Errors.


def test_an_error_elsewhere_is_counted_and_runs_nothing_twice() -> None:
    calls = []

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            calls.append(type(x).__name__)
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 2

    koila.metrics.reset()
    own = Counted.apply(koila.lazy(torch.ones(4)))
    singular = torch.linalg.inv(koila.lazy(torch.zeros(3, 3)))
    assert own.sum().item() == 8.0
    assert calls.count("Tensor") == 1
    assert koila.metrics.counter_value("pending::failed::LinAlgError") == 1
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        singular.run()


def test_an_error_names_the_line_that_was_recorded() -> None:
    singular = torch.linalg.inv(koila.lazy(torch.zeros(3, 3)))
    with pytest.raises(torch.linalg.LinAlgError, match="singular") as raised:
        singular.run()
    assert any("linalg_inv was recorded at" in note and __file__ in note for note in raised.value.__notes__)


# Reports.


def test_item_and_backward_are_one_report() -> None:
    linear = nn.Linear(1000, 1000)
    peaks = []
    for first in (False, True):
        with koila.measure() as seen:
            loss = linear(koila.lazy(torch.randn(8, 1000))).square().mean()
            if first:
                loss.item()
            loss.backward()
        assert len(seen.reports) == 1 and seen.reports[0] == koila.last_report()
        assert koila.last_report().how == "whole" and koila.last_report().num_samples == 8
        peaks.append(seen.peak_bytes)
        linear.zero_grad()
    assert peaks[1] >= 1000 * 1000 * 4


def test_the_last_report_is_not_that_of_an_accuracy() -> None:
    model, x, y = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20))), torch.randn(4, 8), torch.randint(0, 8, (4,))
    out = model(koila.lazy(x))
    F.cross_entropy(out, y).backward()
    step = koila.last_report()
    assert (out.argmax(1) == y).sum().item() >= 0
    assert koila.last_report() == step and koila.reports()[-1] != step


def test_a_report_says_what_the_first_step_cost() -> None:
    w = torch.randn(4, 4, requires_grad=True)
    for number in range(2):
        with koila.budget(chunk_size=2):
            (koila.lazy(torch.randn(8, 4)) @ w).sum().backward()
        report = koila.last_report()
        assert (report.trace_seconds > 0, report.plan_seconds > 0) == (number == 0, number == 0)


def test_a_run_has_a_name_for_listeners() -> None:
    seen: list[events.Event] = []
    unsubscribe = events.subscribe(seen.append)
    with koila.budget(chunk_size=2):
        koila.lazy(torch.randn(4, 4)).sum().item()
    unsubscribe()
    starts = [event for event in seen if isinstance(event, events.RunStart)]
    assert starts[0].program.startswith("Tensor.sum at ") and __file__ in starts[0].program


@pytest.mark.parametrize(
    "write", [lambda h: torch.zeros_like(h.reshape(-1)).add_(1), lambda h: torch.zeros_like(h[None]).add_(1)]
)
def test_a_plan_does_not_depend_on_garbage_that_python_has_not_collected(write: Any) -> None:
    gc.collect()
    gc.disable()
    try:
        values = koila.lazy(torch.randn(8, 4), budget="1MiB")
        hidden = values * 2
        write(hidden)  # A write to a value that nobody holds: its storage and its call hold each other.
        loss = (hidden.tanh() + 1).sum()
        del hidden
        before = koila.plan(loss)
        gc.collect()
        after = koila.plan(loss)
        assert before.projected_bytes == after.projected_bytes
    finally:
        gc.enable()
