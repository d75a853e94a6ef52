"""S6: iteration, indexing by every kind of index, reading and writing, and the number protocol."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import koila
from tests.semantics.compare import Lazy, same_as_eager

pytestmark = pytest.mark.semantics("S6")

B = 5
INDICES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "int": lambda x, i: 2,
    "negative int": lambda x, i: -1,
    "numpy int": lambda x, i: np.int64(2),
    "bool": lambda x, i: True,
    "none": lambda x, i: None,
    "ellipsis": lambda x, i: ...,
    "slice": lambda x, i: slice(1, 4),
    "slice with a step": lambda x, i: slice(None, None, 2),
    "slice from the right": lambda x, i: slice(-3, -1),
    "empty slice": lambda x, i: slice(3, 3),
    "slice beyond": lambda x, i: slice(2, 100),
    "slice of lazy numbers": lambda x, i: slice(i[0], i[0] + 2),
    "tuple": lambda x, i: (1, 2),
    "tuple of slices": lambda x, i: (slice(1, None), slice(None, 2)),
    "tuple with all": lambda x, i: (slice(None), None, ..., 0),
    "list": lambda x, i: [0, 2, 0],
    "list of bools": lambda x, i: [True, False, True, False, True],
    "range": lambda x, i: list(range(3)),
    "array": lambda x, i: np.array([3, 1]),
    "real tensor": lambda x, i: torch.tensor([4, 0, 0]),
    "real tensor of two dims": lambda x, i: torch.tensor([[0, 1], [2, 3]]),
    "real 0-d tensor": lambda x, i: torch.tensor(2),
    "real mask": lambda x, i: torch.tensor([True, False, True, True, False]),
    "lazy tensor": lambda x, i: i,
    "lazy 0-d tensor": lambda x, i: i[1],
    "lazy element as an int": lambda x, i: int(i[1]),
    "lazy mask of rows": lambda x, i: x[:, 0, 0] > 0,
    "lazy mask of elements": lambda x, i: x > 0,
    "lazy mask from labels": lambda x, i: i != 2,
    "uint8 mask": lambda x, i: (x[:, 0, 0] > 0).long() == 1,
    "two tensors": lambda x, i: (i, i % 3),
    "two tensors that broadcast": lambda x, i: (i[:, None], torch.tensor([0, 2])),
    "tensors apart": lambda x, i: (i, slice(None), i % 2),
    "arange and labels": lambda x, i: (torch.arange(B), i % 3),
    "mask and int": lambda x, i: (x[:, 0, 0] > 0, 1),
    "negative tensor": lambda x, i: -i - 1,
    "int32": lambda x, i: i.int(),
    "argsort": lambda x, i: x[:, 0, 0].argsort(),
    "nonzero": lambda x, i: (x > 0).nonzero(as_tuple=True),
}


def inputs(lazy: Lazy) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, i = torch.randn(B, 3, 2, dtype=torch.float64), torch.tensor([3, 0, 2, 2, 1])
    weight = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    x, i = lazy(x, i)
    return x * weight, i, weight


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("name", INDICES)
def test_a_value_is_indexed(name: str) -> None:
    def program(lazy: Lazy) -> Any:
        x, i, weight = inputs(lazy)
        found = x[INDICES[name](x, i)]
        (found.square().sum() + x.sum()).backward()
        return found.detach(), weight.grad

    same_as_eager(program)


@pytest.mark.parametrize("name", [name for name in INDICES if name != "bool"])
def test_a_part_is_assigned(name: str) -> None:
    def program(lazy: Lazy) -> Any:
        x, i, weight = inputs(lazy)
        y = x * 2
        index = INDICES[name](x, i)
        y[index] = 0.5
        z = x * 3
        z[index] = (x.detach() + 1)[index]
        (y.square().sum() + z.square().sum()).backward()
        return y.detach(), z.detach(), weight.grad

    same_as_eager(program)


def test_a_real_tensor_is_indexed_by_lazy_ones() -> None:
    def program(lazy: Lazy) -> Any:
        x, i, weight = inputs(lazy)
        table = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
        found = table[i] * x[:, 0] + table[i, i % 2][:, None]
        found.sum().backward()
        return found.detach(), table.grad, weight.grad

    same_as_eager(program, (1, 2, 3), in_bytes=True)


def test_a_real_tensor_is_written_by_lazy_parts() -> None:
    def program(lazy: Lazy) -> Any:
        x, i, _ = inputs(lazy)
        target = torch.zeros(B, 2, dtype=torch.float64)
        target[i] = x[:, 0].detach()
        target[:, 1] = x[:, 1, 1].detach()
        target[x[:, 0, 0].detach() > 0] += 1
        target.index_add_(0, i, x[:, 2].detach())
        return target

    same_as_eager(program)


@pytest.mark.parametrize("index", [7, (0, 5), "text", (0, 0, 0, 0), torch.tensor([9]), [True, False], 1.5])
def test_a_wrong_index_has_eagers_error(index: Any) -> None:
    eager = torch.ones(5, 3, 2)
    with pytest.raises(Exception) as expected:
        eager[index]
    with pytest.raises(type(expected.value)):
        koila.lazy(eager)[index].run()


def test_iteration_of_every_kind() -> None:
    def program(lazy: Lazy) -> Any:
        x, i, weight = inputs(lazy)
        first, *middle, last = x
        rows = [row * number for number, row in enumerate(x)]
        pairs = [a + b for a, b in zip(x, reversed(list(x)), strict=True)]
        total = sum(row.sum() for row in x) + first.sum() * 2 + last.mean() + sum(m.amax() for m in middle)
        total = total + torch.stack(rows).sum() + torch.cat(pairs).square().sum() + max(x[0, 0].unbind())
        nested = [element * 2 for row in x for column in row for element in column]
        (total + torch.stack(nested).sum()).backward()
        labels = [int(label) for label in i]
        return total.detach(), weight.grad, labels, [len(row) for row in x], 3 in i, list(map(bool, i > 1))

    same_as_eager(program, (1, 2, 3), in_bytes=True)


def test_a_0d_tensor_is_no_sequence() -> None:
    scalar = koila.lazy(torch.tensor(1.0))
    for ask in (iter, list, lambda t: [*t]):
        with pytest.raises(TypeError, match="iteration over a 0-d tensor"):
            ask(scalar)
    with pytest.raises(TypeError, match="len\\(\\) of a 0-d tensor"):
        len(scalar)


NUMBERS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "comparisons": lambda s, n: (bool(s > 0), bool(s < 0), bool(s == s), bool(s != 1), 2 > s, 0 <= n),  # noqa: SIM300
    "int": lambda s, n: (int(s), int(n), operator.index(n), math.trunc(s.item())),
    "float": lambda s, n: (float(s), float(n), complex(s), round(float(s), 3)),
    "math": lambda s, n: (math.sqrt(abs(s)), math.isnan(s), math.floor(s), math.exp(s), math.isclose(s, s)),
    "range and repeat": lambda s, n: (list(range(n)), [0] * n, "ab" * int(n)),
    "list index": lambda s, n: [10, 20, 30, 40][n],
    "sort": lambda s, n: (max(s, n), min(s, n), [float(t) for t in sorted([s, n * 1.0, s - 1])]),
    "logic": lambda s, n: (n and s, s or n, not s, bool(n) is True, any([s > 0, n > 5]), all([n, s])),
    "mixed": lambda s, n: (3 + s, s - 1.5, 2 * n, n / 2, 7 // n, 7 % n, 2**n, s**2, divmod(7, int(n)), -s, +s, abs(s)),
    "arrays": lambda s, n: (np.float64(2.0) * s, float(np.mean([s.item(), n.item()])), np.asarray(s).item()),
    "format": lambda s, n: (f"{s:.3f}", f"{n}", f"{n:>4d}" if False else f"{int(n):>4d}", f"{s:.1e}", "%d" % n),  # noqa: UP031
    "hash": lambda s, n: len({s, n, s}),
    "bits": lambda s, n: (n << 1, n >> 1, n & 3, n | 4, n ^ 1, ~n, True & (n > 0)),
    "in place": lambda s, n: operator.iadd(s.clone(), 1) + operator.imul(n.clone(), 2),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_value_is_a_number(name: str) -> None:
    def program(lazy: Lazy) -> Any:
        x = lazy(torch.tensor([0.5, 1.25, -0.25, 1.0], dtype=torch.float64))
        s, n = x.sum() * 0.5, (x > 0).sum()
        return NUMBERS[name](s, n)

    same_as_eager(program)


def test_numbers_of_lazy_values_in_a_program_with_gradients() -> None:
    def program(lazy: Lazy) -> Any:
        x, i, weight = inputs(lazy)
        scale, count = float(x.detach().abs().max()), int((x > 0).sum())
        loss = (x / scale).sum() / max(count, 1) + x[: int(i[1]) + 2].sum() * len(x)
        loss.backward()
        return loss.item(), weight.grad

    same_as_eager(program, (1, 2, 3), in_bytes=True)
