"""Threads that record and run at once share neither pending effects, nor notes, nor scopes. No time is measured."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import _symbolic_trace

import koila
from koila._scopes import Scopes
from koila._torch import in_turn


def together(*works: Callable[[], Any]) -> None:
    """Run each work in a thread of its own; an error of any of them is raised here."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], Any]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.semantics("S20")
def test_statistics_of_two_modules_in_two_threads(many_switches: None) -> None:
    def statistics(lazy: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        norms = [nn.BatchNorm1d(4).double() for _ in range(2)]

        def work(index: int) -> None:
            for step in range(25):
                generator = torch.Generator().manual_seed(100 * index + step)
                x = lazy(torch.randn(7, 4, dtype=torch.float64, generator=generator))
                (norms[index](x) ** 3).sum().backward()

        together(*[lambda index=index: work(index) for index in range(2)])
        return torch.stack([norm.running_mean for norm in norms])

    assert torch.equal(statistics(koila.lazy), statistics(lambda x: x))


def test_budgets_of_two_threads(many_switches: None) -> None:
    weight = torch.randn(16, 16, dtype=torch.float64)

    def work(chunk_size: int | None) -> None:
        for step in range(20):
            x = torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            with koila.budget(chunk_size=chunk_size):
                found = koila.lazy(x).matmul(weight).sum().item()
            assert found == pytest.approx((x @ weight).sum().item(), rel=1e-10, abs=1e-10)

    together(*[lambda size=size: work(size) for size in (None, 2, None, 2)])


def test_new_programs_in_one_thread_while_another_repeats_its_own(many_switches: None) -> None:
    weight = torch.randn(16, 16, dtype=torch.float64)
    stop = threading.Event()

    def new_programs() -> None:
        try:
            for size in range(12):
                x = torch.randn(8, 3 + size, dtype=torch.float64)
                with koila.budget(chunk_size=2):
                    found = torch.cumsum(koila.lazy(x), 0).sum(1).run()
                torch.testing.assert_close(found, x.cumsum(0).sum(1))
        finally:
            stop.set()

    def the_same() -> None:
        x = torch.randn(8, 16, dtype=torch.float64)
        while not stop.is_set():
            with koila.budget(chunk_size=2):
                assert koila.lazy(x).matmul(weight).sum().item() == pytest.approx((x @ weight).sum().item())

    together(new_programs, the_same)


def test_tracing_in_two_threads_leaves_nothing_behind(many_switches: None) -> None:
    def work(start: int) -> None:
        for size in range(start, start + 10, 2):
            with koila.budget(chunk_size=2):
                koila.lazy(torch.randn(4, size)).exp().sum().item()

    together(lambda: work(20), lambda: work(21))
    assert not _symbolic_trace._is_fx_tracing_flag


@pytest.mark.semantics("S20")
def test_a_run_does_what_its_own_thread_recorded() -> None:
    norm, reference = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    batches = [torch.randn(5, 3) for _ in range(2)]
    for batch in batches:
        reference(batch)
    recorded, ran = threading.Event(), threading.Event()
    states: list[str] = []

    def other() -> None:
        out = norm(koila.lazy(batches[1]))
        recorded.set()
        ran.wait()
        states.append(repr(out))
        out.run()

    def first() -> None:
        out = norm(koila.lazy(batches[0]))
        recorded.wait()
        out.run()
        koila.settle()
        ran.set()

    together(other, first)
    assert "pending" in states[0], "what another thread has pending is not run here"
    assert torch.equal(norm.running_mean, reference.running_mean) and norm.num_batches_tracked == 2


@pytest.mark.semantics("S20")
def test_what_a_thread_left_pending_is_done_by_the_next_that_asks() -> None:
    norm, reference = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    x, kept = torch.randn(5, 3), []
    reference(x)
    together(lambda: kept.append(norm(koila.lazy(x))))
    gc.collect()
    koila.settle()
    assert torch.equal(norm.running_mean, reference.running_mean)
    assert "ready" in repr(kept[0])


@pytest.mark.semantics("S20")
def test_a_value_may_be_recorded_in_one_thread_and_run_in_another() -> None:
    weight = torch.ones(3, requires_grad=True)
    kept: list[Any] = []
    together(lambda: kept.append((koila.lazy(torch.ones(4, 3)) * weight).sum()))
    (kept[0] * 2).backward()
    assert weight.grad is not None and weight.grad.tolist() == [8.0] * 3


def test_scopes_are_those_of_their_thread() -> None:
    scopes = Scopes[int]("sizes")
    seen: list[Any] = []
    with scopes.inside(1):
        together(lambda: seen.append(scopes.all))
        assert scopes.all == (1,)
    assert seen == [()] and scopes.innermost is None


def test_a_budget_decorator_serves_two_threads_at_once() -> None:
    barrier = threading.Barrier(2)

    @koila.budget(chunk_size=2)
    def inside() -> None:
        barrier.wait()
        assert koila.lazy(torch.ones(6, 2)).sum().item() == 12.0
        barrier.wait()

    def work() -> None:
        inside()
        koila.metrics.reset()
        assert koila.lazy(torch.ones(6, 2)).sum().item() == 12.0

    together(work, work)
    koila.metrics.reset()
    assert koila.lazy(torch.ones(6, 2)).sum().item() == 12.0
    assert koila.metrics.counter_value("chunks") == 0


def test_fake_tensors_are_one_threads_at_a_time(many_switches: None) -> None:
    inside, most = list[int](), list[int]()

    @in_turn
    def uses_fakes(depth: int) -> None:
        inside.append(depth)
        most.append(inside.count(depth))
        if depth:
            uses_fakes(depth - 1)  # Its own thread may go on.
        inside.remove(depth)

    def work() -> None:
        for _ in range(50):
            uses_fakes(2)

    together(work, work, work)
    assert len(most) == 450 and max(most) == 1


def test_a_turn_ends_with_its_function() -> None:
    """An interrupt may come anywhere: nobody has to end it. Whoever keeps the traceback keeps it for a while only."""

    @in_turn
    def interrupted() -> None:
        raise KeyboardInterrupt

    @in_turn
    def later() -> None:
        ran.append(True)

    ran = list[bool]()
    with suppress(KeyboardInterrupt):
        interrupted()
    together(later)
    with pytest.raises(KeyboardInterrupt) as caught, pytest.MonkeyPatch.context() as patch:
        patch.setattr("koila._torch.fakes._PATIENCE_SECONDS", 0.01)
        try:
            interrupted()
        except KeyboardInterrupt:
            together(later)
            raise
    assert ran == [True, True] and caught.tb is not None
