"""The commit: gradients are handed over, not copied; hooks and DistributedDataParallel see one ordinary backward."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn

import koila
from koila.execution.segment import SegmentState
from koila.planning.tracker import StorageTracker
from tests.models import gradient_bytes

WIDTH = 96


def make_model(layers: int = 8) -> nn.Sequential:
    """Many parameters, few activations."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers))).double()


def make_data(batch: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, batch, WIDTH, generator=generator, dtype=torch.float64)
    return x, y


def backward(model: nn.Module, chunk_size: int | None, data: tuple[torch.Tensor, torch.Tensor] | None = None) -> None:
    x, y = koila.lazy(*(data or make_data()))
    with koila.budget(chunk_size=chunk_size):
        F.mse_loss(model(x), y).backward()


def eager_gradients(data: tuple[torch.Tensor, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    model = make_model()
    x, y = data or make_data()
    F.mse_loss(model(x), y).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def assert_gradients(model: nn.Module, expected: dict[str, torch.Tensor], factor: float = 1.0) -> None:
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, factor * expected[name], rtol=1e-10, atol=1e-14)


def test_gradients_are_the_accumulators_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[int] = []
    original = SegmentState.gradients

    def watched(self: SegmentState, *args: object) -> list[torch.Tensor | None]:
        found = original(self, *args)  # type: ignore[arg-type]
        handed.extend(gradient.data_ptr() for gradient in found if gradient is not None)
        return found

    monkeypatch.setattr(SegmentState, "gradients", watched)
    model = make_model()
    backward(model, 2)
    assert sorted(handed) == sorted(p.grad.data_ptr() for p in model.parameters())


@pytest.mark.parametrize("chunk_size", [2, 3, 5])
def test_the_peak_shows_no_second_copy_of_the_gradients(chunk_size: int) -> None:
    model = make_model()
    backward(model, chunk_size)
    model.zero_grad()
    with StorageTracker() as tracker:
        backward(model, chunk_size)
    total = gradient_bytes(model)
    largest = max(p.numel() * p.element_size() for p in model.parameters())
    activations = 2 * 8 * chunk_size * WIDTH * 8
    assert tracker.current_bytes <= total + 64
    # The accumulators, one gradient of a chunk on its way into them, and the chunk's activations.
    assert tracker.peak_bytes <= total + 2 * largest + activations, f"{tracker.peak_bytes} for {total}"
    assert tracker.peak_bytes < 1.5 * total


@pytest.mark.semantics("S12")
@pytest.mark.parametrize("chunk_size", [None, 1, 4])
def test_hooks_on_parameters_fire_once_with_the_whole_gradient(chunk_size: int | None) -> None:
    model, expected = make_model(), eager_gradients()
    seen: list[str] = []
    for name, parameter in model.named_parameters():

        def before(gradient: torch.Tensor, name: str = name) -> None:
            torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-14)
            seen.append(f"before {name}")

        def after(parameter: torch.Tensor, name: str = name) -> None:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-10, atol=1e-14)
            seen.append(f"after {name}")

        parameter.register_hook(before)
        parameter.register_post_accumulate_grad_hook(after)
    backward(model, chunk_size)
    assert sorted(seen) == sorted(f"{when} {name}" for when in ("before", "after") for name in expected)


def test_a_hook_may_change_the_gradient() -> None:
    model, expected = make_model(), eager_gradients()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: 3 * gradient)
    backward(model, 2)
    assert_gradients(model, expected, factor=3)


@pytest.mark.semantics("S10")
@pytest.mark.parametrize("chunk_size", [None, 4])
def test_gradients_accumulate_over_backwards(chunk_size: int | None) -> None:
    model, expected = make_model(), eager_gradients()
    backward(model, chunk_size)
    first = model[0][0].weight.grad
    backward(model, chunk_size)
    assert_gradients(model, expected, factor=2)
    assert model[0][0].weight.grad is first


@pytest.mark.parametrize("chunk_size", [None, 4])
def test_a_hook_that_raises_behaves_as_in_eager(chunk_size: int | None) -> None:
    """Its own parameter has no gradient; the others have theirs, or none, as the engine got to them."""
    model, expected = make_model(), eager_gradients()

    def refuse(gradient: torch.Tensor) -> None:
        raise ArithmeticError("not today")

    handle = model[3][0].weight.register_hook(refuse)
    with pytest.raises(ArithmeticError, match="not today"):
        backward(model, chunk_size)
    handle.remove()
    assert model[3][0].weight.grad is None
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or torch.allclose(parameter.grad, expected[name], rtol=1e-10, atol=1e-14)
    model.zero_grad()
    backward(model, chunk_size)
    assert_gradients(model, expected)


@pytest.mark.semantics("S10")
@pytest.mark.parametrize("chunk_size", [None, 4])
def test_a_second_backward_raises_what_eager_raises(chunk_size: int | None) -> None:
    model = make_model()
    x, y = koila.lazy(*make_data())
    with koila.budget(chunk_size=chunk_size):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
            loss.backward()


@pytest.mark.semantics("S15")
@pytest.mark.parametrize("chunk_size", [None, 4])
def test_loss_scaling_is_a_factor_of_the_gradient(chunk_size: int | None) -> None:
    model, expected = make_model(), eager_gradients()
    x, y = koila.lazy(*make_data())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with koila.budget(chunk_size=chunk_size):
        scaler.scale(F.mse_loss(model(x), y)).backward()
    assert_gradients(model, expected, factor=1024)


def _rank(rank: int, folder: str) -> None:
    """One process: two halves of the batch, once whole and once in chunks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    try:
        for chunk_size in (None, 2):
            model = nn.parallel.DistributedDataParallel(make_model())
            x, y = make_data()
            backward(model, chunk_size, (x[rank * 3 : rank * 3 + 3], y[rank * 3 : rank * 3 + 3]))
            gradients = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
            torch.save(gradients, f"{folder}/{rank}-{chunk_size}.pt")
        dist.barrier()  # Gloo ends the process whose partner has gone while it still talks.
    finally:
        dist.destroy_process_group()


def test_two_processes_have_the_gradient_of_one_on_the_joined_batch(tmp_path: Path) -> None:
    mp.spawn(_rank, (str(tmp_path),), nprocs=2)
    expected = eager_gradients()
    for rank in range(2):
        for chunk_size in (None, 2):
            found = torch.load(tmp_path / f"{rank}-{chunk_size}.pt")
            assert found.keys() == expected.keys()
            for name, gradient in found.items():
                torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-14)
