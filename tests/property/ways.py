"""The ways in which a random program is run: whole, in chunks, inside a byte budget, in threads, again and again.

*Takes* a `Program`. *Gives* None, or the first way in which koila's outcome is not eager's. A `BudgetError` is an
answer to a byte budget, and to nothing else. So is a `CaptureError` to a hook on a value that was passed by already: a
part of the program was read, in chunks, before the hook was registered; and a `StaleInputError` to a parameter that is
changed between a forward pass in chunks and its backward pass, which computes it again. All are counted in `REFUSED`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from random import Random

import koila
from koila.capture.pending import recorder
from tests.property.draft import Program
from tests.property.trial import Outcome, chunk_sizes, compare, described, illegal, record, reference, run

RANDOM = re.compile(r"rand|drop|normal_|uniform_|bernoulli|seed|rrelu|poisson|multinomial")
"""Programs whose text has one of these share the generator with every thread."""


@dataclass(frozen=True)
class Way:
    """How a program is run."""

    chunk_size: int | None = None
    share: float | None = None
    """Of a byte budget: where it lies between the smallest one (0) and what an unsplit run needs (1)."""
    elsewhere: bool = False
    """Recorded in another thread."""
    beside: bool = False
    """In two threads at the same time, each on its own copy of the data."""
    steps: int = 1
    """How often, one after the other, as in a loop: from the second time on, its calls are matched."""

    @property
    def is_exact(self) -> bool:
        """Whether it must have eager's bits."""
        return self.chunk_size is None and self.share is None


def ways_of(program: Program) -> list[Way]:
    """Whole, in chunks, and one more."""
    random = Random(program.seed)
    sizes = chunk_sizes(program)
    found = [Way(size) for size in sizes[:2]]
    others = [Way(share=random.choice((0.0, 0.1, 0.5, 0.9))), Way(sizes[-1], elsewhere=True), Way(elsewhere=True)]
    others += [Way(steps=4), Way(sizes[-1], steps=4), Way(share=0.3, steps=4)]
    if not RANDOM.search(program.text):
        others += [Way(sizes[-1], beside=True), Way(beside=True)]
    return [*found, random.choice(others)]


REFUSED: Counter[str] = Counter()
"""How often koila refused, clearly and before anything was lost, what eager does."""


def difference(program: Program, ways: Sequence[Way] | None = None) -> str | None:
    """What differs between eager and koila, and in which way, or None.

    Raises:
        Discarded: The program is none.
    """
    expected, allowed = reference(program)
    for way in ways_of(program) if ways is None else ways:
        koila.metrics.reset()
        try:
            outcomes = _outcomes(program, way)
        except Exception as error:
            recorder.forget()  # What it left pending is not the next one's matter.
            return f"{way}: {described(error)}"
        for found in outcomes:
            wrong = compare(found, expected, None if way.is_exact else allowed) or illegal()
            if wrong is not None:
                return f"{way}: {wrong}"
    return None


def _outcomes(program: Program, way: Way) -> list[Outcome]:
    """What is left after each run of it; nothing where a byte budget was refused."""
    try:
        if way.beside:
            with ThreadPoolExecutor(2) as threads:
                runs = [threads.submit(run, program, True, way.chunk_size) for _ in range(2)]
                return [each.result() for each in runs]
        allowed = None if way.share is None else _bytes(program, way.share)
        once = partial(run, program, True, way.chunk_size, allowed=allowed, elsewhere=way.elsewhere)
        return [once() for _ in range(way.steps)]
    except (koila.BudgetError, koila.CaptureError, koila.StaleInputError) as refused:
        is_budget = isinstance(refused, koila.BudgetError) and way.share is not None
        is_stale = isinstance(refused, koila.StaleInputError) and not way.is_exact
        if not is_budget and not is_stale and "computed in chunks already" not in str(refused):
            raise
        REFUSED[type(refused).__name__] += 1
        recorder.forget()
        return []


def _bytes(program: Program, share: float) -> int:
    """A budget for a program that is recorded once to be planned."""
    value = record(program)[0]
    if not isinstance(value, koila.LazyTensor) or value._value.real is not None:
        return 1 << 30
    backward = value.requires_grad and value.ndim == 0
    whole = koila.plan(value, backward=backward, budget=2**50).projected_bytes
    try:
        koila.plan(value, backward=backward, budget=1)
    except koila.BudgetError as refused:
        return int(refused.needed_bytes + share * max(0, whole - refused.needed_bytes))
    return whole
