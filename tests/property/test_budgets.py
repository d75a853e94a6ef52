"""Random programs inside random byte budgets: what is planned is what runs, or both refuse; the numbers are eager's.

An example is a program, a budget between nothing and what an unsplit run needs, which values the user holds, and what
is read before the backward pass. Each runs three steps, so that what was learned in one is used in the next.
`KOILA_EXAMPLES=1000` runs as many examples; the seeds are the same every time.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

import koila
from koila.capture.pending import recorder
from tests.property.draft import Program
from tests.property.generator import make
from tests.property.trial import Discarded, Outcome, _copies, _function, compare, left_in, reference

EXAMPLES = int(os.environ.get("KOILA_EXAMPLES", "150"))
STEPS = 3
READS = ("nothing", "nothing", "the loss", "a held value", "another value")


@dataclass(frozen=True)
class Example:
    """A program in a budget."""

    program: Program
    share: float
    """Where the budget lies between the smallest one and what an unsplit run needs; below zero it is too small."""
    read: str
    """What is read before the backward pass."""

    def __str__(self) -> str:
        return f"share {self.share:.2f}, reads {self.read} first\n{self.program}"


def example(seed: int) -> Example:
    random = Random(seed)
    share = random.choice((-0.5, 0.0, 0.0, 0.05, 0.2, 0.5, 0.9, 1.0, 2.0))
    return Example(make(seed), share, random.choice(READS))


class Step:
    """One step of an example: recorded, not run."""

    def __init__(self, program: Program, allowed: int | None) -> None:
        self.program = program
        self.inputs, self.tensors = _copies(program.inputs, None), _copies(program.tensors, None)
        torch.manual_seed(program.seed)
        self.values = _function(program)(**koila.lazy(self.inputs, budget=allowed), **self.tensors)

    @property
    def loss(self) -> torch.Tensor:
        return self.values[0]

    def outcome(self) -> Outcome:
        """What is left of it; values that were released are left out."""
        value = koila.run(self.loss, detach=True)
        self.values.clear()  # Held values that did not fit were released: nobody asks for them.
        koila.settle()
        left = left_in({**self.inputs, **self.tensors})
        return Outcome({f"value {self.program.result}": value, **left}, torch.get_rng_state())


def budget_of(tried: Example) -> int:
    """The budget of an example in bytes."""
    recorder.forget()  # What a refused example left pending.
    step = Step(tried.program, None)
    whole = koila.plan(step.loss, backward=step.loss.requires_grad, budget=2**50).projected_bytes
    try:
        koila.plan(step.loss, backward=step.loss.requires_grad, budget=1)
        smallest = 1
    except koila.BudgetError as refused:
        smallest = refused.needed_bytes
    step.values.clear()
    koila.settle()  # Its writes are not pending when the example runs.
    return max(1, int(smallest + tried.share * max(whole - smallest, smallest if tried.share < 0 else 0)))


def answered(ask: Any) -> Any:
    """What something gives, or the budget that its refusal names."""
    try:
        return ask()
    except koila.BudgetError as refused:
        return refused.needed_bytes


def run_and_plan(value: torch.Tensor, backward: bool) -> tuple[str | None, bool]:
    """Whether a plan is what runs: None or what is wrong, and whether it ran."""
    planned = answered(lambda: koila.plan(value, backward=backward))
    with koila.measure() as seen:
        refused = answered(value.backward if backward else lambda: value.run() and None)
    if isinstance(planned, int) or isinstance(refused, int):
        return (None if planned == refused else f"planned {planned}, run {refused}"), False
    report = seen.reports[-1]
    wanted = (planned.how, planned.chunk_size if planned.how == "split" else 0, planned.projected_bytes)
    if (report.how, report.chunk_size, report.projected_bytes) != wanted:
        return f"planned {wanted}, ran {report.how}, {report.chunk_size}, {report.projected_bytes}", True
    if not report.measured_bytes <= report.projected_bytes <= report.allowed_bytes:
        return f"measured {report.measured_bytes}, projected {report.projected_bytes}, {report.allowed_bytes}", True
    return None, True


def one_step(
    tried: Example, allowed: int, expected: Outcome, errors: dict[str, float], accepted: list[bool]
) -> str | None:  # fmt: skip
    """What is wrong with a step, or None; whether its budget was accepted is added to `accepted`."""
    accepted.append(False)
    step = answered(lambda: Step(tried.program, allowed))
    if isinstance(step, int):
        return None  # Something had to run while the program was recorded, and was refused.
    backward = step.loss.requires_grad
    if tried.read == "the loss":
        # A budget may be enough to read the loss and not to differentiate it: that was known before.
        planned = answered(lambda: koila.plan(step.loss, backward=True)) if backward else None
        wrong, ran = run_and_plan(step.loss, False)
        if wrong is not None or not ran:
            return wrong
        accepted[-1] = ran
        if backward and isinstance(refused := answered(step.loss.backward), int):
            return None if isinstance(planned, int) else f"planned, read, then refused: {refused} of {allowed}"
    else:
        if tried.read == "a held value" and len(step.values) > 1:
            answered(lambda: koila.run(step.values[1], detach=True) is None)
        if tried.read == "another value":
            with koila.measure() as seen:
                (koila.lazy(torch.ones(3, 2)) + 1).sum().item()
            if any(report.num_calls > 2 for report in seen.reports if report.allowed_bytes is None):
                return "it ran beside another value, without its budget"
        if step.loss._value.real is None:  # What was read may have been the loss itself.
            wrong, ran = run_and_plan(step.loss, backward)
            if wrong is not None or not ran:
                return wrong
        elif backward:
            step.loss.backward()
        accepted[-1] = True
    known = Outcome({n: t for n, t in expected.tensors.items() if _is_left(n, tried.program)}, expected.generator)
    return compare(step.outcome(), known, errors)


def _is_left(name: str, program: Program) -> bool:
    return not name.startswith("value ") or name == f"value {program.result}"


def budget_trial(tried: Example) -> str | None:
    """What is wrong with an example, or None."""
    expected, errors = reference(tried.program)
    allowed = budget_of(tried)
    accepted: list[bool] = []
    for number in range(STEPS):
        koila.metrics.reset()
        try:
            wrong = one_step(tried, allowed, expected, errors, accepted)
        except Exception as error:
            wrong = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if wrong is not None:
            return f"step {number}, {allowed} bytes: {wrong}"
    return None if len(set(accepted)) == 1 else f"accepted at some steps only: {accepted}"


def test_a_random_program_keeps_to_a_random_budget() -> None:
    failures: list[str] = []

    @given(seed=st.integers(0, 2**32 - 1))
    @settings(
        max_examples=EXAMPLES, derandomize=True, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
    )  # fmt: skip
    def examine(seed: int) -> None:
        tried = example(seed)
        if tried.program.mode not in ("loss", "read"):
            assume(False)
        koila.metrics.reset()
        try:
            wrong = budget_trial(tried)
        except Discarded:
            assume(False)
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        if wrong is not None:
            failures.append(f"seed {seed}: {wrong}\n{tried}")

    examine()
    assert not failures, f"{len(failures)} of {EXAMPLES} examples are wrong\n" + "\n".join(failures[:10])
