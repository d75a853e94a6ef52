"""Random programs: eager on the whole batch, koila unsplit (the same bits) and koila in chunks (the same numbers).

`KOILA_EXAMPLES=2000` runs as many examples; the seeds are the same every time.
"""

from __future__ import annotations

import os
from functools import partial

import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from tests.property.draft import Program
from tests.property.generator import make
from tests.property.trial import Discarded, chunk_sizes, reduced, trial

EXAMPLES = int(os.environ.get("KOILA_EXAMPLES", "150"))


REDUCED = 10
"""So many failures are reduced to small programs; the others are reported by their seed."""


def test_a_random_program_has_the_numbers_of_eager() -> None:
    failures: list[tuple[Program, str]] = []

    @given(seed=st.integers(0, 2**32 - 1))
    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        deadline=None,
        database=None,
        # A seed does not shrink: `reduced` shrinks the program.
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
    )
    def examine(seed: int) -> None:
        program = make(seed)
        try:
            difference = trial(program)
        except Discarded:
            assume(False)
        if difference is not None:
            failures.append((program, difference))

    examine()
    texts = [f"seed {program.seed}: {difference}" for program, difference in failures]
    for number, (program, _) in enumerate(failures[:REDUCED]):
        texts[number] += f"\n{reduced(program, partial(trial, sizes=chunk_sizes(program)))}"
    assert not failures, f"{len(failures)} of {EXAMPLES} programs differ\n" + "\n".join(texts)


def test_the_generator_is_deterministic() -> None:
    first, second = make(12), make(12)
    assert str(first) == str(second)
    assert all(torch.equal(first.tensors[name], second.tensors[name]) for name in first.tensors)


def test_a_wrong_number_is_found_and_reduced() -> None:
    """The test of the test: a program that adds one if koila runs it."""
    program = Program(
        seed=0,
        batch=3,
        inputs={"x": torch.ones(3, 2, dtype=torch.float64)},
        tensors={},
        lines=["v0 = x * 2", "v1 = v0.tanh()", "v2 = v1.sum() if type(v1) is torch.Tensor else v1.sum() + 1"],
        result="v2",
        held=(),
        mode="inference",
    )
    assert "differs by 1.0e+00" in (trial(program, [1]) or "")
    assert len(reduced(program, partial(trial, sizes=[1])).lines) == 1
