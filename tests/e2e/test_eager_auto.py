"""`koila.lazy(..., eager="auto")`: steps that repeat run at once, with eager's numbers, and nobody sees it."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import koila
from koila.capture.at_once import here
from koila.errors import CaptureError

auto = partial(koila.lazy, eager="auto")
Make = Callable[..., Any]


def same(*tensors: Any) -> Any:
    return tensors[0] if len(tensors) == 1 else tensors


def num_at_once() -> int:
    """How many steps ran at once, the one that goes on included."""
    return sum(program.num_followed for programs in here.programs.values() for program in programs)


def went_lazy() -> list[str]:
    return [name for name in koila.metrics.counter_names() if name.startswith("at once::went lazy")]


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(3, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(64, 4)
    )


def train(make: Make, steps: int = 12, sizes: tuple[int, ...] = (6,), log: list[type] | None = None) -> list[Any]:
    """Losses, parameters, buffers, momenta and the generator after some steps."""
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen: list[Any] = []
    for step in range(steps):
        size = sizes[step % len(sizes)]
        x, y = make(torch.randn(size, 3, 8), torch.randint(0, 4, (size,)))
        optimizer.zero_grad()
        out = model(x)
        loss = F.cross_entropy(out, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen += [loss.item(), (out.argmax(1) == y).sum().item()]
        if log is not None:
            log.append(type(loss))
    state = [state["momentum_buffer"] for state in optimizer.state.values()]
    return [*seen, *model.state_dict().values(), *state, torch.get_rng_state()]


def assert_equal(one: list[Any], other: list[Any]) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def known(function: Callable[[Any], Any], *given: torch.Tensor) -> tuple[Any, Any]:
    """Inputs and result of a step that runs at once."""
    for _ in range(3):
        inputs = auto(*given)
        result = function(inputs)
        result.sum().item()
    assert type(result) is koila.EagerTensor
    return inputs, result


# Numbers.


def test_training_has_the_bits_of_eager() -> None:
    classes: list[type] = []
    assert_equal(train(same), train(auto, log=classes))
    assert classes[:2] == [koila.LazyTensor] * 2
    assert classes[2:] == [koila.EagerTensor] * 10
    assert not went_lazy()


def test_each_combination_of_shapes_is_known_for_itself() -> None:
    assert_equal(train(same, 16, (6, 5, 1 + 1)), train(auto, 16, (6, 5, 1 + 1)))
    assert num_at_once() > 6
    assert not went_lazy()


def test_by_default_nothing_runs_at_once() -> None:
    classes: list[type] = []
    train(koila.lazy, log=classes)
    assert set(classes) == {koila.LazyTensor}
    with pytest.raises(CaptureError, match='eager must be "auto" or False, got True'):
        koila.lazy(torch.ones(2), eager=True)


def test_the_environment_may_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KOILA_EAGER", "auto")
    classes: list[type] = []
    train(koila.lazy, log=classes)
    assert classes[-1] is koila.EagerTensor


def recurrent(make: Make) -> list[Any]:
    """An LSTM, whose results are nested, with numbers that change in every step."""
    torch.manual_seed(0)
    body, head = nn.LSTM(3, 5, batch_first=True), nn.Linear(5, 2)
    optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()], lr=0.01)
    for step in range(10):
        x, y = make(torch.randn(4, 6, 3), torch.randn(4, 2))
        out, (hidden, _) = body(x)
        loss = F.mse_loss(head(out[:, -1]), y) + hidden.pow(2).mean() * (0.1 * step) + step
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [loss.item(), *body.parameters(), *head.parameters()]


def test_numbers_that_change_in_every_step() -> None:
    assert_equal(recurrent(same), recurrent(auto))
    assert num_at_once() >= 6
    assert not went_lazy()


def reinforcement(make: Make) -> list[Any]:
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    for _ in range(6):
        chosen, state = [], torch.zeros(4)
        for _ in range(5):
            logs = F.log_softmax(policy(make(state)), dim=-1)
            action = int(logs.exp().argmax().item())
            chosen.append(logs[action])
            state = torch.roll(state, 1) + action
        optimizer.zero_grad()
        (-torch.stack(chosen).sum()).backward()
        optimizer.step()
    return list(policy.parameters())


def test_many_lazy_calls_before_one_backward_pass() -> None:
    assert_equal(reinforcement(same), reinforcement(auto))
    assert num_at_once() >= 20


def scaled(make: Make) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
    for _ in range(8):
        x = make(torch.randn(4, 3))
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).float().pow(2).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return [loss.item(), *model.parameters(), scaler.get_scale()]


def closures(make: Make) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    for _ in range(6):
        x = make(torch.randn(4, 3))

        def closure(x: Any = x) -> Any:
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    return list(model.parameters())


def accumulated(make: Make) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer, total = torch.optim.SGD(model.parameters(), lr=0.1), torch.zeros(())
    for step in range(12):
        loss = model(make(torch.randn(4, 3))).pow(2).mean() / 3
        loss.backward()
        total += loss.detach()
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return [total, *model.parameters()]


@pytest.mark.parametrize("loop", [scaled, closures, accumulated])
def test_loops(loop: Callable[[Make], list[Any]]) -> None:
    assert_equal(loop(same), loop(auto))
    assert num_at_once() >= 3


def frozen_half(make: Make) -> list[Any]:
    """Grad mode, checkpoints, a Function of the user's, second derivatives, evaluation between steps."""
    torch.manual_seed(0)
    body, head = nn.Linear(3, 3), nn.Linear(3, 2)
    seen = []
    for _ in range(8):
        x = make(torch.randn(4, 3))
        with torch.no_grad():
            fixed = body(x).tanh()
        out = checkpoint(head, Square.apply(fixed), use_reentrant=False)
        (slope,) = torch.autograd.grad(out.pow(2).sum(), [head.weight], create_graph=True)
        slope.pow(2).sum().backward()
        seen += [head.weight.grad.clone(), out.detach().sum().item()]
        head.weight.grad = None
    return seen


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def test_what_autograd_offers() -> None:
    assert_equal(frozen_half(same), frozen_half(auto))


def test_hooks_are_called_as_in_eager() -> None:
    def loop(make: Make) -> list[Any]:
        torch.manual_seed(0)
        model, seen = nn.Linear(3, 2), list[Any]()
        model.register_forward_hook(lambda module, args, out: seen.append(out.sum().item()))
        model.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
        for _ in range(5):
            hidden = model(make(torch.randn(4, 3)))
            hidden.register_hook(lambda gradient: seen.append(gradient.clone()))
            hidden.retain_grad()
            hidden.pow(2).sum().backward()
            seen.append(hidden.grad.clone())
        return seen

    assert_equal(loop(same), loop(auto))
    assert num_at_once() >= 3


# Going lazy.


def deviating(make: Make, steps: int = 14) -> list[Any]:
    """Every fifth step takes another way in the middle."""
    torch.manual_seed(0)
    first, second = nn.Linear(3, 4), nn.Linear(4, 2)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    seen = []
    for step in range(steps):
        hidden = first(make(torch.randn(4, 3))).tanh()
        if step % 5 == 4:
            hidden = hidden.sigmoid() * 2
        loss = second(hidden).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return [*seen, *first.parameters(), *second.parameters()]


def test_a_call_that_is_not_known_goes_lazy_and_back() -> None:
    assert_equal(deviating(same), deviating(auto))
    assert went_lazy() == ["at once::went lazy::Tensor.sigmoid"]
    assert num_at_once() >= 3


def test_the_place_of_a_deviation_is_counted() -> None:
    deviating(auto, 5)
    (name,) = went_lazy()
    ((site, times),) = koila.metrics.counter_sites(name).items()
    assert times == 1
    assert site.split(":")[0].endswith("test_eager_auto.py")


def test_the_deviating_call_is_recorded_with_its_history() -> None:
    weight = torch.randn(3, 3, requires_grad=True)
    x = torch.randn(2, 3)
    for step in range(4):
        hidden = auto(x) @ weight
        if step < 3:
            hidden.sum().backward()
    assert type(hidden) is koila.EagerTensor
    weight.grad = None
    lazy = hidden.sigmoid()
    assert type(lazy) is koila.LazyTensor
    assert type(lazy * hidden) is koila.LazyTensor
    (lazy * hidden).sum().backward()
    given = torch.autograd.grad(((x @ weight).sigmoid() * (x @ weight)).sum(), weight)[0]
    torch.testing.assert_close(weight.grad, given, rtol=1e-6, atol=1e-6)


def test_a_budget_that_is_named_later_is_obeyed() -> None:
    x = torch.randn(8, 3)
    weight = torch.randn(3, 3)
    for _ in range(4):
        known_input = auto(x)
        (known_input @ weight).sum().item()
    assert type(known_input) is koila.EagerTensor
    follow = auto(x)
    with koila.budget("1MiB"):
        assert type(follow @ weight) is koila.LazyTensor
        assert type(auto(x)) is koila.LazyTensor
    assert type(koila.lazy(x, eager="auto", budget="1MiB")) is koila.LazyTensor


def test_measuring_sees_every_step() -> None:
    with koila.measure() as seen:
        for _ in range(4):
            (auto(torch.ones(4, 256)) * 2).sum().item()
    assert len(seen.reports) == 4


def test_a_program_that_is_not_small_stays_lazy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("koila._api.LARGE_BYTES", 10)
    monkeypatch.setattr("koila._api.default_bytes", lambda reserved: 100)
    for _ in range(4):
        result = auto(torch.ones(4, 256)) * 2
        result.sum().item()
    assert type(result) is koila.LazyTensor


def test_inputs_that_require_grad_stay_lazy_and_the_users_own() -> None:
    x = torch.ones(3, requires_grad=True)
    for _ in range(4):
        (auto(x) * 2).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [8.0] * 3
    y = torch.ones(3)
    for _ in range(4):
        given = auto(y).requires_grad_()
        (given * 2).sum().backward()
    assert type(given) is koila.LazyTensor


# Classes.


def test_tensors_of_the_user_keep_their_class() -> None:
    model, x, out = nn.BatchNorm1d(3), torch.randn(4, 3), torch.empty(4, 3)
    total, kept = torch.zeros(4, 3), list[Any]()

    def step(given: Any) -> Any:
        total.add_(given)
        torch.add(given, 1, out=out)
        (view,) = torch.broadcast_tensors(given)
        kept.append(view)
        return model(given)

    known(step, x)
    assert {type(each) for each in (x, out, total)} == {torch.Tensor}
    assert {type(each) for each in model.parameters()} == {nn.Parameter}
    assert {type(each) for each in model.buffers()} == {torch.Tensor}
    assert type(nn.Parameter(kept[-1])) is nn.Parameter


def test_results_leave_as_plain_tensors() -> None:
    weight = torch.randn(3, 3, requires_grad=True)
    inputs, result = known(lambda x: x @ weight, torch.randn(2, 3))
    file = io.BytesIO()
    torch.save({"inputs": inputs, "result": result}, file)
    file.seek(0)
    loaded = torch.load(file)
    for copied in (loaded["inputs"], pickle.loads(pickle.dumps(inputs)), copy.deepcopy(inputs), copy.copy(inputs)):
        assert type(copied) is torch.Tensor
        assert torch.equal(copied, inputs.run())
    assert type(loaded["result"]) is torch.Tensor
    assert type(result) is koila.EagerTensor
    assert (inputs.numpy() == inputs.run().numpy()).all()
    assert repr(result) == str(result) == str(result.run()).replace("AliasBackward0", "MmBackward0")
    with pytest.raises(RuntimeError, match="Only Tensors created explicitly by the user"):
        copy.deepcopy(result)


def test_what_eager_tensors_answer() -> None:
    weight = torch.randn(3, 3, requires_grad=True)
    _, result = known(lambda x: x @ weight, torch.randn(2, 3))
    assert (result.shape, result.ndim, result.dtype, len(result)) == ((2, 3), 2, torch.float32, 2)
    assert result.requires_grad and not result.is_leaf and result.grad_fn.name() == "MmBackward0"
    assert not result.detach().requires_grad and not result.data.requires_grad
    assert type(result.run()) is torch.Tensor and koila.run(result).equal(result.run())
    assert isinstance(result, koila.EagerTensor) and isinstance(result, koila.LazyTensor)
    assert torch.func.vmap(lambda row: row * 2)(result.detach()).equal(result.run() * 2)


def test_fused_modules_take_their_fast_path() -> None:
    torch.manual_seed(0)
    layer, x = nn.TransformerEncoderLayer(8, 2, batch_first=True).eval(), torch.randn(2, 5, 8)
    with torch.no_grad():
        _, result = known(layer, x)
        assert torch.equal(result.run(), layer(x))


def test_sparse_results_keep_their_class() -> None:
    for _ in range(4):
        given = auto(torch.eye(3))
        sparse = given.to_sparse()
        assert type(sparse) is torch.Tensor
        assert sparse.sum().item() == 3.0
    assert type(given) is koila.EagerTensor


def test_compiled_code_stays_lazy() -> None:
    compiled = torch.compile(lambda given: given * 2 + 1, backend="eager")
    for _ in range(5):
        result = compiled(auto(torch.ones(3)))
        assert result.tolist() == [3.0] * 3
    assert type(result) is koila.LazyTensor


# Running out of memory, and other errors.


def test_an_error_is_eagers_and_the_next_step_is_lazy() -> None:
    weight, classes = torch.randn(3, 3), list[type]()
    for step in range(6):
        given = auto(torch.tensor([0, 1, 7 if step == 4 else 2]))
        try:
            F.embedding(given, weight).sum().item()
        except IndexError as error:
            assert "out of range" in str(error)
            assert step == 4
        classes.append(type(given))
    assert classes[2:] == [koila.EagerTensor] * 3 + [koila.LazyTensor]
    assert went_lazy() == ["at once::went lazy::an error in embedding"]


# Threads.


def test_two_threads_know_their_own_programs() -> None:
    expected, found = train(same), dict[int, list[Any]]()
    lock = threading.Lock()

    def work(number: int) -> None:
        with lock:  # The generator is shared: a loop draws from it alone.
            found[number] = train(auto)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in found.values():
        assert_equal(expected, each)


def test_eager_tensors_of_another_thread_run_at_once(many_switches: None) -> None:
    inputs, _ = known(lambda x: x * 2, torch.randn(8, 4))
    results = list[Any]()
    threads = [threading.Thread(target=lambda: results.append((inputs + 1).exp().sum())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each.item() for each in results] == [(inputs.run() + 1).exp().sum().item()] * 4
