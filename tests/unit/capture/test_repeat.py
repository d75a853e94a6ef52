"""Calls that repeat the last step are matched; whatever could make them another call is noticed."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import koila
from koila import events
from koila.capture.log import Log
from koila.capture.pending import recorder
from koila.errors import StaleInputError

X = torch.arange(12.0).view(4, 3) / 7
W = torch.linspace(-1, 1, 9).view(3, 3)


def entries() -> int:
    """How many calls of this thread wait without nodes."""
    return len(recorder.place.log.entries)


def learned(step: Callable[[], Any], times: int = 4) -> None:
    """Make a step known, and prepared."""
    for _ in range(times):
        step()


def num_prepared() -> int:
    return events.counters().get("prepared runs", 0)


def forward(x: Any) -> Any:
    return torch.tanh(x @ W).sum(1)


def run_forward() -> torch.Tensor:
    return forward(koila.lazy(X)).run()


def test_a_repeated_program_gets_no_nodes() -> None:
    learned(run_forward)
    h = forward(koila.lazy(X))
    assert entries() == 3
    assert (h.shape, h.dtype, h.ndim, h.size(0), h.requires_grad, len(h)) == ((4,), torch.float32, 1, 4, False, 4)
    assert entries() == 3
    before = num_prepared()
    assert torch.equal(h.run(), forward(X))
    assert num_prepared() == before + 1


def test_whoever_looks_at_a_value_sees_nodes() -> None:
    learned(run_forward)
    h = forward(koila.lazy(X))
    assert [node.name for node in koila.graph(h).nodes] == ["Tensor.matmul", "tanh", "Tensor.sum"]
    assert entries() == 0
    assert torch.equal(h.run(), forward(X))


def test_a_call_that_is_not_known_leaves_the_fast_path_for_itself_only() -> None:
    def step(extra: bool) -> Any:
        h = koila.lazy(X) @ W
        if extra:
            h = h.cos()
        return torch.tanh(h).sum(1)

    learned(lambda: step(False).run())
    h = step(True)
    assert torch.equal(h.run(), torch.tanh((X @ W).cos()).sum(1))
    learned(lambda: step(True).run(), 3)
    h = step(True)
    assert entries() == 4
    assert torch.equal(h.run(), torch.tanh((X @ W).cos()).sum(1))
    g = step(False)
    assert entries() == 3
    assert torch.equal(g.run(), forward(X))


def test_the_line_is_that_of_this_call() -> None:
    first = lambda: koila.lazy(X).cos()  # noqa: E731
    second = lambda: koila.lazy(X).cos()  # noqa: E731
    learned(lambda: first().run())
    h = second()
    assert entries() == 1
    assert koila.graph(h).nodes[0].site.line == second.__code__.co_firstlineno


# What a call depends on.


@pytest.mark.parametrize(
    "scope",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        torch.autograd.detect_anomaly,
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
        lambda: koila.budget(chunk_size=2),
        nullcontext,
    ],
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_ambient_state(scope: Callable[[], AbstractContextManager[Any]]) -> None:
    weight = W.clone().requires_grad_()
    compute = lambda x: (x @ weight).tanh().square().mean()  # noqa: E731
    learned(lambda: compute(koila.lazy(X)).run())
    with scope():
        found, wanted = compute(koila.lazy(X)).run(), compute(X)
    assert (found.dtype, found.requires_grad) == (wanted.dtype, wanted.requires_grad)
    assert found.is_inference() == wanted.is_inference()
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)


def test_state_between_recording_and_run() -> None:
    weight = W.clone().requires_grad_()
    compute = lambda x: (x @ weight).tanh()  # noqa: E731
    learned(lambda: compute(koila.lazy(X)).run())
    h = compute(koila.lazy(X))
    assert entries() == 2
    with torch.no_grad():
        assert h.run().requires_grad
    torch.set_default_dtype(torch.float64)
    try:
        found = [torch.ones_like(koila.lazy(X)).run().dtype, (koila.lazy(X) * 2.5).run().dtype]
    finally:
        torch.set_default_dtype(torch.float32)
    assert found == [torch.float32, torch.float32]


def test_a_transform_around_a_known_program() -> None:
    learned(run_forward)
    z = koila.lazy(X)
    found = torch.func.grad(lambda scale: forward(z * scale).sum())(torch.tensor(2.0))
    wanted = torch.func.grad(lambda scale: forward(X * scale).sum())(torch.tensor(2.0))
    torch.testing.assert_close(found, wanted)


def test_numbers_and_their_types() -> None:
    for number in (0.3, 0.7, float("nan"), 2.0, 2, 0.3, 1, True, 3):
        found = (koila.lazy(X) * number).run()
        assert torch.equal(found.isnan(), (X * number).isnan())
        assert torch.equal(found.nan_to_num(), (X * number).nan_to_num())
    for dim in (1, 0, 1, 0, 1):
        assert torch.equal(koila.lazy(X).sum(dim).run(), X.sum(dim))
    for size in (1, 2, 1, 2, 3):
        assert torch.equal(koila.lazy(X)[size:, :2].run(), X[size:, :2])
        assert torch.equal(koila.lazy(X).repeat(size, 1).run(), X.repeat(size, 1))


def test_dropout_draws_at_its_call() -> None:
    drawn = []
    for make in (koila.lazy, lambda tensor: tensor):
        torch.manual_seed(3)
        steps = [F.dropout(make(X), p) for p in (0.3, 0.3, 0.3, 0.3, 0.6, 0.3) for _ in range(2)]
        drawn.append([step.run() if isinstance(step, koila.LazyTensor) else step for step in steps])
        drawn[-1].append(torch.rand(1))
    assert all(torch.equal(a, b) for a, b in zip(*drawn, strict=True))


def test_which_operands_are_the_same() -> None:
    other = X.clone()
    learned(lambda: torch.add(koila.lazy(X), other).run())
    z = koila.lazy(X)
    assert torch.equal(torch.add(z, z).run(), X + X)
    a, b, c = W.clone(), W.clone(), W.clone()
    for first, second in ((a, b), (a, b), (a, b), (a, a), (c, b), (b, b)):
        z = koila.lazy(X)
        assert torch.equal(torch.addmm(z @ first, z, second).run(), torch.addmm(X @ first, X, second))


def test_views_of_inputs_that_share_memory_or_not() -> None:
    base = torch.arange(8.0)
    for left, right in ((base[:4], base[4:]),) * 4 + ((base[:4], base[:4]), (base[:4], base.clone()[4:])):
        a, b = koila.lazy(left, right)
        found = a.view(2, 2) + b.view(2, 2)
        assert torch.equal(found.run(), left.view(2, 2) + right.view(2, 2))


def test_another_layout_of_the_same_parameter() -> None:
    weight = nn.Parameter(torch.arange(9.0).view(3, 3))
    learned(lambda: (koila.lazy(X) @ weight).run())
    weight.data = weight.data.t()
    found = koila.lazy(X) @ weight
    assert torch.equal(found.run(), X @ weight)
    weight.data = weight.data.double()
    with pytest.raises(RuntimeError, match="dtype"):
        (koila.lazy(X) @ weight).run()


def test_a_tensor_that_requires_grad_since() -> None:
    weight = W.clone()
    learned(lambda: (koila.lazy(X) @ weight).run())
    weight.requires_grad_()
    h = koila.lazy(X) @ weight
    assert h.requires_grad
    assert h.run().requires_grad


def test_an_argument_that_cannot_be_hashed_ends_what_is_known() -> None:
    for size in (2, 2, 3, 2, 4):
        h = torch.relu(koila.lazy(X)[np.arange(size) % 4])
        assert h.shape == (size, 3)
        assert torch.equal(h.run(), torch.relu(X[np.arange(size) % 4]))


def test_requires_grad_of_a_pending_value_ends_what_is_known() -> None:
    for is_leaf in (True, True, True, False, True):
        h = koila.lazy(X) @ W
        if is_leaf:
            h.requires_grad_()
        assert (h * 2).requires_grad is is_leaf


# Values that change in between.


def test_a_stale_input_is_an_error_that_names_both_lines() -> None:
    weight = W.clone()
    learned(lambda: (koila.lazy(X) @ weight).run())
    h = koila.lazy(X) @ weight
    assert entries() == 1
    torch._foreach_add_([weight], 1.0)
    with pytest.raises(StaleInputError, match=r"test_repeat\.py"):
        h.run()


def test_a_write_that_is_seen_comes_after_what_reads() -> None:
    weight = W.clone()
    learned(lambda: (koila.lazy(X) @ weight).run())
    h, wanted = koila.lazy(X) @ weight, X @ weight
    weight.mul_(2)
    assert torch.equal(h.run(), wanted)
    h, wanted = koila.lazy(X) @ weight, X @ weight
    weight.data.zero_()
    assert torch.equal(h.run(), wanted)


def test_writes_to_lazy_values() -> None:
    def step(x: Any, offset: torch.Tensor) -> tuple[Any, Any]:
        h = x @ W
        view = h[0]
        h.relu_().add_(offset)
        h[1:, 0] = 7.0
        return h, view

    offset = torch.ones(3, requires_grad=True)
    learned(lambda: koila.run(step(koila.lazy(X), offset)))
    h, view = step(koila.lazy(X), offset)
    assert entries() == 5
    assert h.requires_grad and view.requires_grad
    for found, wanted in zip(koila.run((h, view)), step(X, offset), strict=True):
        assert torch.equal(found, wanted)


def test_results_that_share_memory() -> None:
    def step(x: Any) -> tuple[Any, Any, Any]:
        h = x @ W
        return h, h[1], x[2]

    def learn() -> None:
        held = step(koila.lazy(X))
        held[0].run()

    learned(learn)
    before = num_prepared()
    h, row, slice_of_input = step(koila.lazy(X.clone()))
    h.run()
    assert num_prepared() == before + 1
    h.add_(1)
    assert torch.equal(row.run(), (X @ W + 1)[1])
    assert row.run().data_ptr() == h.run()[1].data_ptr()
    assert torch.equal(slice_of_input.run(), X[2])


# Steps.


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.4), nn.Linear(8, 2)
    ).double()  # fmt: skip


def trained(make: Callable[..., Any], scopes: list[Callable[[], AbstractContextManager[Any]]]) -> list[torch.Tensor]:
    """Losses, parameters, statistics and random numbers after a step in each of the scopes."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses: list[torch.Tensor] = []
    torch.manual_seed(2)
    for scope in scopes:
        x, y = torch.randn(6, 3, dtype=torch.float64), torch.randint(0, 2, (6,))
        with scope():
            a, b = make(x, y)
            optimizer.zero_grad()
            output = model(a)
            loss = F.cross_entropy(output, b)
            right = (output.argmax(1) == b).sum()
            loss.backward()
            optimizer.step()
            losses += [torch.tensor(loss.item()), torch.tensor(right.item())]
    return [*losses, *(tensor.detach().clone() for tensor in model.state_dict().values()), torch.rand(3)]


@pytest.mark.parametrize(
    "scopes",
    [
        [nullcontext] * 7,
        [lambda: koila.budget("1GiB")] * 7,
        [koila.measure] * 7,
        [nullcontext] * 5 + [lambda: koila.budget("1GiB")] * 5 + [nullcontext] * 2,
        [lambda: koila.budget("1GiB")] * 5 + [lambda: koila.budget(chunk_size=2)] * 2 + [nullcontext] * 4,
    ],
    ids=["whole", "budget", "measured", "budget in between", "chunks in between"],
)
def test_training_with_statistics(scopes: list[Any]) -> None:
    before = num_prepared()
    found, wanted = trained(koila.lazy, scopes), trained(lambda *tensors: tensors, [nullcontext] * len(scopes))
    assert num_prepared() > before
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_what_is_held_decides_what_is_bound() -> None:
    kept: list[Any] = []

    def step(keep: bool) -> None:
        h = koila.lazy(X) @ W
        square = h.square()
        loss = square.sum()
        if keep:
            kept[:] = [h, square]
        del h, square
        assert loss.item() == (X @ W).square().sum().item()

    for keep in (False, False, False, True, True, True, False, True):
        kept.clear()
        step(keep)
        assert [
            torch.equal(found.run(), wanted) for found, wanted in zip(kept, (X @ W, (X @ W).square()), strict=False)
        ] == [True] * len(kept)


def test_a_call_that_nobody_requires_may_fail() -> None:
    table = torch.arange(4.0)

    def step(index: int) -> tuple[Any, Any]:
        z, at = koila.lazy(X), koila.lazy(torch.tensor([index]), batch=None)
        return (z @ W).sum(), table[at] * 2

    for index in (1, 2, 3, 1):
        total, side = step(index)
        assert total.item() == (X @ W).sum().item()
        assert side.item() == 2.0 * index
    total, side = step(9)
    assert total.item() == (X @ W).sum().item()
    with pytest.raises(IndexError, match="out of"):
        side.item()
    total, side = step(1)
    assert (total.item(), side.item()) == ((X @ W).sum().item(), 2.0)


def test_an_error_leaves_statistics_as_they_were() -> None:
    table, norm = torch.arange(4.0), nn.BatchNorm1d(3)

    def step(index: int) -> Any:
        return norm(koila.lazy(X)).sum() + table[koila.lazy(torch.tensor([index]), batch=None)].sum()

    learned(lambda: step(1).item())
    before = copy.deepcopy(norm.running_mean)
    failing = step(9)
    with pytest.raises(IndexError, match="out of") as caught:
        failing.item()
    assert any("test_repeat.py" in note for note in caught.value.__notes__)
    assert torch.equal(norm.running_mean, before)
    step(2).item()
    assert not torch.equal(norm.running_mean, before)


def test_a_hook_that_raises_behaves_as_in_eager() -> None:
    weight = W.clone().requires_grad_()
    learned(lambda: (koila.lazy(X) @ weight).sum().backward())

    def refuse(gradient: torch.Tensor) -> None:
        raise ValueError("not this one")

    handle = weight.register_hook(refuse)
    with pytest.raises(ValueError, match="not this one"):
        (koila.lazy(X) @ weight).sum().backward()
    handle.remove()
    weight.grad = None
    (koila.lazy(X) @ weight).sum().backward()
    assert torch.equal(weight.grad, X.sum(0, keepdim=True).t().expand(3, 3))


def test_a_second_backward_raises_as_in_eager() -> None:
    weight = W.clone().requires_grad_()
    compute = lambda x: (x @ weight).square().sum()  # noqa: E731
    learned(lambda: compute(koila.lazy(X)).backward())
    loss = compute(koila.lazy(X))
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    loss = compute(koila.lazy(X))
    weight.grad = None
    loss.backward(retain_graph=True)
    loss.backward()
    wanted = torch.autograd.grad(compute(X), weight)[0] * 2
    torch.testing.assert_close(weight.grad, wanted)


def test_an_optimizer_step_before_a_value_is_read() -> None:
    weight = W.clone().requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=0.5)

    def step() -> None:
        h, wanted = koila.lazy(X) @ weight, (X @ weight).detach()
        weight.grad = torch.ones(3, 3)
        optimizer.step()
        assert torch.equal(h.run().detach(), wanted)

    learned(step, 6)


def test_a_policy_that_reads_its_actions() -> None:
    policy = nn.Linear(3, 2).double()

    def episode(make: Callable[[torch.Tensor], Any]) -> torch.Tensor:
        chosen, state = [], torch.ones(3, dtype=torch.float64)
        for _ in range(6):
            logs = F.log_softmax(policy(make(state)), dim=-1)
            action = int(logs.argmax().item())
            chosen.append(logs[action])
            state = state.roll(1) * 0.5 - action
        policy.zero_grad()
        torch.stack(chosen).sum().backward()
        return policy.weight.grad.clone()

    wanted = episode(lambda state: state)
    for _ in range(4):
        assert torch.equal(episode(koila.lazy), wanted)


# Threads and lifetimes.


def test_another_thread_reads_what_this_one_recorded() -> None:
    learned(run_forward)
    h, found = forward(koila.lazy(X)), list[torch.Tensor]()
    assert entries() == 3
    thread = threading.Thread(target=lambda: found.append(h.run()))
    thread.start()
    thread.join()
    assert torch.equal(found[0], forward(X))
    assert entries() == 0


def test_effects_of_a_thread_that_has_ended() -> None:
    norm = nn.BatchNorm1d(3)

    def work() -> None:
        learned(lambda: norm(koila.lazy(X)).sum().item())
        made.append(norm(koila.lazy(X)))

    made: list[Any] = []
    reference = copy.deepcopy(norm)
    for _ in range(5):
        reference(X)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    del thread
    gc.collect()
    assert torch.equal(made[0].run(), reference.eval().train()(X))
    koila.settle()
    norm_mean = norm.running_mean
    reference = nn.BatchNorm1d(3)
    for _ in range(5):
        reference(X)
    assert torch.equal(norm_mean, reference.running_mean)


def test_what_nobody_holds_gets_no_node() -> None:
    learned(lambda: (koila.lazy(X) @ W).tanh().run())
    z = koila.lazy(X)
    h = z @ W
    (h + 0).cos()
    del h
    koila.settle()
    assert all(reference() is None for reference in recorder.log.tape)


def test_entries_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("koila.capture.repeat.MAX_ENTRIES", 5)
    step = lambda x: x.cos().sin().cos().sin().cos().sin().cos().sum()  # noqa: E731
    learned(lambda: step(koila.lazy(X)).item())
    h = step(koila.lazy(X))
    assert entries() < 5
    assert h.item() == step(X).item()


def test_a_failed_flush_leaves_the_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    learned(run_forward)
    h = forward(koila.lazy(X))
    original, calls = Log.note, list[int]()

    def interrupted(self: Log, node: Any) -> None:
        calls.append(1)
        original(self, node)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Log, "note", interrupted)
    with pytest.raises(KeyboardInterrupt):
        koila.graph(h)
    assert entries() == 3
    assert [node.name for node in koila.graph(h).nodes] == ["Tensor.matmul", "tanh", "Tensor.sum"]
    assert torch.equal(h.run(), forward(X))


def test_clearing_caches_in_the_middle_of_a_program() -> None:
    learned(run_forward)
    h = koila.lazy(X) @ W
    koila.ir.cache.clear_all()  # type: ignore[attr-defined]
    assert torch.equal(torch.tanh(h).sum(1).run(), forward(X))
    learned(run_forward)
    assert torch.equal(run_forward(), forward(X))


def test_a_call_that_returns_its_input_itself() -> None:
    step = lambda x: x.contiguous().to(torch.float32).cos().sum()  # noqa: E731
    learned(lambda: step(koila.lazy(X)).item())
    h = step(koila.lazy(X))
    assert entries() == 4
    assert h.item() == step(X).item()


def test_programs_that_nobody_reads_keep_nothing_alive() -> None:
    learned(lambda: koila.lazy(X).cos().run())
    alive = []
    for _ in range(4):
        batch = torch.ones(5, 3)
        alive.append(weakref.ref(batch))
        koila.lazy(batch).cos()
        del batch
    koila.lazy(X)
    assert [reference() for reference in alive] == [None] * 4


def test_the_budgets_of_inputs_are_those_of_this_step() -> None:
    def step(left: str | None, right: str | None) -> Any:
        return (koila.lazy(X, budget=left) @ W).sum() + koila.lazy(X, budget=right).sum()

    wanted = (X @ W).sum() + X.sum()
    for left, right in ((None, None),) * 4 + (("1GiB", None),) * 2 + ((None, "1GiB"), ("1GiB", "2GiB"), (None, None)):
        total = step(left, right)
        assert total.item() == wanted.item()
        allowed = koila.last_report().allowed_bytes
        assert allowed == (None if (left, right) == (None, None) else 2**30)


def test_autocast_keeps_its_cache_as_in_eager() -> None:
    weight = W.clone().requires_grad_()

    def step(make: Callable[[torch.Tensor], Any]) -> torch.Tensor:
        weight.grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = make(X)
            loss = F.linear(F.linear(h, weight), weight).float().square().mean()
        loss.backward()
        return weight.grad

    wanted = step(lambda tensor: tensor).clone()
    for _ in range(5):
        assert torch.equal(step(koila.lazy), wanted)
