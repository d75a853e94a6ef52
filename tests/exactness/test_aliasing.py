"""Writes in place, slice assignment and views of views inside a program: eager's semantics, whole and in chunks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import koila

BATCH = 7
Program = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    """A program of an input [7, 4, 6] and a weight [6, 6]; found by every test below."""
    PROGRAMS[function.__name__] = function
    return function


@program
def relu_in_place(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return nn.ReLU(inplace=True)(x @ w).square().mean()


@program
def add_in_place(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = x @ w
    x = x * 2
    x += h.tanh()
    return (x * h).sum()


@program
def chained_in_place(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).mul_(2.0).sub_(x.mean(-1, keepdim=True)).clamp_(-0.5, 0.5).exp_().sum()


@program
def slice_assigned(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = x @ w
    h[:, 0] = 0
    return (h.exp() * x).mean()


@program
def slice_assigned_a_value(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = x @ w
    h[:, 1, 2:5] = h[:, 2, 1:4] * 2
    h[..., -1] = x[..., 0]
    return h.square().sum()


@program
def sample_assigned(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = x @ w
    h[2] = 1.0
    return (h * x).sum()


@program
def mask_assigned(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = x @ w
    return h.masked_fill_(x > 0.5, -1.0).square().sum()


@program
def view_written_through_its_base(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = x @ w
    part = h[:, 1:3]
    h.mul_(3.0)
    return (part * x[:, :2]).sum() + h.sum()


@program
def base_written_through_its_view(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = x @ w
    h[:, 1:3].mul_(3.0)
    return (h * x).sum()


@program
def view_of_a_view_written(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = x @ w
    h.transpose(1, 2)[:, 2:4].select(2, 1).zero_()
    return (h * x).sum()


@program
def two_views_of_one_base(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = x @ w
    left, right = h[..., :4], h[..., 2:]
    left.add_(1.0)
    right.mul_(left.mean())
    return (left * right).sum() + h.sum()


@program
def flat_view_written(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = (x @ w).contiguous()
    h.view(BATCH * 4, 6)[:, 0].mul_(5.0)
    return h.square().mean()


@program
def chunks_and_splits_written(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    # A result of chunk or split may not be written in place: its slices may.
    h = (x @ w).clone()
    for index in range(2):
        h.narrow(2, 3 * index, 3).add_(index + 1.0)
    first, second = h.chunk(2, dim=2)
    return (first * second).sum()


@program
def out_argument(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = (x @ w).detach()
    torch.mul(h, 2.0, out=h)
    return ((x @ w) * h).sum()


@program
def read_before_the_write(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = x @ w
    before = h.sum() + h.mean(0).square().sum()
    h += 1.0
    return before * h.mean()


@program
def copied_then_written(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = x @ w
    kept = h.clone()
    h.zero_()
    return (kept * x).sum() + h.sum()


@program
def filled_by_copy(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = torch.zeros_like(x)
    h[:, :2].copy_(x[:, 2:] @ w)
    return (h + x).square().sum()


@program
def written_by_index(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = x @ w
    h[:, torch.tensor([0, 3])] = x[:, torch.tensor([1, 2])]
    return h.square().sum()


@program
def index_added(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = x @ w
    h.index_add_(1, torch.tensor([0, 0, 2]), x[:, :3])
    return h.square().sum()


@program
def new_statistics(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = x @ w
    h -= x.mean(0, keepdim=True)
    h /= x.std(0, keepdim=True) + 0.1
    return h.sum() + x.square().sum()


@program
def dropout_in_place(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.dropout(x @ w, 0.3, training=True, inplace=True).square().sum()


@program
def unbound_and_stacked(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    rows = list((x @ w).unbind(1))
    rows[1] = rows[1] * rows[0]
    return torch.stack(rows, 1).square().sum()


def outcome(function: Program, dtype: torch.dtype, lazy: bool, chunk_size: int | None) -> list[torch.Tensor]:
    """Value, gradients and generator."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(*s, generator=generator, dtype=torch.float64).to(dtype) for s in ((BATCH, 4, 6), (6, 6)))
    x.requires_grad_()
    w.requires_grad_()
    torch.manual_seed(3)
    before = x.detach().clone()
    with koila.budget(chunk_size=chunk_size):
        result = function(koila.lazy(x) if lazy else x, w)
        result.backward()
        value = koila.run(result, detach=True)
    assert torch.equal(x, before)
    assert x.grad is not None and w.grad is not None
    return [value.detach(), x.grad, w.grad, torch.get_rng_state()]


@pytest.mark.semantics("S2", "S3")
@pytest.mark.parametrize("name", PROGRAMS)
def test_unsplit_is_bit_identical(name: str) -> None:
    found = outcome(PROGRAMS[name], torch.float32, True, None)
    expected = outcome(PROGRAMS[name], torch.float32, False, None)
    assert [torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True)] == [True] * 4


@pytest.mark.semantics("S2", "S3")
@pytest.mark.parametrize("name", PROGRAMS)
def test_in_chunks_is_exact(name: str) -> None:
    expected = outcome(PROGRAMS[name], torch.float64, False, None)
    for chunk_size in (1, 2, 3, 4, 6):
        found = outcome(PROGRAMS[name], torch.float64, True, chunk_size)
        for mine, theirs in zip(found[:3], expected[:3], strict=True):
            assert float((mine - theirs).norm()) <= 1e-10 * float(theirs.norm()), f"chunk {chunk_size}"
        assert torch.equal(found[3], expected[3])


def test_programs_are_cut_and_not_run_whole() -> None:
    """Aliasing alone is no reason to run whole."""
    koila.metrics.reset()
    for function in PROGRAMS.values():
        outcome(function, torch.float64, True, 3)
    whole = [name for name in koila.metrics.counter_names() if name.startswith("fallback::")]
    assert whole == []


@pytest.mark.semantics("S2")
def test_a_value_made_before_a_write_is_the_old_one_after_the_run() -> None:
    x = koila.lazy(torch.ones(3, 2))
    h = x * 2
    doubled = h * 2
    h.add_(1.0)
    assert koila.run(doubled).tolist() == [[4.0, 4.0]] * 3
    assert koila.run(h).tolist() == [[3.0, 3.0]] * 3


@pytest.mark.semantics("S3")
def test_a_view_of_an_input_sees_a_write_to_the_lazy_input() -> None:
    real = torch.zeros(3, 2)
    x = koila.lazy(real)
    view, doubled = x[:, 0], x * 2
    x.add_(1.0)
    assert view.sum().item() == 3.0
    assert doubled.sum().item() == 0.0
    assert torch.equal(real, torch.ones(3, 2))


@pytest.mark.semantics("S2")
@pytest.mark.parametrize("chunk_size", [None, 1, 2])
def test_an_input_written_in_place_is_written(chunk_size: int | None) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = (x.sum(1, keepdim=True) + w).tanh()
        x += h
        return (x * x).sum()

    weight = torch.linspace(-1, 1, 3, dtype=torch.float64, requires_grad=True)
    expected, found = torch.ones(2, 5, 3, dtype=torch.float64).unbind(0)
    expected, found = expected.clone(), found.clone()
    function(expected, weight).backward()
    gradient, weight.grad = weight.grad, None
    with koila.budget(chunk_size=chunk_size):
        function(koila.lazy(found), weight).backward()
    torch.testing.assert_close(weight.grad, gradient, rtol=1e-10, atol=0)
    torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-10, atol=0)


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_a_program_that_eager_refuses_is_refused_with_its_words(chunk_size: int | None) -> None:
    weight = torch.ones(3, 3, requires_grad=True)
    with koila.budget(chunk_size=chunk_size):
        h = (koila.lazy(torch.ones(5, 3)) @ weight).tanh()
        h += 1.0
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            h.sum().backward()
    assert weight.grad is None
