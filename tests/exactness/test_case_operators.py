"""Indexing, contractions, transforms and linear algebra, within samples and across them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.exactness.cases import Case, Sizes, table, verify


def _matrix(s: Sizes) -> torch.Tensor:
    return s.x(s.B, s.D)


def _cube(s: Sizes) -> torch.Tensor:
    return s.x(s.B, s.T, s.D)


def _indexed(s: Sizes) -> tuple[torch.Tensor, ...]:
    return s.x(s.B, s.D), s.y(s.B, s.D, high=s.D), s.x(s.B, s.D)


def _pair(s: Sizes) -> tuple[torch.Tensor, ...]:
    return s.x(s.B, s.T, s.D), s.x(s.B, s.H, s.D)


def _case(name: str, program: Callable[..., Any], inputs: Callable[[Sizes], Any] = _matrix, whole: str = "") -> Case:
    return Case(name, program, inputs, whole=whole)


def _after(name: str, program: Callable[[torch.Tensor], Any]) -> Case:
    """Across samples, after something that can be cut."""
    return Case(name, lambda x: program(x.tanh() + x), _matrix)


def _written(x: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    out[torch.arange(x.shape[0])[:, None], i] = v
    return out.sum(1) * x.sum(1)


def _assigned(x: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out = x * 2
    out[:, 0] = v[:, 1]
    out[:, 1:3] += 1
    return out


@table(
    _case("gather", lambda x, i, v: x.gather(1, i), _indexed),
    _case("gather over the batch", lambda x, i: x.gather(0, i), lambda s: (s.x(s.B, s.D), s.y(s.B, s.D, high=s.B))),
    _case("scatter", lambda x, i, v: x.scatter(1, i[:, :1], v[:, :1]), _indexed),
    _case("scatter a number", lambda x, i, v: x.scatter(1, i, 2.0), _indexed),
    _case("scatter_add", lambda x, i, v: x.scatter_add(1, i, v), _indexed),
    _case("scatter_add into zeros", lambda x, i, v: torch.zeros_like(x).scatter_add_(1, i, v), _indexed),
    _case(
        "scatter_add over the batch",
        lambda v, i: torch.zeros(5, v.shape[1], dtype=v.dtype).scatter_add(0, i, v),
        lambda s: (s.x(s.B, s.D), s.y(s.B, s.D)),
    ),
    _case("scatter_reduce mean", lambda x, i, v: x.scatter_reduce(1, i, v, "mean"), _indexed),
    _case("scatter_reduce amax", lambda x, i, v: x.scatter_reduce(1, i, v, "amax", include_self=False), _indexed),
    _case(
        "index_add over the batch",
        lambda v, y: torch.zeros(5, v.shape[1], dtype=v.dtype).index_add(0, y, v),
        lambda s: (s.x(s.B, s.D), s.y(s.B)),
    ),
    _case("index_add within samples", lambda v: v.index_add(1, torch.tensor([0, 2, 0]), v[:, :3])),
    _case("index_select within samples", lambda x: x.index_select(1, torch.tensor([2, 0, 2]))),
    _after("index_select over the batch", lambda x: x.index_select(0, torch.tensor([3, 0, 3, 1]))),
    _case("index_put", lambda x, i, v: x.index_put((torch.arange(x.shape[0]), i[:, 0]), v[:, 0]), _indexed),
    _case(
        "index_put accumulate",
        lambda x, i, v: x.index_put((torch.arange(x.shape[0])[:, None], i), v, accumulate=True),
        _indexed,
    ),
    _case(
        "index_put accumulate over the batch",
        lambda x, y: torch.zeros(5, x.shape[1], dtype=x.dtype).index_put((y,), x, accumulate=True),
        lambda s: (s.x(s.B, s.D), s.y(s.B)),
    ),
    _case(
        "rows and columns written",
        _written,
        lambda s: (s.x(s.B, s.D), torch.rand(s.B, s.D).argsort(1)[:, :2], s.x(s.B, 2)),
    ),
    _case("slices assigned", _assigned, _indexed),
    _case("x[:, i]", lambda x: x[:, torch.tensor([1, 1, 0])]),
    _after("x[i]", lambda x: x[torch.tensor([1, 1, 0])]),
    _after("x[1:-1]", lambda x: x[1:-1].sin() * x[2:]),
    _after("x[::2]", lambda x: x[::2].sin()),
    _case("x[0]", lambda x: x[0].sin().sum() + (x * x[0]).sum(1)),
    _case("x[-1]", lambda x: x - x[-1:]),
    _case(
        "x[y] prototypes",
        lambda x, y: x - torch.zeros(5, x.shape[1], dtype=x.dtype).index_add(0, y, x)[y],
        lambda s: (s.x(s.B, s.D), s.y(s.B)),
    ),
    _case(
        "x[mask]", lambda x, m: x[m].sin(), lambda s: (s.x(s.B, s.D), s.mask(s.B)), "the number of rows depends on data"
    ),
    _case("masked_fill", lambda x, m: x.masked_fill(m, -3.0), lambda s: (s.x(s.B, s.D), s.mask(s.B, s.D))),
    _case(
        "masked_scatter",
        lambda x, m: x.masked_scatter(m, x.flatten().sin()),
        lambda s: (s.x(s.B, s.D), s.mask(s.B, s.D)),
    ),
    _case("last token", lambda x, n: x[torch.arange(x.shape[0]), n], lambda s: (_cube(s), s.y(s.B, high=s.T))),
    _case("select and narrow", lambda x: x.select(1, 1) * x.narrow(1, 0, 1).squeeze(1), _cube),
    _case("tril", lambda x: x.tril() + x.triu(1).sin(), lambda s: s.x(s.B, s.D, s.D)),
    _case("diagonal of samples", lambda x: x.diagonal(dim1=1, dim2=2), lambda s: s.x(s.B, s.D, s.D)),
    _case("diag_embed", lambda x: torch.diag_embed(x)),
    _case("one_hot", lambda x, y: x * torch.nn.functional.one_hot(y, x.shape[1]), lambda s: (s.x(s.B, s.C), s.y(s.B))),
    _case(
        "bucketize and searchsorted", lambda x: x * torch.bucketize(x.detach(), torch.linspace(-1, 1, 5, dtype=x.dtype))
    ),
    _case(
        "bincount of labels",
        lambda x, y: x.sum(1) / torch.bincount(y, minlength=5).to(x.dtype)[y],
        lambda s: (s.x(s.B, s.D), s.y(s.B)),
        "a count of classes depends on data",
    ),
)
def test_indexing(case: Case) -> None:
    verify(case)


@table(
    _case("cdist within samples", lambda a, b: torch.cdist(a, b), _pair),
    _case("cdist p=1", lambda a, b: torch.cdist(a, b, p=1.0), _pair),
    _case(
        "cdist to prototypes",
        lambda x: torch.cdist(x, torch.linspace(-1, 1, 3 * x.shape[1], dtype=x.dtype).view(3, -1)),
    ),
    _case("einsum bij,bkj->bik", lambda a, b: torch.einsum("bij,bkj->bik", a, b), _pair),
    _case("einsum bij,bkj->ik", lambda a, b: torch.einsum("bij,bkj->ik", a, b), _pair),
    _case("einsum bij,bij->b", lambda a, b: torch.einsum("bij,bij->b", a, a), _pair),
    _case("einsum bij,cij->bc", lambda a, b: torch.einsum("bij,ckj->bc", a, b), _pair),
    _case("einsum bij->ji", lambda a, b: torch.einsum("bij->ji", a) + b.sum(), _pair),
    _case("einsum with an ellipsis", lambda a, b: torch.einsum("...i,...i->...", a, a), _pair),
    _case("matmul of a batch and a matrix", lambda a, b: a @ b[0].T, _pair),
    _case("matmul of three", lambda a, b: torch.linalg.multi_dot([a[:, 0], b[:, 0].T, a[:, 0]]), _pair),
    _case("covariance of the features", lambda a, b: a.flatten(0, 1).T @ a.flatten(0, 1), _pair),
    _case("outer of each sample", lambda x: x[:, :, None] * x[:, None, :]),
    _case("bmm", lambda a, b: torch.bmm(a, b.transpose(1, 2)), _pair),
    _case("baddbmm", lambda a, b: torch.baddbmm(a[:, :, :1], a, b.transpose(1, 2), beta=0.5, alpha=2.0), _pair),
    _case("addmm of the batch", lambda x: torch.addmm(x, x, torch.eye(x.shape[1], dtype=x.dtype) + 1, beta=0.3)),
    _case("tensordot", lambda a, b: torch.tensordot(a, a, dims=([1, 2], [1, 2])) + b.mean(), _pair),
    _case("kron within samples", lambda x: torch.vmap(torch.kron)(x, x), whole="vmap over the batch"),
    _case("cosine_similarity", lambda a, b: torch.cosine_similarity(a[:, :1], b[:, :1], dim=-1), _pair),
)
def test_contraction(case: Case) -> None:
    verify(case)


@table(
    _case("fft", lambda x: torch.fft.fft(x)),
    _case("rfft and back", lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2, n=x.shape[-1])),
    _case("fft2", lambda x: torch.fft.fft2(x).abs().square(), _cube),
    _case("fftn over samples", lambda x: torch.fft.fftn(x, dim=(1, 2)).real, _cube),
    _after("fft over the batch", lambda x: torch.fft.fft(x, dim=0).abs().square()),
    _case("fftshift", lambda x: torch.fft.fftshift(torch.fft.fft(x, dim=1), dim=1).imag),
    _case(
        "stft",
        lambda x: torch.stft(x, 4, 2, window=torch.ones(4, dtype=x.dtype), return_complex=True).abs(),
        lambda s: s.x(s.B, 16),
    ),
    _case("sort within samples", lambda x: x.sort(1)),
    _case("argsort within samples", lambda x: x.gather(1, x.argsort(1, descending=True))),
    _case("topk within samples", lambda x: x.topk(2, dim=1)),
    _case("kthvalue and median within samples", lambda x: x.kthvalue(2, dim=1).values + x.median(1).values),
    _case("max with indices within samples", lambda x: x.max(1)),
    _after("sort over the batch", lambda x: x.sort(0)),
    _after("topk over the batch", lambda x: x.topk(2, dim=0)),
    _case("max with indices over the batch", lambda x: x.max(0)),
    _case("argmax over the batch", lambda x: x.gather(0, x.argmax(0, keepdim=True))),
    _case("amax with ties over the batch", lambda x: x.round().amax(0) + x.sin().amin(0)),
    _case("cumsum within samples", lambda x: x.cumsum(1)),
    _after("cumsum over the batch", lambda x: x.cumsum(0)),
    _case("cumprod and logcumsumexp", lambda x: x.cumprod(1) + x.logcumsumexp(1)),
    _case("cummax", lambda x: x.cummax(1).values + x.cummin(1).values),
    _case("diff", lambda x: x.diff(dim=1)),
    _after("diff over the batch", lambda x: x.diff(dim=0)),
    _case("flip and roll within samples", lambda x: x.flip(1) * x.roll(1, 1)),
    _after("softmax over the batch", lambda x: x.softmax(0)),
    _after("log_softmax over the batch", lambda x: x.log_softmax(0)),
    _case("logsumexp over the batch", lambda x: x.logsumexp(0)),
    _case("mean, var, std, prod over the batch", lambda x: (x.mean(0), x.var(0), x.std(0), x.prod(0))),
    _case("norms over the batch", lambda x: (x.norm(dim=0), x.norm(p=1), x.norm(p=float("inf"), dim=0))),
    _case(
        "any, all, count_nonzero over the batch",
        lambda x: ((x > 1).any(0), (x > -1).all(0), (x > 0).count_nonzero(0), x.sum()),
    ),
    _case("quantile within samples", lambda x: x.quantile(0.3, dim=1)),
    _after("quantile over the batch", lambda x: x.quantile(0.3, dim=0)),
    _case(
        "unique of labels",
        lambda x, y: x.sum() * y.unique().numel(),
        lambda s: (s.x(s.B, s.D), s.y(s.B)),
        "the number of classes depends on data",
    ),
    _case("conv of signals by unfold", lambda x: x.unfold(1, 2, 1).mean(-1)),
    _case("complex", lambda x: torch.view_as_complex(x.unflatten(1, (-1, 2))).angle()),
    _case("polynomial features", lambda x: torch.cat([x, x[:, :1] * x, x.pow(3)], 1)),
    _case("meshgrid and stack", lambda x: torch.stack([x.sin(), x.cos()], -1).flatten(1)),
)
def test_transform(case: Case) -> None:
    verify(case)


def _square(s: Sizes) -> torch.Tensor:
    return s.x(s.B, s.D, s.D)


def _positive(x: torch.Tensor) -> torch.Tensor:
    return x @ x.mT + torch.eye(x.shape[-2], dtype=x.dtype)


@table(
    _case("inverse", lambda x: torch.linalg.inv(_positive(x)), _square),
    _case("solve", lambda x: torch.linalg.solve(_positive(x), x), _square),
    _case("solve for vectors", lambda x: torch.linalg.solve(_positive(x), x[:, :, 0]), _square),
    _case("cholesky", lambda x: torch.linalg.cholesky(_positive(x)), _square),
    _case("cholesky_solve", lambda x: torch.cholesky_solve(x, torch.linalg.cholesky(_positive(x))), _square),
    _case("triangular solve", lambda x: torch.linalg.solve_triangular(_positive(x).tril(), x, upper=False), _square),
    _case(
        "det and slogdet",
        lambda x: torch.linalg.det(_positive(x)) + torch.linalg.slogdet(_positive(x)).logabsdet,
        _square,
    ),
    _case("eigh", lambda x: torch.linalg.eigh(_positive(x)).eigenvalues, _square),
    _case("eigvalsh", lambda x: torch.linalg.eigvalsh(_positive(x)), _square),
    _case("svdvals", lambda x: torch.linalg.svdvals(x), _square),
    _case("svd", lambda x: torch.linalg.svd(x, full_matrices=False).S, _square),
    _case("qr", lambda x: torch.linalg.qr(x).R.abs(), _square),
    _case("pinv", lambda x: torch.linalg.pinv(_positive(x)), _square),
    _case("matrix_exp", lambda x: torch.linalg.matrix_exp(x * 0.1), _square),
    _case("matrix_power", lambda x: torch.linalg.matrix_power(x, 3), _square),
    _case("matrix norms", lambda x: torch.linalg.matrix_norm(x) + torch.linalg.norm(x, dim=(1, 2)), _square),
    _case("cross", lambda x: torch.linalg.cross(x[:, :3], x[:, 1:4]), lambda s: s.x(s.B, 4)),
    _after("whitening over the batch", lambda x: torch.linalg.solve(torch.linalg.cholesky(_positive(x.T)), x.T).T),
    _after("least squares over the batch", lambda x: torch.linalg.lstsq(_positive(x.T), x.sum(0)[:, None]).solution),
)
def test_linear_algebra(case: Case) -> None:
    verify(case, repeats=False)


def test_mixture_of_experts() -> None:
    class Experts(nn.Module):
        def __init__(self, s: Sizes) -> None:
            super().__init__()
            self.gate = nn.Linear(s.D, 3)
            self.weight = nn.Parameter(torch.randn(3, s.D, s.C))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            share, chosen = self.gate(x).softmax(-1).topk(2, -1)
            each = torch.einsum("bd,bkdc->bkc", x, self.weight[chosen])
            usage = torch.nn.functional.one_hot(chosen, 3).to(x.dtype).mean((0, 1))
            balance = (usage * self.gate(x).softmax(-1).mean(0)).sum()
            return (each * share[..., None]).sum() + balance

    verify(Case("mixture of experts", lambda net, x: net(x), _matrix, Experts))
