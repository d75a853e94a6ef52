"""Programs that a review once broke: each was wrong, lost or refused, and is eager's now."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import koila

CHUNKS = [None, 1, 2]


def scope(chunk: int | None) -> AbstractContextManager[Any]:
    return nullcontext() if chunk is None else koila.budget(chunk_size=chunk)


def same(program: Callable[[Callable[[Any], Any]], Any], chunk: int | None) -> None:
    """The program gives eager's numbers; it is called with what makes its inputs lazy."""
    torch.manual_seed(0)
    expected = program(lambda value: value)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    with scope(chunk):
        found = koila.run(program(koila.lazy), detach=True)
    assert torch.equal(state, torch.get_rng_state())
    for a, b in zip(expected, found, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(b, a.detach(), rtol=1e-10 if chunk else 0, atol=1e-12 if chunk else 0)


@pytest.fixture(autouse=True)
def double() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_reader_that_ran_early_for_a_write_is_not_recomputed(chunk: int | None) -> None:
    def program(lazy: Any) -> Any:
        h = lazy(torch.ones(4, 2)) * 1
        y = (h + 1) * 2
        h.mul_(3)
        h.sum().item()
        return (y,)

    same(program, chunk)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_teacher_in_eval_mode_does_not_see_later_statistics(chunk: int | None) -> None:
    def program(lazy: Any) -> Any:
        bn = nn.BatchNorm1d(2).eval()
        x = lazy(torch.arange(8.0).view(4, 2))
        with torch.no_grad():
            teacher = bn(x) * 2
        bn.train()
        bn(x).sum().backward()
        return teacher, bn.running_mean, bn.weight.grad

    same(program, chunk)


@pytest.mark.semantics("S5")
@pytest.mark.parametrize("chunk", CHUNKS)
def test_detach_in_place_stops_the_gradient(chunk: int | None) -> None:
    def program(lazy: Any) -> Any:
        first, second = nn.Linear(3, 3), nn.Linear(3, 1)
        h = first(lazy(torch.randn(4, 3)))
        h.detach_()
        second(h).sum().backward()
        return first.weight.grad, second.weight.grad

    same(program, chunk)


@pytest.mark.semantics("S18")
def test_an_input_that_changes_between_forward_and_backward_is_an_error() -> None:
    layer, real = nn.Linear(3, 1), torch.ones(4, 3)
    with koila.budget(chunk_size=2):
        loss = layer(koila.lazy(real)).sum()
        loss.item()
        real.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.semantics("S16")
def test_held_gradients_are_bound_to_versions() -> None:
    layer = nn.Linear(3, 1)
    with koila.budget(chunk_size=2):
        for step in range(3):
            loss = layer(koila.lazy(torch.ones(4, 3))).square().sum()
            loss.item()
            if step == 2:
                with torch.no_grad():
                    layer.weight.add_(1)
                with pytest.raises(koila.StaleInputError):
                    loss.backward()
            else:
                loss.backward()


@pytest.mark.semantics("S3")
@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_view_aliases_its_base_after_a_run(chunk: int | None) -> None:
    def program(lazy: Any) -> Any:
        real = torch.zeros(4, 3)
        view = lazy(real).view(-1)
        koila.run(view)
        view.add_(1)
        return view.sum(), real.sum()

    same(program, chunk)


@pytest.mark.semantics("S14")
def test_a_frozen_parameter_that_is_thawed_before_the_run_has_no_gradient() -> None:
    frozen, head = nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 1)
    loss = head(frozen(koila.lazy(torch.randn(4, 3)))).sum()
    frozen.requires_grad_(True)
    loss.backward()
    assert frozen.weight.grad is None and head.weight.grad is not None


def test_a_flag_that_is_set_as_an_attribute_before_the_run_is_an_error() -> None:
    frozen, head = nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 1)
    loss = head(frozen(koila.lazy(torch.randn(4, 3)))).sum()
    frozen.weight.requires_grad = True
    with pytest.raises(koila.StaleInputError, match="was changed after the call was recorded"):
        loss.backward()


@pytest.mark.semantics("S2")
@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_write_to_a_lazy_input_is_seen_at_once(chunk: int | None) -> None:
    def program(lazy: Any) -> Any:
        real = torch.zeros(4, 3)
        before = lazy(real) + 1
        lazy(real).add_(1)
        return real.clone(), before

    same(program, chunk)


def test_state_comes_after_pending_statistics() -> None:
    bn = nn.BatchNorm1d(3)
    bn(koila.lazy(torch.randn(4, 3) + 5))
    assert bn.state_dict()["running_mean"].abs().min() > 0.1


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("masked", [False, True])
def test_fused_fast_paths_are_taken(masked: bool) -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2).eval()
    x, pad = torch.randn(5, 3, 4), torch.tensor([[False, False, True]] * 5)
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=pad if masked else None)
        found = model(koila.lazy(x), src_key_padding_mask=koila.lazy(pad) if masked else None)
    assert torch.equal(koila.run(found), expected)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_failed_run_does_not_poison_the_next(chunk: int | None) -> None:
    bn, table = nn.BatchNorm1d(3), nn.Embedding(2, 3)
    x, index = koila.lazy(torch.randn(4, 3), torch.tensor([0, 1, 5, 0]))
    with scope(chunk):
        with pytest.raises(IndexError):
            bn(x + table(index)).sum().backward()
        assert torch.equal((koila.lazy(torch.ones(3)) + 1).run(), torch.full((3,), 2.0))
        assert torch.equal(bn.running_mean, torch.zeros(3))  # type: ignore[arg-type]


@pytest.mark.semantics("S8")
@pytest.mark.parametrize("chunk", CHUNKS)
def test_control_flow_on_a_loss(chunk: int | None) -> None:
    def program(lazy: Any) -> Any:
        layer = nn.Linear(3, 1)
        loss = layer(lazy(torch.randn(4, 3))).pow(2).mean()
        if loss > 0:
            loss = loss * 2
        loss.backward()
        return loss, layer.weight.grad

    same(program, chunk)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_truncated_backpropagation_through_time(chunk: int | None) -> None:
    def program(lazy: Any) -> Any:
        cell, h = nn.RNNCell(3, 3), torch.zeros(4, 3)
        for _ in range(3):
            h = cell(lazy(torch.randn(4, 3)), h.detach())
            h.sum().backward()
        return h, cell.weight_hh.grad

    same(program, chunk)


@pytest.mark.semantics("S12")
@pytest.mark.parametrize("chunk", CHUNKS)
def test_hooks_on_lazy_values_are_called_once(chunk: int | None) -> None:
    def program(lazy: Any) -> Any:
        layer, seen = nn.Linear(3, 3), []
        h = layer(lazy(torch.randn(4, 3)))
        h.register_hook(lambda gradient: seen.append(gradient.clone()))
        h.retain_grad()
        h.square().sum().backward()
        assert len(seen) == 1
        return seen[0], h.grad, layer.weight.grad

    same(program, chunk)


@pytest.mark.semantics("S12")
@pytest.mark.parametrize("chunk", CHUNKS)
def test_module_backward_hooks(chunk: int | None) -> None:
    def program(lazy: Any) -> Any:
        model, seen = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)), []
        model[1].register_full_backward_hook(lambda module, before, after: seen.append(after[0].clone()))
        model(lazy(torch.randn(4, 3))).sum().backward()
        assert len(seen) == 1
        return seen[0], model[0].weight.grad

    same(program, chunk)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_leaf_in_the_middle(chunk: int | None) -> None:
    def program(lazy: Any) -> Any:
        layer = nn.Linear(3, 3)
        h = layer(lazy(torch.randn(4, 3)))
        a = h.detach()
        a.requires_grad_()
        (a**2).sum().backward()
        h.backward(a.grad)
        return a.grad, layer.weight.grad

    same(program, chunk)


@pytest.mark.semantics("S19")
@pytest.mark.parametrize("chunk", CHUNKS)
def test_random_numbers_in_a_transposed_layout(chunk: int | None) -> None:
    def program(lazy: Any) -> Any:
        layer = nn.Linear(4, 4)
        h = layer(lazy(torch.randn(5, 4))).t()
        noise = torch.rand_like(h)
        (noise.reshape(-1) * h.reshape(-1)).sum().backward()
        return (layer.weight.grad,)

    same(program, chunk)


@pytest.mark.semantics("S16")
@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_prediction_read_after_the_step(chunk: int | None) -> None:
    def program(lazy: Any) -> Any:
        model, x = nn.Linear(3, 1), lazy(torch.randn(4, 3))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        prediction = model(x).tanh()
        model(x).pow(2).sum().backward()
        optimizer.step()
        return (prediction,)

    same(program, chunk)


@pytest.mark.semantics("S11")
@pytest.mark.parametrize("chunk", CHUNKS)
def test_double_backward_through_a_value_that_was_read(chunk: int | None) -> None:
    def program(lazy: Any) -> Any:
        layer, x = nn.Linear(3, 3), lazy(torch.randn(4, 3))
        loss = layer(x).tanh().square().sum()
        loss.item()
        (gradient,) = torch.autograd.grad(loss, layer.weight, create_graph=True)
        (loss + gradient.square().sum()).backward()
        return (layer.weight.grad,)

    same(program, chunk)


@pytest.mark.semantics("S20")
@pytest.mark.parametrize("chunk", CHUNKS)
def test_recorded_in_one_thread_and_run_in_another(chunk: int | None) -> None:
    def program(lazy: Any) -> Any:
        bn, out = nn.BatchNorm1d(3), []
        x = lazy(torch.randn(4, 3) + 2)
        worker = threading.Thread(target=lambda: out.append(bn(x).square().sum()))
        worker.start()
        worker.join()
        out[0].backward()
        return bn.running_mean, bn.weight.grad

    same(program, chunk)


@pytest.mark.semantics("S15")
def test_autocast_keeps_its_cache_of_weights_through_nested_regions() -> None:
    def program(lazy: Any) -> Any:
        layer = nn.Linear(8, 8, dtype=torch.float32)
        x = lazy(torch.randn(5, 8, dtype=torch.float32))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = layer(x)
            with torch.no_grad():
                h.sum()
            h = layer(h)
            with torch.autocast("cpu", enabled=False):
                h = h.float().tanh()
            h = layer(h)
        h.float().pow(2).sum().backward()
        return (layer.weight.grad,)

    same(program, None)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_an_in_place_activation_under_two_heads(chunk: int | None) -> None:
    def program(lazy: Any) -> Any:
        layer = nn.Linear(3, 3)
        h = F.relu(layer(lazy(torch.randn(4, 3))), inplace=True)
        first, second = h.sum(), h.square().sum()
        value = first.item()
        (second + value).backward()
        return second, layer.weight.grad

    same(program, chunk)


@pytest.mark.semantics("S21")
@pytest.mark.parametrize("chunk", CHUNKS)
def test_gan_step(chunk: int | None) -> None:
    def program(lazy: Any) -> Any:
        maker, critic = nn.Linear(2, 3), nn.Linear(3, 1)
        optimizer = torch.optim.SGD(critic.parameters(), 0.1)
        fake = maker(lazy(torch.randn(4, 2)))
        (critic(fake.detach()).square().mean() + critic(lazy(torch.randn(4, 3))).mean()).backward()
        optimizer.step()
        critic(fake).square().mean().backward()
        return maker.weight.grad, critic.weight.grad

    same(program, chunk)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_kernel_is_given_the_layout_it_was_traced_with(chunk: int | None) -> None:
    def program(lazy: Any) -> Any:
        weight, bias = nn.Parameter(torch.randn(2)), nn.Parameter(torch.randn(2))
        h = F.group_norm(lazy(torch.randn(8, 2, 1)), 1, weight, bias)
        h.transpose(0, -1).add_(0.1)
        (h + 0.1).norm().backward()
        return weight.grad, bias.grad

    same(program, chunk)


def test_str_shows_data_and_repr_does_not_run() -> None:
    value = koila.lazy(torch.ones(2)) + 1
    assert "pending" in repr(value)
    assert str(value) == "tensor([2., 2.])"
