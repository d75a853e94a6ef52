"""Every row of every table against torch: chunk by chunk equals whole, for every operand that might hold the batch.

The calls are those that torch's `op_db` makes, forward and backward, and the hand-written ones of `extras`. The default
run takes a fixed share of them; `KOILA_FULL=1` takes all. A recurrent layer and its backward are proved together, in
`test_recurrent`, and operators that only accelerators have in `tests/accelerator/test_operators.py`.
"""

from __future__ import annotations

import gc
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping

import pytest
import torch
from torch._ops import OpOverload

from koila.analysis.rules import LINEAR, RULES, devices, recurrent, rule_for
from koila.analysis.types import Merged
from tests.unit.analysis.extras import extras
from tests.unit.analysis.harness import Recorded, prove
from tests.unit.analysis.hypotheses import Hypothesis, hypotheses, merged
from tests.unit.analysis.samples import capture

FULL = os.environ.get("KOILA_FULL") == "1"
SHARE, CALLS_PER_OPERATOR = (1.0, 80) if FULL else (0.12, 24)
CHOSEN_CALLS = 1_000_000 if FULL else 5
HYPOTHESES_PER_OPERATOR = 1_000_000 if FULL else 14

pytestmark = pytest.mark.filterwarnings("ignore")  # Torch's samples also use what it deprecates.

Calls = Mapping[OpOverload, list[Recorded]]


@pytest.fixture(scope="session")
def calls() -> Calls:
    """Recorded calls by operator."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found: dict[OpOverload, list[Recorded]] = defaultdict(list)
    for target, recorded in capture(SHARE, CALLS_PER_OPERATOR).items():
        found[target] += sorted(recorded, key=richness, reverse=True)[:CHOSEN_CALLS]
    for call in extras():
        found[call.target].append(call)
    torch.set_num_threads(threads)
    gc.freeze()  # They stay until the end.
    return found


def richness(call: Recorded) -> int:
    """In how many dimensions the batch might lie."""
    return sum(size > 1 for value in call.places().values() for size in value.shape)


def spread(cases: list[tuple[Recorded, Hypothesis]]) -> Iterator[tuple[Recorded, Hypothesis]]:
    """An even choice of that many."""
    step = max(1.0, len(cases) / HYPOTHESES_PER_OPERATOR)
    return (cases[int(place * step)] for place in range(int(len(cases) / step)))


def proven(cases: list[tuple[Recorded, Hypothesis]]) -> int:
    """How many cases the rule ruled; each is checked. If the even choice met none, the rest is tried."""
    count = sum(prove(call, types, batch) is not None for call, (types, batch) in spread(cases))
    if count:
        return count
    return int(any(prove(call, types, batch) is not None for call, (types, batch) in cases))


ELSEWHERE = {**recurrent.ROWS, **devices.ROWS}


@pytest.mark.parametrize("target", [target for target in RULES if target not in ELSEWHERE], ids=str)
def test_row(target: OpOverload, calls: Calls) -> None:
    cases = [(call, hypothesis) for call in calls.get(target, ()) for hypothesis in hypotheses(call)]
    assert cases, f"no sample reaches {target}"
    assert proven(cases), f"{target} is never ruled: the row has no use, or no sample"


@pytest.mark.parametrize("target", LINEAR, ids=str)
def test_linear_row(target: OpOverload, calls: Calls) -> None:
    cases = [(call, hypothesis) for call in calls.get(target, ()) for hypothesis in merged(call)]
    cases = [case for case in cases if all(isinstance(kind, Merged) for kind in case[1][0].values())]
    assert proven(cases), f"{target} never keeps a sum"


def test_tagged_operators(calls: Calls) -> None:
    tagged = [target for target in calls if target not in RULES and rule_for(target) is not None]
    never = []
    for target in tagged:
        cases = [(call, hypothesis) for call in calls[target] for hypothesis in hypotheses(call)]
        if cases and not proven(cases[:: 1 if FULL else 8]):
            never.append(str(target))
    assert not FULL or never in ([], ["aten.equal.default"]), f"tagged pointwise, but never ruled: {never}"
    assert len(tagged) > 150


def test_an_operator_without_a_rule_runs_whole() -> None:
    assert rule_for(torch.ops.aten.nonzero.default) is None
    assert rule_for(torch.ops.aten.as_strided.default) is None
    assert rule_for(torch.ops.aten.bernoulli.default) is None
