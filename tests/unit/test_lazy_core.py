"""What users of koila 0.1 and of PyTorch's lazy core know by name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import koila
from koila import gpus
from koila.interfaces import BatchedPair

ROOT = Path(__file__).resolve().parents[2]

# Ranges of the batch.


def test_a_range_of_the_batch_is_that_of_the_whole() -> None:
    x = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = (x - x.mean(0)).softmax(1)
    lazy = koila.lazy(x)
    value = (lazy - lazy.mean(0)).softmax(1)
    assert torch.equal(value.run((1, 4)), expected[1:4])
    assert torch.equal(koila.run({"a": value, "n": 3}, (4, 6))["a"], expected[4:])
    assert torch.equal(koila.run(value), expected) and torch.equal(value.run((0, 2)), expected[:2])


@pytest.mark.parametrize("chunk_size", [1, 2, 5])
def test_a_range_in_chunks_is_that_of_the_whole(chunk_size: int) -> None:
    x = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with koila.budget(chunk_size=chunk_size):
        lazy = koila.lazy(x)
        found = ((lazy - lazy.mean(0)) * weight).run((2, 5))
        found.square().sum().backward()
    expected = torch.autograd.grad(((x - x.mean(0)) * weight)[2:5].square().sum(), weight)[0]
    assert weight.grad is not None
    assert torch.allclose(found, ((x - x.mean(0)) * weight)[2:5], rtol=1e-12) and torch.allclose(weight.grad, expected)


def test_a_range_in_another_dimension_keeps_the_gradient() -> None:
    weight = torch.ones(2, requires_grad=True)
    value = koila.lazy(torch.arange(6.0).reshape(2, 3), batch=1) * weight[:, None]
    value.run((1, 3)).sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [3.0, 9.0]


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda x: x.run(True), "a range of the batch is \\(low, high\\), got True\n.*\n.*detach=True"),
        (lambda x: x.run((0, 9)), "samples 0 to 9 of a batch of 4\n"),
        (lambda x: x.run((3, 1)), "samples 3 to 1 of a batch of 4\n"),
        (lambda x: koila.run([x, koila.lazy(torch.ones(2), batch=None)], (0, 1)), "no batch is known in \\[2\\]"),
        (lambda x: x.sum().run((0, 1)), "a range of the batch was asked for, and no batch is known in \\[\\]"),
    ],
)
def test_what_is_no_range_is_refused(act: object, text: str) -> None:
    with pytest.raises(koila.CaptureError, match=text):
        act(koila.lazy(torch.ones(4)))  # type: ignore[operator]


def test_detach_is_named() -> None:
    weight = torch.ones(3, requires_grad=True)
    value = koila.lazy(torch.ones(3)) * weight
    assert not value.run(detach=True).requires_grad and not koila.run(value, detach=True).requires_grad
    with pytest.raises(TypeError):
        koila.run(value, None, True)  # type: ignore[misc]


# Batches, memory and runnables.


def test_a_batch_is_mapped_by_a_number_or_a_function() -> None:
    batch = koila.BatchInfo(1, 8)
    assert batch.map(0) == koila.BatchInfo(0, 8) and batch.map(lambda dim: dim + 1) == koila.BatchInfo(2, 8)
    with pytest.raises(TypeError, match=r"a dimension is a whole number, got None; write map\(1\)"):
        batch.map(lambda dim: None)  # type: ignore[arg-type, return-value]


def test_objects_with_run_are_run() -> None:
    assert koila.run({"a": [SimpleNamespace(run=lambda: 42)]}) == {"a": [42]}


def test_the_memory_of_a_program_before_it_runs() -> None:
    x, weight = koila.lazy(torch.ones(4, 2)), torch.ones(2, 8)
    hidden = x @ weight
    assert hidden.buffer_memory() == BatchedPair(batch=32, no_batch=0)
    assert (hidden.T + 1).sum().buffer_memory() == BatchedPair(batch=64, no_batch=4)
    assert koila.metrics.counter_value("runs") == 0
    hidden.run()
    assert hidden.buffer_memory() == BatchedPair(0, 0)


def test_free_memory_and_parts_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    # Tests of the simulated device may have run in this process.
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    assert gpus.free_memory("cpu") == pytest.approx(koila._free.free_bytes(), rel=0.5)  # type: ignore[attr-defined]
    assert gpus.free_memory() is None and gpus.torch_free_memory() == gpus.nvidia_free_memory() == 0
    pair = BatchedPair(batch=10, no_batch=20)
    assert gpus.maximum_batch(pair, 100) == 8 and gpus.maximum_batch(pair) is None
    assert list(gpus.split_batch(pair, 29, 100)) == [8, 8, 8, 4, 1] and list(gpus.split_batch(pair, 29)) == [29]
    with pytest.raises(koila.BudgetError, match="one sample needs 30 bytes, and there are 25"):
        gpus.maximum_batch(pair, 25)


# Steps.


def test_a_step_runs_what_is_pending_and_then_its_closures() -> None:
    order: list[object] = []
    value = koila.lazy(torch.ones(2)) + 1
    koila.add_step_closure(order.append, [{"value": value}])
    koila.add_step_closure(lambda: order.append("second"))
    assert order == []
    koila.mark_step()
    assert type(order[0]["value"]) is torch.Tensor and order[1:] == ["second"]  # type: ignore[index]
    assert "ready" in repr(value)
    koila.mark_step()
    assert len(order) == 2


def test_a_closure_that_raises_is_not_called_again() -> None:
    koila.add_step_closure(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        koila.mark_step()
    koila.mark_step()


# Programs.


def test_a_program_as_text() -> None:
    value = koila.lazy(torch.ones(2, 3)) + 1
    assert "test_lazy_core.py" in koila.dump_ir(value)
    assert koila.dump_ir(value, "dot").startswith("digraph koila {")
    with pytest.raises(koila.CaptureError, match="ir_format='backend' is neither 'text' nor 'dot'"):
        koila.dump_ir(value, "backend")


HASHED = """
import torch, koila, torch.nn.functional as F
net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5))
x, y = koila.lazy(torch.rand(5, 3), torch.zeros(5, dtype=torch.long))
with torch.autocast("cpu", dtype=torch.bfloat16):
    loss = F.cross_entropy(net(x), y, label_smoothing=0.1)
print(koila.structural_hash(loss))
"""


def _hash_elsewhere(seed: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", HASHED]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def test_a_hash_is_the_same_in_every_process() -> None:
    """Of fresh ones: modes of PyTorch count, and other tests may have left some of them otherwise."""
    here, there = map(_hash_elsewhere, ("7", "8"))
    assert len(here) == 32 and here == there


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x + 2 * x,
        lambda x: (x * 2).sum(1),
        lambda x: (x.double() * 2).sum(0),
        lambda x: (x[:-1] * 2).sum(0),
        lambda x: torch.no_grad()(lambda: (x * 2).sum(0))(),
    ],
)
def test_other_programs_have_other_hashes(other: object) -> None:
    x = koila.lazy(torch.ones(3, 3))
    assert koila.structural_hash((x * 2).sum(0)) != koila.structural_hash(other(x))  # type: ignore[operator]


def test_a_program_is_a_function_of_its_inputs() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double()
    first = torch.randn(6, 3, dtype=torch.float64), torch.randint(0, 2, (6,))
    second = torch.randn(6, 3, dtype=torch.float64), torch.randint(0, 2, (6,))
    x, y = koila.lazy(*first)
    logits = net(x)
    program = koila.compile_program({"loss": F.cross_entropy(logits, y), "logits": logits}, (x, y))
    assert program.shapes == [(6, 3), (6,)] and program.hash == koila.structural_hash(
        {"loss": F.cross_entropy(logits, y), "logits": logits}
    )
    for inputs in (first, second, first):
        found = program(*inputs)
        assert torch.equal(found["logits"], net(inputs[0]))
        assert torch.equal(found["loss"], F.cross_entropy(net(inputs[0]), inputs[1]))
    with torch.no_grad():
        net[0].weight.mul_(2)
    assert torch.equal(program(*second)["logits"], net(second[0]))
    with koila.budget(chunk_size=2):
        found = program(*second)["loss"]
    assert koila.last_report().how == "split"
    found.backward()
    ours, net[0].weight.grad = net[0].weight.grad, None
    F.cross_entropy(net(second[0]), second[1]).backward()
    assert torch.allclose(ours, net[0].weight.grad, rtol=1e-10, atol=1e-14)


def test_a_program_stays_usable_after_its_value_was_run() -> None:
    x = koila.lazy(torch.arange(3.0))
    value = (x * 2).add_(1)
    program = koila.compile_program(value)
    assert value.run().tolist() == [1.0, 3.0, 5.0]
    assert program(torch.ones(3)).tolist() == [3.0, 3.0, 3.0] == program(torch.ones(3)).tolist()


def test_a_program_keeps_its_modes_and_updates_statistics_once_a_call() -> None:
    ours, plain = (torch.nn.BatchNorm1d(3).double() for _ in range(2))
    x, other = torch.randn(2, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        program = koila.compile_program(ours(koila.lazy(x)))
    koila.settle()  # The recorded pass itself.
    plain(x)
    assert torch.equal(program(other), plain(other).detach()) and not program(other).requires_grad
    plain(other)
    assert torch.equal(ours.running_var, plain.running_var)


def test_random_numbers_of_a_program_are_drawn_anew() -> None:
    program = koila.compile_program(F.dropout(koila.lazy(torch.ones(64)), 0.5))
    torch.manual_seed(0)
    one, other = program(torch.ones(64)), program(torch.ones(64))
    torch.manual_seed(0)
    assert torch.equal(one, F.dropout(torch.ones(64), 0.5)) and torch.equal(other, F.dropout(torch.ones(64), 0.5))


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ((torch.ones(3),), "the program has 2 inputs, got 1\n.*\n.*their shapes: \\[\\(3,\\), \\(3,\\)\\]"),
        ((torch.ones(3), torch.ones(4)), "input 1 is float32\\[3\\], got float32\\[4\\]"),
        ((torch.ones(3), torch.ones(3).double()), "input 1 is float32\\[3\\], got float64\\[3\\]"),
        ((torch.ones(3), 1.0), "input 1 is float32\\[3\\], got float"),
    ],
)
def test_inputs_that_are_not_like_the_recorded_ones(tensors: tuple[torch.Tensor, ...], text: str) -> None:
    x, y = koila.lazy(torch.ones(3), torch.ones(3))
    with pytest.raises(koila.CaptureError, match=text):
        koila.compile_program(x + y)(*tensors)


def test_inputs_that_are_not_named_are_refused() -> None:
    x, y = koila.lazy(torch.ones(3), torch.ones(3))
    with pytest.raises(koila.CaptureError, match=r"the program also reads \[3\]\n.*\n.*compile_program\(loss"):
        koila.compile_program(x + y, (x,))
