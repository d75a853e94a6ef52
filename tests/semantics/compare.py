"""One program as a user writes it, run eagerly and through koila: whole, in chunks, and in the smallest byte budget.

*Takes* a program: a function of `lazy`, which makes its inputs lazy or leaves them alone, that makes its own tensors
and returns any structure of results. *Gives* an assertion: the same results, kinds of tensors, and generator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

import koila
from koila.capture.pending import recorder
from koila.ir.tree import leaves, map_leaves

TOLERANCES = {torch.float64: 1e-10, torch.complex128: 1e-10, torch.float32: 1e-6}
"""Rule 1: ‖a−b‖ ≤ tol·‖b‖."""
ROUNDING = 1e-14
"""What an element that is zero in exact arithmetic may be."""
CHUNKS = (2,)
SEED = 5

Lazy = Callable[..., Any]
Program = Callable[[Lazy], Any]


def same_as_eager(program: Program, chunks: Sequence[int] = CHUNKS, in_bytes: bool = False) -> None:
    """Assert that a program gives eager's results in every way of running it."""
    expected = outcome(program, lambda *values, **_: values[0] if len(values) == 1 else values)
    check(outcome(program, koila.lazy), expected, exact=True, way="whole")
    for size in chunks:
        with koila.budget(chunk_size=size):
            check(outcome(program, koila.lazy), expected, exact=False, way=f"chunks of {size}")
    if in_bytes:
        with smallest_budget(program) as allowed:
            check(outcome(program, koila.lazy), expected, exact=False, way=f"{allowed} bytes")


def outcome(program: Program, lazy: Lazy) -> list[Any]:
    """The leaves of what a program returns, then the state of the generator."""
    torch.manual_seed(SEED)
    found = program(lazy)
    real = map_leaves(
        found, lambda leaf: leaf.run() if isinstance(leaf, (koila.LazyTensor, koila.EagerTensor)) else leaf
    )
    return [*leaves(real), torch.get_rng_state()]


def check(found: list[Any], expected: list[Any], exact: bool, way: str) -> None:
    assert len(found) == len(expected), way
    for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        where = f"{way}: result {number} of {len(expected) - 1}"
        if isinstance(theirs, torch.Tensor):
            assert type(mine) is type(theirs) and mine.shape == theirs.shape and mine.dtype == theirs.dtype, where
            assert mine.requires_grad == theirs.requires_grad, where
            close(mine.detach(), theirs.detach(), exact, where)
        elif isinstance(theirs, float) and not exact:
            close(torch.tensor(mine, dtype=torch.float64), torch.tensor(theirs, dtype=torch.float64), exact, where)
        else:
            assert mine == theirs, f"{where}: {mine!r} is not {theirs!r}"


def close(mine: torch.Tensor, theirs: torch.Tensor, exact: bool, where: str) -> None:
    if exact or theirs.dtype not in TOLERANCES:
        assert torch.equal(mine.nan_to_num(7.0), theirs.nan_to_num(7.0)), f"{where}: {mine} is not {theirs}"
        return
    allowed = TOLERANCES[theirs.dtype] * float(theirs.norm()) + ROUNDING * theirs.numel() ** 0.5
    error = float((mine - theirs).norm())
    assert error <= allowed, f"{where} differs by {error:.1e}, {allowed:.1e} is allowed"


@contextmanager
def smallest_budget(program: Program) -> Iterator[int]:
    """Inside the smallest byte budget that refusals name until the program runs."""
    allowed = 1
    for _ in range(20):
        with koila.budget(allowed):
            try:
                outcome(program, koila.lazy)
                break
            except koila.BudgetError as refused:
                recorder.forget()
                assert refused.needed_bytes > allowed, "a refusal names a budget that is enough"
                allowed = refused.needed_bytes
    with koila.budget(allowed):
        yield allowed


def chunked(size: int | None) -> Any:
    """A scope of chunks; None is no scope."""
    return nullcontext() if size is None else koila.budget(chunk_size=size)
