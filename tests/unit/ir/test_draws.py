"""Random numbers are drawn when they are recorded, by eager's kernel, and kept in their smallest exact form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import koila
from koila.ir.draws import BitSource, Source


@pytest.mark.parametrize("shape", [(1,), (7,), (8,), (3, 5), (11, 4, 6), (1025, 1031)])
def test_bits_are_the_mask(shape: tuple[int, ...]) -> None:
    mask = torch.empty(shape, dtype=torch.uint8).bernoulli_(0.3, generator=torch.Generator().manual_seed(0))
    source = BitSource(mask)
    assert source.num_bytes == (mask.numel() + 7) // 8
    assert torch.equal(source.whole(), mask.bool())
    for start in range(min(shape[0], 5)):
        for stop in range(start + 1, min(shape[0], 6)):
            assert torch.equal(source.rows(start, stop), mask[start:stop].bool())


def test_other_numbers_are_kept_as_they_are() -> None:
    numbers = torch.randn(5, 3)
    source = Source(numbers)
    assert source.whole() is numbers and torch.equal(source.rows(1, 3), numbers[1:3])


RANDOM: dict[str, Callable[[Any], Any]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout of a transposed tensor": lambda x: F.dropout(x.t(), 0.3).t(),
    "dropout1d": lambda x: F.dropout1d(x[..., None], 0.5).squeeze(-1),
    "rand_like": lambda x: x + torch.rand_like(x),
    "randn_like": lambda x: x * torch.randn_like(x),
    "bernoulli_": lambda x: x * torch.zeros_like(x).bernoulli_(0.4),
    "normal_": lambda x: x + torch.empty_like(x).normal_(),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, tau=0.7),
    "bernoulli of data": lambda x: x * torch.bernoulli(x.sigmoid()),
    "multinomial": lambda x: x + torch.multinomial(x.softmax(-1), 1),
    "rrelu": lambda x: F.rrelu(x, training=True),
}


@pytest.mark.semantics("S19")
@pytest.mark.parametrize("chunk_size", [None, 1, 3])
@pytest.mark.parametrize("name", RANDOM)
def test_values_and_generator_are_eagers(name: str, chunk_size: int | None) -> None:
    x = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(3)
    expected, between, state = RANDOM[name](x).square(), torch.rand(2), torch.get_rng_state()
    torch.manual_seed(3)
    with koila.budget(chunk_size=chunk_size):
        found = RANDOM[name](koila.lazy(x)).square()
        assert torch.equal(torch.rand(2), between), "an eager draw in between sees the generator as eager's"
        torch.testing.assert_close(koila.run(found), expected, rtol=1e-12, atol=0)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.semantics("S19")
def test_a_value_that_is_never_read_still_consumes_its_numbers() -> None:
    torch.manual_seed(3)
    F.dropout(torch.ones(7))
    expected = torch.rand(2)
    torch.manual_seed(3)
    F.dropout(koila.lazy(torch.ones(7)))
    assert torch.equal(torch.rand(2), expected)
