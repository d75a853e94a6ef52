"""What koila keeps alive, and what it does not."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import koila
from koila.capture.log import MIN_STORAGES
from koila.capture.pending import recorder
from koila.ir.owned import Identity, static_key


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_caches_do_not_keep_a_module_alive(chunk_size: int | None) -> None:
    module = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).eval()
    reference = weakref.ref(module)
    x = torch.randn(4, 3, 16)
    with torch.no_grad(), koila.budget(chunk_size=chunk_size):
        found, expected = module(koila.lazy(x)).run(), module(x)
    torch.testing.assert_close(found, expected)
    del module
    gc.collect()
    assert reference() is None


def _double() -> Any:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, owner: Any = None) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            return gradient * 2, None

    return Double


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_caches_do_not_keep_a_function_alive(chunk_size: int | None) -> None:
    double = _double()
    reference = weakref.ref(double)
    with koila.budget(chunk_size=chunk_size):
        assert double.apply(koila.lazy(torch.ones(4))).run().tolist() == [2.0] * 4
    del double
    gc.collect()
    assert reference() is None


def test_caches_do_not_keep_an_argument_alive() -> None:
    owner, double = nn.Linear(2, 2), _double()
    reference = weakref.ref(owner)
    double.apply(koila.lazy(torch.ones(4)), owner).run()
    del owner
    gc.collect()
    assert reference() is None


def test_a_pending_call_keeps_its_function_alive() -> None:
    pending = _double().apply(koila.lazy(torch.ones(3)))
    gc.collect()
    assert pending.run().tolist() == [2.0] * 3


def test_the_same_function_is_the_same_program_and_another_one_is_not() -> None:
    first, second = _double(), _double()
    hashes = [koila.graph(f.apply(koila.lazy(torch.ones(3)))).structural_hash for f in (first, first, second)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_an_identity_is_that_of_its_object_only() -> None:
    first, second = nn.ReLU(), nn.ReLU()
    assert Identity(first) == Identity(first) and hash(Identity(first)) == hash(Identity(first))
    assert Identity(first) != Identity(second)
    dead = Identity(first)
    del first
    gc.collect()
    assert dead == dead and all(dead != Identity(thing) for thing in [nn.ReLU() for _ in range(100)])


def test_what_compares_by_value_stands_for_itself() -> None:
    assert static_key("sum") == (str, "sum") and static_key(torch.float32) == (torch.dtype, torch.float32)
    assert static_key(frozenset({1})) == (frozenset, frozenset({1}))
    module = nn.ReLU()
    assert static_key(module) == Identity(module)
    assert static_key(module.forward) == static_key(module.forward) != static_key(nn.ReLU().forward)
    with pytest.raises(TypeError, match="unhashable"):
        static_key({1})


def test_a_step_that_repeats_leaves_nothing_to_the_collector() -> None:
    model, x, y = nn.Linear(4, 1), torch.randn(8, 4), torch.randn(8, 1)

    def step() -> None:
        given, wanted = koila.lazy(x, y)
        nn.functional.mse_loss(model(given), wanted).backward()

    for _ in range(5):
        step()
    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            step()
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_storages_of_inputs_that_are_gone_are_forgotten() -> None:
    log = recorder.place.log
    held = [koila.lazy(torch.ones(2)) for _ in range(10)]
    for _ in range(1000):
        koila.lazy(torch.ones(2))
    assert len(log.real_storages) <= 4 * MIN_STORAGES
    alive = {id(lazy._value.storage) for lazy in held}
    assert alive <= {id(reference()) for reference in log.real_storages.values()}


def test_inputs_in_one_memory_share_their_storage() -> None:
    x = torch.ones(4)
    first, second, other = koila.lazy(x), koila.lazy(x[:2]), koila.lazy(torch.ones(4))
    assert first._value.storage is second._value.storage is not other._value.storage


@pytest.mark.parametrize(
    "layers",
    [(nn.BatchNorm1d(3),), (nn.Linear(3, 3), nn.ReLU(True)), (nn.Linear(3, 3), nn.BatchNorm1d(3), nn.ReLU6(True))],
    ids=["statistics", "in place", "both"],
)
def test_a_step_leaves_nothing_recorded_behind(layers: tuple[nn.Module, ...]) -> None:
    """Writes that have been done, to statistics or to values, do not wait for the collector with all of the program."""
    model = nn.Sequential(*layers, nn.Linear(3, 1))
    gc.collect()
    gc.disable()
    try:
        for _ in range(4):
            x = torch.randn(4, 3)
            reference = weakref.ref(x)
            model(koila.lazy(x)).sum().backward()
            del x
            assert reference() is None
            assert recorder.is_idle
    finally:
        gc.enable()


def test_writes_to_a_released_value_are_made_again() -> None:
    """A value that a later call needs is written to once more when the call runs."""
    x = torch.randn(4, 3)
    hidden = koila.lazy(x) * 2
    hidden.relu_()
    doubled = hidden + 1
    del hidden
    assert torch.equal(doubled.sum().run(), (torch.relu(x * 2) + 1).sum())
    assert torch.equal((doubled * 3).run(), (torch.relu(x * 2) + 1) * 3)


@pytest.mark.parametrize("differentiated", [True, False])
def test_results_in_chunks_go_with_their_variables(differentiated: bool) -> None:
    """Logits that a loop holds until the next step, and results that nobody differentiates."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))

    def step() -> list[weakref.ref[torch.Tensor]]:
        x = torch.randn(4, 3)
        with koila.budget(chunk_size=2):
            logits = model(koila.lazy(x))
            loss = logits.square().mean()
            if differentiated:
                loss.backward()
            else:
                koila.run([logits, loss])
        return [weakref.ref(x), weakref.ref(logits.run())]

    step()  # What PyTorch loads for the first trace keeps frames of its callers.
    gc.collect()
    gc.disable()
    try:
        for _ in range(4):
            assert [reference() for reference in step()] == [None, None]
    finally:
        gc.enable()


def test_a_result_in_chunks_outlives_its_variable_if_anybody_has_it() -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    with koila.budget(chunk_size=2):
        logits = model(koila.lazy(x))
        real = logits.run()
        following = logits.exp()
        del logits
        following.sum().backward(retain_graph=True)
    assert torch.equal(real, model(x)) and model.weight.grad is not None
    expected = torch.autograd.grad(model(x).exp().sum(), [model.weight])[0]
    torch.testing.assert_close(model.weight.grad, expected)
    model.zero_grad()
    real.sum().backward()
    torch.testing.assert_close(model.bias.grad, torch.full((2,), 4.0))
