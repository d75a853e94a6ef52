"""Random programs with people's habits: in-place operators, views, hooks, random numbers, reads in between, threads.

Values, gradients, buffers, what hooks saw and the generator are eager's: the same bits unsplit, the same numbers in
chunks and inside byte budgets. `KOILA_EXAMPLES=5000` runs as many programs, `KOILA_FIRST_SEED=10000` others; the seeds
are the same every time, and each that fails is printed with its program.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.property.draft import Program
from tests.property.generator import make
from tests.property.trial import Discarded, reduced
from tests.property.ways import REFUSED, Way, difference, ways_of

pytestmark = pytest.mark.filterwarnings("ignore::koila.KoilaWarning")  # Some programs do what koila warns of.

EXAMPLES = int(os.environ.get("KOILA_EXAMPLES", "200"))
FIRST = int(os.environ.get("KOILA_FIRST_SEED", "0"))
REDUCED = 10
"""So many failures are reduced to small programs; the others are reported by their seed."""


def test_a_random_program_with_habits_has_the_numbers_of_eager() -> None:
    failures: list[tuple[Program, str]] = []
    tried, seed = 0, FIRST
    ways: Counter[str] = Counter()
    while tried < EXAMPLES:
        program = make(seed, habits=True)
        seed += 1
        try:
            wrong = difference(program)
        except Discarded:
            continue
        tried += 1
        ways.update(_kind(way) for way in ways_of(program))
        if wrong is not None:
            failures.append((program, wrong))
            print(f"seed {program.seed}: {wrong}", flush=True)
    print(
        f"{tried} programs, seeds {FIRST} to {seed - 1}, {len(failures)} differ; {dict(ways)}; refused {dict(REFUSED)}"
    )
    texts = [f"seed {program.seed}: {wrong}" for program, wrong in failures]
    for number, (program, _) in enumerate(failures[:REDUCED]):
        texts[number] += f"\n{reduced(program, lambda candidate: difference(candidate, ways_of(program)))}"  # noqa: B023
    assert not failures, f"{len(failures)} of {tried} programs differ\n" + "\n".join(texts)


def _kind(way: Way) -> str:
    cut = "bytes" if way.share is not None else "whole" if way.chunk_size is None else "chunks"
    if way.steps > 1:
        return f"{cut}, {way.steps} times"
    return cut + (", recorded in another thread" if way.elsewhere else ", two threads" if way.beside else "")


def test_a_program_with_habits_is_deterministic() -> None:
    assert str(make(12, habits=True)) == str(make(12, habits=True)) != str(make(12))
