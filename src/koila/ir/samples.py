"""Samples: which programs of one structure are remembered, so that others can be derived from them.

*Takes* the samples so far and a new one. *Gives* the ones that stay. A number that is the same in all samples counts as
a constant, so a sample that alone shows that a number varies is worth more than a later one: a loop over lengths with
batches of eight, and one of five now and then, does not have to learn each time that batches vary. No torch here.

Not optimal: which numbers vary is compared, not which products of them can be told apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from koila.ir.formulas import Values

T = TypeVar("T")
MAX_SAMPLES = 4
"""Samples that are remembered at the most."""


def with_sample(samples: Sequence[T], new: T, numbers: Callable[[T], Values]) -> list[T]:
    """The samples with a new one, which takes the place of one with the same numbers.

    Beyond `MAX_SAMPLES` the oldest one goes without which the same numbers vary; if there is none, the oldest.

    >>> with_sample([(5, 20), (8, 27), (8, 31), (8, 37)], (8, 41), tuple)
    [(5, 20), (8, 31), (8, 37), (8, 41)]
    >>> with_sample([(8, 20), (8, 27)], (8, 20), tuple)
    [(8, 27), (8, 20)]
    """
    kept = [each for each in samples if numbers(each) != numbers(new)]
    if len(kept) >= MAX_SAMPLES:
        given = [numbers(each) for each in (*kept, new)]
        most = _num_varying(given)
        others = (place for place in range(len(kept)) if _num_varying(given[:place] + given[place + 1 :]) == most)
        del kept[next(others, 0)]
    return [*kept, new]


def after_failure(samples: Sequence[T]) -> list[T]:
    """The samples that stay if nothing could be made of all: if there are many, the oldest may be unlike the others.

    >>> after_failure("ab"), after_failure("abcd")
    (['a', 'b'], ['b', 'c', 'd'])
    """
    return list(samples[1:] if len(samples) >= MAX_SAMPLES else samples)


def _num_varying(samples: Sequence[Values]) -> int:
    """How many numbers are not the same in all samples; those of programs of one structure are equally many."""
    return sum(len(set(column)) > 1 for column in zip(*samples, strict=False))
