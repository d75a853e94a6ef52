"""S8: shapes that depend on data, and control flow on lazy values, with gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.semantics.compare import Lazy, same_as_eager

pytestmark = pytest.mark.semantics("S8")

SHAPES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mask of elements": lambda h, y: h[h > 0],
    "mask of rows": lambda h, y: h[h[:, 0] > 0],
    "mask from labels": lambda h, y: h[y != 1],
    "masked_select": lambda h, y: h.masked_select(h.detach() > 0.1),
    "nonzero": lambda h, y: h[(y > 0).nonzero()[:, 0]],
    "nonzero as a tuple": lambda h, y: h[torch.nonzero(h.detach() > 0, as_tuple=True)],
    "where of one argument": lambda h, y: h[torch.where(y > 0)],
    "argwhere": lambda h, y: h[torch.argwhere(y > 0)[:, 0]],
    "unique": lambda h, y: h[: len(y.unique())],
    "unique with counts": lambda h, y: h * (y.unique(return_counts=True)[1].sum() / len(y)),
    "a class at a time": lambda h, y: torch.stack([h[y == label].mean(0) for label in y.unique()]),
    "repeat_interleave": lambda h, y: torch.repeat_interleave(h, y + 1, dim=0),
    "a slice by a number": lambda h, y: h[: int(y.max()) + 1],
    "split by lengths": lambda h, y: torch.cat([part.sum(0) for part in h.split([1, int(y[1]) + 1, 4 - int(y[1])])]),
    "padding to the longest": lambda h, y: F.pad(h, (0, int(y.max()))),
    "one_hot": lambda h, y: h.T @ F.one_hot(y).to(h.dtype),
    "bincount": lambda h, y: h.sum() * torch.bincount(y).to(h.dtype),
    "topk of a count": lambda h, y: h.topk(max(1, int((y == 2).sum())), dim=0).values,
    "arange of a count": lambda h, y: h[torch.arange(int((y > 0).sum()))],
    "an empty selection": lambda h, y: h[y > 100],
    "a mask of a mask": lambda h, y: h[y > 0][h[y > 0][:, 0] > 0],
    "hard examples": lambda h, y: F.cross_entropy(h, y, reduction="none")[(h.detach().amax(1) < 2)],
}


def values(lazy: Lazy) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.tensor([0, 2, 1, 2, 0, 1])
    weight = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    x, y = lazy(x, y)
    return y, weight, (x @ weight).tanh()


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_that_depends_on_data(name: str) -> None:
    def program(lazy: Lazy) -> Any:
        y, weight, h = values(lazy)
        found = SHAPES[name](h, y)
        loss = found.square().sum() + F.cross_entropy(h, y)
        loss.backward()
        return found.detach(), loss.detach(), weight.grad, found.shape

    same_as_eager(program)


def _early_exit(h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    for step in range(10):
        h = h * 1.3
        if h.abs().max() > 2:
            return h * step
    return h


def _until_it_converges(h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z, steps = torch.zeros_like(h), 0
    while True:
        following = (z * 0.3 + h).tanh()
        steps += 1
        if (following - z).norm() < 1e-3 or steps > 50:
            return following
        z = following


def _by_sample(h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.stack([row * 2 if label == 1 else row.sin() for row, label in zip(h, y, strict=True)])


def _by_experts(h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    found = torch.zeros_like(h)
    for expert in range(3):
        rows = (h.argmax(1) == expert).nonzero()[:, 0]
        if rows.numel():
            found = found.index_add(0, rows, h[rows] * (expert + 1))
    return found


def _skip_bad_batches(h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return h if torch.isfinite(h).all() else torch.zeros_like(h)


def _clipped_by_a_number(h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return h * min(1.0, 1.0 / float(h.detach().norm()))


def _greedy(h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    token, picked = int(y[0]), []
    for _ in range(4):
        token = int(h[token].argmax())
        picked.append(h[token])
    return torch.stack(picked)


def _curriculum(h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    hardest = F.cross_entropy(h, y, reduction="none").detach().argsort(descending=True)
    return h[hardest[: len(hardest) // 2]]


FLOWS = (
    _early_exit, _until_it_converges, _by_sample, _by_experts, _skip_bad_batches, _clipped_by_a_number, _greedy,
    _curriculum,
)  # fmt: skip


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.__name__.strip("_"))
def test_control_flow_on_lazy_values(flow: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    def program(lazy: Lazy) -> Any:
        y, weight, h = values(lazy)
        found = flow(h, y)
        loss = found.square().mean() + F.cross_entropy(h, y)
        loss.backward()
        return found.detach(), loss.detach(), weight.grad

    same_as_eager(program, (1, 4), in_bytes=True)


def test_shapes_that_change_from_step_to_step() -> None:
    def program(lazy: Lazy) -> Any:
        weight = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
        optimizer, seen = torch.optim.SGD([weight], 0.1), []
        for _ in range(5):
            x = lazy(torch.randn(6, 4, dtype=torch.float64))
            h = x @ weight
            kept = h[h[:, 0] > h[:, 1]]
            loss = kept.square().sum() / max(1, len(kept)) + h.mean().square()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += [loss.item(), len(kept)]
        return seen, weight.detach()

    same_as_eager(program, (1, 4), in_bytes=True)
