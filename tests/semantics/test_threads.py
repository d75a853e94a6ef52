"""Threads do not disturb each other, and Ctrl-C leaves everything as it was."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import koila
from koila._torch import RunMode
from koila.capture.pending import recorder
from tests.semantics.modes import MODES, Scope, assert_same, plain

pytestmark = pytest.mark.semantics("S20")


def in_threads(work: Callable[[int], None], number: int = 2) -> None:
    """Run `work(0)`, `work(1)`, … at the same time; an error in one of them is an error here."""
    errors: list[BaseException] = []

    def guarded(index: int) -> None:
        try:
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(index,)) for index in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _batch(thread: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * thread + step)
    return torch.randn(7, 4, dtype=torch.float64, generator=generator)


@MODES
def test_statistics_and_gradients_of_two_threads(scope: Scope, many_switches: None) -> None:
    def train(lazy: Any, scope: Scope) -> list[torch.Tensor]:
        nets = [nn.Sequential(nn.BatchNorm1d(4), nn.Tanh()).double() for _ in range(2)]

        def work(thread: int) -> None:
            with scope():
                for step in range(8):
                    (nets[thread](lazy(_batch(thread, step))) ** 3).sum().backward()

        in_threads(work)
        koila.settle()
        return [tensor for net in nets for tensor in (*net.buffers(), *(p.grad for p in net.parameters()))]  # type: ignore[misc]

    assert_same(train(koila.lazy, scope), train(plain, nullcontext))


@MODES
def test_a_value_recorded_in_one_thread_and_differentiated_in_another(scope: Scope) -> None:
    def train(lazy: Any) -> list[Any]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4)).double()
        losses: list[torch.Tensor] = []
        in_threads(lambda thread: losses.append((net(lazy(_batch(0, 0))) ** 3).sum()), 1)
        with scope():
            in_threads(lambda thread: losses[0].backward(), 1)
        return [*net.buffers(), *(parameter.grad for parameter in net.parameters())]

    assert_same(train(koila.lazy), train(plain))


@MODES
def test_statistics_that_a_thread_left_behind(scope: Scope) -> None:
    """A thread that ends without reading its values: its batch statistics are settled by the others."""
    norm = nn.BatchNorm1d(4).double()
    norm(_batch(0, 0))
    assert_same(_after_thread(scope), list(norm.buffers()))


def _after_thread(scope: Scope) -> list[torch.Tensor]:
    norm = nn.BatchNorm1d(4).double()

    def work(thread: int) -> None:
        norm(koila.lazy(_batch(0, 0)))

    with scope():
        in_threads(work, 1)
        koila.settle()
    return list(norm.buffers())


@MODES
def test_an_error_in_one_thread_is_not_the_others(scope: Scope, many_switches: None) -> None:
    weights = [torch.ones(4, dtype=torch.float64, requires_grad=True) for _ in range(2)]

    def work(thread: int) -> None:
        with scope():
            for step in range(6):
                loss = (koila.lazy(_batch(thread, step)) * weights[thread]).exp().sum()
                loss.backward()
                if thread:
                    with pytest.raises(RuntimeError, match="a second time"):
                        loss.backward()

    in_threads(work)
    for thread, weight in enumerate(weights):
        wanted = torch.ones(4, dtype=torch.float64, requires_grad=True)
        for step in range(6):
            (_batch(thread, step) * wanted).exp().sum().backward()
        assert_same(weight.grad, wanted.grad)


# Ctrl-C.


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Tanh(), nn.Linear(6, 3))
    net = nn.Sequential(*layers).double()
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    return net


def _loss(net: nn.Module, lazy: Any) -> torch.Tensor:
    return (net(lazy(_batch(0, 0))) ** 2).sum()


def _state(net: nn.Module) -> list[torch.Tensor]:
    """Everything that a step changes, as it is now: asked of the modules' own tables, which runs nothing."""
    buffers = (buffer for module in net.modules() for buffer in module._buffers.values() if buffer is not None)
    gradients = [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
    return [*(buffer.clone() for buffer in buffers), *gradients, torch.get_rng_state()]


def _is_same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    try:
        assert_same(found, wanted)
    except AssertionError:
        return False
    return True


class Interrupt:
    """Raises KeyboardInterrupt before the line with this number that koila's code runs."""

    def __init__(self, number: int | None = None) -> None:
        self.number, self.lines = number, 0

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        is_own = "/koila/" in frame.f_code.co_filename and not _is_in_callback(frame)
        return self._line if is_own else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self.number:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._line

    @contextmanager
    def watching(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)
            # Here an interrupt comes also at the end of a `with` statement, where no signal does: the lock stays taken.
            recorder.place.log.lock = threading.RLock()


def _is_in_callback(frame: FrameType | None) -> bool:
    """Whether a frame belongs to the callback of a weak reference: Python drops what is raised there."""
    while frame is not None and "/koila/" in frame.f_code.co_filename:
        if frame.f_code.co_name in ("_forget", "_gone"):
            return True
        frame = frame.f_back
    return False


@pytest.mark.asks_laziness("the interrupt comes in the run of what is pending")
@pytest.mark.parametrize(
    "scope",
    [nullcontext, lambda: koila.budget(chunk_size=2), lambda: koila.budget("32KiB")],
    ids=["whole", "chunks", "bytes"],
)
def test_an_interrupt_between_any_two_lines(scope: Scope) -> None:
    """Everything is as before, or everything is done; if it is as before, the same line may be run again."""
    wanted = _net()
    _loss(wanted, plain).backward()
    committed = _state(wanted)
    counting, outcomes = Interrupt(), set[bool]()
    for _ in range(5):  # The fifth time nothing is traced, planned, prepared or looked up for the first time.
        counting = Interrupt()
        with scope():
            loss = _loss(_net(), koila.lazy)
            with counting.watching():
                loss.backward()
    # A run may take a few lines less than the one before it: then it is done.
    for number in range(1, counting.lines, counting.lines // 24):
        net = _net()
        with scope():
            loss = _loss(net, koila.lazy)
            before = _state(net)
            with suppress(KeyboardInterrupt), Interrupt(number).watching():
                loss.backward()
            is_done = not _is_same(_state(net), before)
            if not is_done:
                loss.backward()
        assert_same(_state(net), committed)
        outcomes.add(is_done)
    assert False in outcomes


@pytest.mark.asks_laziness("the interrupt comes in the run of what is pending")
@pytest.mark.parametrize("read", [False, True], ids=["backward", "read first"])
def test_an_interrupt_before_every_line_of_a_prepared_run(read: bool) -> None:
    wanted = _net()
    _loss(wanted, plain).backward()
    committed, counting = _state(wanted), Interrupt()
    before = koila.metrics.counter_value("prepared runs")

    def act(loss: Any) -> None:
        if read:
            loss.item()
        loss.backward()

    for _ in range(6):
        counting = Interrupt()
        loss = _loss(_net(), koila.lazy)
        with counting.watching():
            act(loss)
    assert koila.metrics.counter_value("prepared runs") >= before + 2
    for number in range(1, counting.lines + 1):
        net = _net()
        loss = _loss(net, koila.lazy)
        with suppress(KeyboardInterrupt), Interrupt(number).watching():
            act(loss)
        if all(bool((parameter.grad == 1).all()) for parameter in net.parameters() if parameter.grad is not None):
            loss.backward()  # Nothing was added to the gradients yet.
        assert_same(_state(net), committed)


@pytest.mark.asks_laziness("the interrupt comes in the run of what is pending")
@MODES
def test_a_signal_in_the_middle_of_a_run(scope: Scope) -> None:
    class Signal(RunMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if str(func).startswith("aten.tanh"):
                signal.raise_signal(signal.SIGINT)
            return func(*args, **(kwargs or {}))

    wanted = _net()
    _loss(wanted, plain).backward()
    committed, net = _state(wanted), _net()
    with scope():
        loss = _loss(net, koila.lazy)
        before = _state(net)
        # A job in the background of a shell ignores the signal; a person's program does not.
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt), Signal():
                loss.item()
        finally:
            signal.signal(signal.SIGINT, handler)
        assert_same(_state(net), before)
        loss.backward()
    assert_same(_state(net), committed)
