"""Values of a step that runs at once answer as they would if it had been recorded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import koila
from koila.capture.at_once import here
from koila.errors import CaptureError

auto = partial(koila.lazy, eager="auto")
lazy = partial(koila.lazy, eager=False)


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 3))


X, Y = torch.randn(64, 6, generator=torch.Generator().manual_seed(1)), torch.arange(64) % 3


def _ask(make: Callable[..., Any], question: Callable[[Any, Any, Any], Any], kind: type) -> Any:
    """What the fourth step of a loop says to a question about its input, its output and its loss."""
    model = _network()
    torch.manual_seed(3)
    for step in range(4):
        x, y = make(X, Y)
        out = model(x)
        loss = F.cross_entropy(out, y)
        if step < 3:
            loss.backward()
    state = torch.get_rng_state()
    # In a lazy step a look at a buffer runs what is pending.
    buffers = [] if kind is koila.LazyTensor else [buffer.clone() for buffer in model.buffers()]
    assert type(loss) is kind
    found = question(x, out, loss)
    assert torch.equal(state, torch.get_rng_state())
    assert all(map(torch.equal, buffers, model.buffers() if buffers else ()))
    loss.backward()
    return found, loss.item(), [parameter.grad for parameter in model.parameters()]


QUESTIONS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "isinstance": lambda x, out, loss: [isinstance(each, koila.LazyTensor) for each in (x, out, loss, out.detach())],
    "graph": lambda x, out, loss: str(koila.graph(loss)),
    "plan": lambda x, out, loss: str(koila.plan(loss)),
    "backward": lambda x, out, loss: str(koila.plan(loss, backward=True, chunk_size=16)),
    "bytes": lambda x, out, loss: koila.plan([out, loss], budget="64KiB").chunk_size,
    "explain": lambda x, out, loss: koila.explain(loss, backward=True, chunk_size=8).num_phases,
    "batch": lambda x, out, loss: (x.batch, out.batch, loss.batch),
    "bytes made": lambda x, out, loss: (out.buffer_memory(), loss.buffer_memory()),
    "prepass": lambda x, out, loss: out.prepass().as_tuple()[:2],
    "html": lambda x, out, loss: out._repr_html_()[:5],
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_questions_have_the_answers_of_a_lazy_step(name: str) -> None:
    found, loss, gradients = _ask(auto, QUESTIONS[name], koila.EagerTensor)
    wanted, lazy_loss, lazy_gradients = _ask(lazy, QUESTIONS[name], koila.LazyTensor)
    assert found == wanted
    assert loss == lazy_loss
    assert all(map(torch.equal, gradients, lazy_gradients))


ACTS: dict[str, Callable[[Any], Any]] = {
    "detach": lambda out: out.run(detach=True),
    "partial": lambda out: out.run((3, 7)).detach(),
    "koila.run": lambda out: koila.run([out], partial=(3, 7), detach=True)[0],
    "to_tensor": lambda out: out.to_tensor(detached=True),
    "stream": lambda out: torch.cat(list(koila.stream(out, chunk_size=7))),
    "number of pieces": lambda out: torch.tensor([len(piece) for piece in koila.stream(out, chunk_size=7)]),
    "data_value": lambda out: torch.tensor(out.data_value().prepass.shape),
}


@pytest.mark.parametrize("name", ACTS)
def test_methods_of_lazy_tensors_work(name: str) -> None:
    def step(make: Callable[..., Any]) -> Any:
        weight = torch.ones(6, 2)
        for step in range(4):
            out = make(X) @ weight
            if step < 3:
                out.sum().item()
        return type(out), ACTS[name](out)

    (eager_type, found), (lazy_type, wanted) = step(auto), step(lazy)
    assert (eager_type, lazy_type) == (koila.EagerTensor, koila.LazyTensor)
    assert type(found) is torch.Tensor and not found.requires_grad
    assert torch.allclose(found, wanted)
    assert found.shape == wanted.shape


def test_a_tensor_that_becomes_another_one_keeps_its_program_lazy() -> None:
    for _ in range(4):
        x = auto(torch.ones(3))
        (x * 2).sum().item()
        x.set_tensor(torch.zeros(3))
        assert type(x) is koila.LazyTensor and (x + 1).sum().item() == 3.0


def test_a_tensor_that_runs_at_once_cannot_become_another_one() -> None:
    for step in range(5):
        x = auto(torch.ones(3))
        (x * 2).sum().item()
        if step == 3:
            with pytest.raises(CaptureError, match="set_tensor is not possible"):
                x.set_tensor(torch.zeros(3))
    assert type(x) is koila.LazyTensor


def test_a_budget_in_the_middle_cuts_the_batch_of_what_was_made_before() -> None:
    weight = torch.randn(6, 5)
    for step in range(4):
        hidden = (auto(X) @ weight).relu()
        if step < 3:
            hidden.exp().sum().item()
    assert type(hidden) is koila.EagerTensor
    with koila.budget(chunk_size=16):
        total = hidden.exp().sum()
        assert torch.allclose(total.run(), (X @ weight).relu().exp().sum())
    assert koila.last_report().num_chunks == 4


def test_a_budget_in_the_middle_cuts_every_input() -> None:
    """An input that comes only as the other operand of a recorded call is cut, too."""
    given = torch.randn(64, 5)
    for step in range(4):
        x, y = auto(X, given)
        if step < 3:
            (x.sum() + y.sum()).item()
    assert type(y) is koila.EagerTensor
    with koila.budget(chunk_size=16):
        hidden = x @ torch.ones(6, 5)
        total = (hidden * y).sum()
        assert str(koila.graph(total)).count("batch in dim 0") == 2
        assert torch.allclose(total.run(), ((X @ torch.ones(6, 5)) * given).sum())
    assert koila.last_report().num_chunks == 4


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def test_a_budget_is_obeyed_behind_calls_that_are_not_recorded() -> None:
    for act in (lambda x: x.detach(), lambda x: x.data, Twice.apply):
        here.clear()
        for step in range(4):
            x = auto(X)
            if step < 3:
                (x * 2).sum().item()
        other = act(x)
        assert type(other) is koila.EagerTensor
        with koila.budget(chunk_size=16):
            assert type(other * 2) is koila.LazyTensor


def test_a_program_with_a_function_is_planned_whole_or_not_at_all() -> None:
    """What a pure Function computes is not known: the first question has no answer, and after it steps are lazy."""
    weight = torch.ones(6, requires_grad=True)
    for step in range(6):
        loss = Twice.apply(auto(X) * weight).sum()
        assert (type(loss) is koila.EagerTensor) == (step in (2, 3))
        if step == 3:
            with pytest.raises(koila.KoilaError, match="nothing to plan"):
                koila.plan(loss)
        if step > 3:
            assert len(koila.graph(loss).nodes) == 3
        loss.backward()


@pytest.mark.parametrize("where", ["forward", "backward", "autograd.backward"])
def test_out_of_memory_restores_buffers_and_generators(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is made once more has the numbers of one that did not fail."""

    class Fails(torch.autograd.Function):
        now = False

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            if Fails.now and where == "forward":
                raise torch.OutOfMemoryError("out of memory")
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            if Fails.now and where != "forward":
                raise torch.OutOfMemoryError("out of memory")
            return gradient

    koila.pure(Fails)

    def train(make: Callable[..., Any], fails: bool) -> list[torch.Tensor]:
        model, types = _network(), []
        torch.manual_seed(7)
        for step in (0, 1, 2, 3, 3, 4):
            if not fails and step == 3 and len(types) == 4:
                continue  # It did not fail.
            model.zero_grad()
            Fails.now = fails and step == 3 and len(types) == 3
            try:
                loss = Fails.apply(F.cross_entropy(model(make(X)), Y))
                types.append(type(loss))
                torch.autograd.backward(loss) if where == "autograd.backward" else loss.backward()
            except torch.OutOfMemoryError:
                types += [koila.EagerTensor] * (len(types) == 3)
        if make is auto:
            assert types[3] is koila.EagerTensor
        norm = [model[1].running_mean, model[1].running_var]
        return [*norm, torch.get_rng_state(), *(parameter.grad for parameter in model.parameters())]

    assert all(map(torch.equal, train(auto, True), train(lambda x: x, False)))
