"""A fixed sample of the conformance suites, chosen by hash; `./scripts/conformance` runs all of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.conformance.choice import number_of
from tests.conformance.run import run_suite

pytestmark = pytest.mark.filterwarnings("ignore")  # The databases call what torch deprecates.


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("suite", "chunks", "one_in"),
    [
        ("ops", (), 6),
        ("ops", ("1", "uneven"), 20),
        ("modules", (), 5),
        ("modules", ("1", "uneven"), 16),
    ],
    ids=["ops whole", "ops split", "modules whole", "modules split"],
)
def test_a_sample_equals_eager(suite: str, chunks: tuple[str, ...], one_in: int) -> None:
    found = run_suite(suite, chunks, keep=lambda name: number_of(name) % one_in == 0, verbose=False)
    assert found.equal()
    assert not found.wrong(), "\n".join(found.lines())
    # A harness that breaks tracing would compare eager with eager.
    assert not chunks or len(found.split()) > 0.7 * len(found.equal()), found.ran_whole()
