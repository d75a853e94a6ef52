"""Sizes that stand still while others change: what follows from them must not be taken for a constant (Rule 1)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import koila
from koila.ir.cache import clear_all

Program = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
PROGRAMS: dict[str, Program] = {
    "mean": lambda x, w: (x @ w).tanh().mean(),
    "var": lambda x, w: (x @ w).tanh().var(),
    "std over two dimensions": lambda x, w: (x @ w).tanh().std((0, 1)).sum(),
    "mse": lambda x, w: F.mse_loss(x @ w, torch.ones_like(x)),
    "fftshift": lambda x, w: (
        torch.fft.fftshift((x @ w).tanh(), dim=1) * torch.arange(x.shape[1], dtype=torch.float64).view(-1, 1)
    ).sum(),
    "halves": lambda x, w: (a := (x @ w).tanh().chunk(2, 1))[0].exp().sum() + a[1].square().mean(),
    "a mean over twice the length and one": lambda x, w: torch.cat(
        [(h := (x @ w).tanh()), h.exp(), h[:, :1]], 1
    ).mean(),
    "layer norm over two dimensions": lambda x, w: F.layer_norm(x @ w, x.shape[1:]).pow(3).mean(),
}
SIZES = {
    "equal products": [(4, 6), (6, 4), (3, 8), (8, 16), (6, 12), (5, 7)],
    "larger equal products": [(16, 32), (32, 16), (32, 32), (7, 11)],
    "equal ratios": [(4, 6), (8, 12), (6, 6), (10, 4), (4, 10)],
    "equal halves": [(5, 8), (5, 9), (5, 12), (5, 13), (7, 7)],
    "small equal halves": [(4, 4), (6, 5), (4, 12), (7, 13)],
    "equal products of what follows": [(9, 2), (5, 4), (4, 6), (6, 9)],
    "a half that is the batch": [(4, 8), (6, 13), (9, 10), (5, 12)],
    "equal thirds": [(5, 12), (5, 13), (5, 14), (5, 21), (6, 30)],
}


@pytest.mark.parametrize("chunk_size", [1, 2])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_are_those_of_eager_at_every_size(name: str, sizes: str, chunk_size: int) -> None:
    clear_all()
    torch.manual_seed(0)
    program = PROGRAMS[name]
    weight = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    for batch, length in SIZES[sizes]:
        x = torch.randn(batch, length, 3, dtype=torch.float64)
        expected = program(x, weight)
        (theirs,) = torch.autograd.grad(expected, weight)
        weight.grad = None
        with koila.budget(chunk_size=chunk_size):
            found = program(koila.lazy(x), weight)
            found.backward()
        assert weight.grad is not None
        assert torch.allclose(found.detach(), expected.detach(), rtol=1e-10), (batch, length)
        assert (weight.grad - theirs).norm() <= 1e-10 * theirs.norm() + 1e-14, (batch, length)
