"""The search for a plan that fits: the largest chunks first, then less kept between phases.

*Takes* facts, a byte budget and a function that projects a plan's peak. *Gives* the first plan that fits, in the order
of cost, or a `BudgetError` with the smallest budget that this search can meet. Same input, same plan.

Not optimal: chunk sizes are powers of two, and values between phases are kept all or none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from koila._bytes import format_bytes
from koila.analysis.split import Facts
from koila.errors import BudgetError
from koila.planning.plan import Plan, make_plan

Made = TypeVar("Made")
Project = Callable[[Plan], tuple[Made, int, str]]
"""A plan → (what the executor made of it, projected bytes, the operator at the peak)."""


def chunk_sizes(num_samples: int, granule: int) -> list[int]:
    """Candidates, largest first: the whole batch, then powers of two times the granule.

    >>> chunk_sizes(11, 1)
    [11, 8, 4, 2, 1]
    """
    sizes = [num_samples]
    size = 1
    while size * granule < num_samples:
        sizes.append(size * granule)
        size *= 2
    return sorted(set(sizes), reverse=True)


def search(facts: Facts, allowed_bytes: int, project: Project[Made]) -> tuple[Made, int]:
    """The fastest plan that fits, as far as this search knows, with its projected bytes."""
    smallest: tuple[int, str] | None = None
    sizes = chunk_sizes(facts.num_samples, facts.granule)
    for keep in (True, False):
        found: tuple[Made, int] | None = None
        low, high = 0, len(sizes) - 1
        # Projected bytes fall with the chunk size: find the first size that fits.
        while low <= high:
            middle = (low + high) // 2
            made, projected, operator = project(make_plan(facts, sizes[middle], keep))
            if projected <= allowed_bytes:
                found, high = (made, projected), middle - 1
            else:
                low = middle + 1
                if middle == len(sizes) - 1 and (smallest is None or projected < smallest[0]):
                    smallest = projected, operator
        if found is not None:
            return found
    assert smallest is not None
    raise refusal(smallest[0], allowed_bytes, smallest[1])


def refusal(needed: int, allowed: int, operator: str) -> BudgetError:
    """The error for a budget that cannot be met; exactly `needed` would be accepted."""
    return BudgetError(
        f"needs {needed} bytes ({format_bytes(needed)}) at the smallest, allowed {allowed} ({format_bytes(allowed)})",
        where=f"at the peak: {operator}",
        hint=f"budget={needed}; koila.explain(value, backward=True) shows what cannot be cut",
        needed_bytes=needed,
        allowed_bytes=allowed,
    )
