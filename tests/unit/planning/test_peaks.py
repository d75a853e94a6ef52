"""Peaks of schedules made by hand, each with the number that a person finds with a pencil; no tensors."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from koila.planning.peak import peak_of, totals
from koila.planning.schedule import Schedule
from koila.planning.step import Kind
from tests.unit.planning.lists import STORE, STREAM, Draft, best_order, gather, merge, simulated_peak

Case = tuple[Schedule, int, int, int]
"""A schedule, its peak on the first chunk, its peak on a later one, and the lowest later peak of all orders."""
CASES: dict[str, Callable[[], Case]] = {}


def case(function: Callable[[], Case]) -> Callable[[], Case]:
    CASES[function.__name__] = function
    return function


def chain(*sizes: int) -> Schedule:
    draft, last = Draft(), tuple[int, ...]()
    for size in sizes:
        last = (draft.make(size, *last),)
    return draft.schedule


# Chains.


@case
def nothing() -> Case:
    return Draft().schedule, 0, 0, 0


@case
def one_value() -> Case:
    return chain(5), 5, 5, 5


@case
def two_values() -> Case:
    return chain(5, 3), 8, 8, 8


@case
def growing_chain() -> Case:
    return chain(1, 2, 3, 4), 7, 7, 7


@case
def shrinking_chain() -> Case:
    return chain(4, 3, 2, 1), 7, 7, 7


@case
def chain_with_a_bulge() -> Case:
    return chain(1, 1, 9, 8, 1, 1), 17, 17, 17


@case
def long_chain_needs_two_values_at_a_time() -> Case:
    return chain(*[10] * 20), 20, 20, 20


@case
def reading_an_input_is_free() -> Case:
    draft = Draft(1)
    draft.make(3, draft.make(7, 0), 0)
    return draft.schedule, 10, 10, 10


@case
def value_that_nobody_reads() -> Case:
    draft = Draft()
    draft.make(9)
    draft.make(1)
    return draft.schedule, 9, 9, 9


# Diamonds and residuals.


@case
def diamond() -> Case:
    draft = Draft()
    a = draft.make(4)
    draft.make(1, draft.make(3, a), draft.make(2, a))
    return draft.schedule, 9, 9, 9


@case
def diamond_with_a_long_arm() -> Case:
    """The arm that shrinks should go first: 1 + 10 + 1, then 1 + 1 + 10."""
    draft = Draft()
    a = draft.make(1)
    wide = draft.make(10, a)
    other = draft.make(1, draft.make(10, a))
    draft.make(1, draft.make(1, wide), other)
    return draft.schedule, 21, 21, 12


@case
def residual() -> Case:
    draft = Draft()
    a = draft.make(4)
    draft.make(4, a, draft.make(4, draft.make(3, a)))
    return draft.schedule, 12, 12, 12


@case
def residual_written_over_its_skip() -> Case:
    draft = Draft()
    a = draft.make(4)
    draft.over(4, a, draft.make(4, draft.make(3, a)))
    return draft.schedule, 11, 11, 11


@case
def residual_around_a_bottleneck() -> Case:
    draft = Draft()
    a = draft.make(8)
    draft.over(8, a, draft.make(8, draft.make(1, a)))
    return draft.schedule, 17, 17, 17


@case
def two_residuals() -> Case:
    draft = Draft()
    a = draft.make(2)
    b = draft.over(2, a, draft.make(2, draft.make(5, a)))
    draft.over(2, b, draft.make(2, draft.make(5, b)))
    return draft.schedule, 9, 9, 9


@case
def network_of_skips_to_the_end() -> Case:
    """Every layer is read at the end, as a backward pass does: 4 + 4 + 4 + 1."""
    draft = Draft()
    a = draft.make(4)
    b = draft.make(4, a)
    c = draft.make(4, b)
    draft.make(1, a, b, c)
    return draft.schedule, 13, 13, 13


@case
def forward_and_backward() -> Case:
    draft = Draft()
    a = draft.make(4)
    b = draft.make(4, a)
    c = draft.make(4, b)
    gradient = draft.make(4, c)
    gradient = draft.make(4, gradient, b)
    draft.make(4, gradient, a)
    return draft.schedule, 16, 16, 16


@case
def forward_and_backward_in_place() -> Case:
    draft = Draft()
    a = draft.make(4)
    b = draft.make(4, a)
    c = draft.make(4, b)
    gradient = draft.over(4, c)
    gradient = draft.over(4, gradient, b)
    draft.over(4, gradient, a)
    return draft.schedule, 12, 12, 12


# Views.


@case
def view_costs_nothing() -> Case:
    draft = Draft()
    draft.make(2, draft.view(draft.make(4)))
    return draft.schedule, 6, 6, 6


@case
def view_keeps_its_storage() -> Case:
    draft = Draft()
    v = draft.view(draft.make(4))
    draft.make(5)
    draft.make(1, v)
    return draft.schedule, 9, 9, 5


@case
def view_of_a_view() -> Case:
    draft = Draft()
    v = draft.view(draft.view(draft.make(4)))
    b = draft.make(5)
    draft.make(1, v, b)
    return draft.schedule, 10, 10, 10


@case
def view_of_an_input() -> Case:
    draft = Draft(1)
    draft.make(3, draft.view(0))
    return draft.schedule, 3, 3, 3


@case
def base_and_view_are_one_storage() -> Case:
    draft = Draft()
    a = draft.make(4)
    draft.make(1, a, draft.view(a))
    return draft.schedule, 5, 5, 5


@case
def several_results_live_until_the_last_is_named() -> Case:
    draft = Draft()
    pair = draft.step([], 3, 4)
    first = draft.step([pair], (0, 0))
    second = draft.step([pair], (0, 1))
    draft.make(2, first)
    draft.make(1, second)
    return draft.schedule, 9, 9, 8


@case
def parts_that_are_views() -> Case:
    draft = Draft()
    a = draft.make(6)
    parts = draft.step([a], (0, 0), (0, 0))
    first, second = draft.step([parts], (0, 0)), draft.step([parts], (0, 1))
    draft.make(1, first)
    draft.make(2, second)
    return draft.schedule, 8, 8, 8


# Results over operands.


@case
def written_over_again_and_again() -> Case:
    draft = Draft()
    draft.over(4, draft.over(4, draft.over(4, draft.make(4))))
    return draft.schedule, 4, 4, 4


@case
def not_over_what_is_read_later() -> Case:
    draft = Draft()
    a = draft.make(4)
    draft.make(1, a, draft.over(4, a))
    return draft.schedule, 9, 9, 9


@case
def not_over_an_input() -> Case:
    draft = Draft(1)
    draft.over(4, 0)
    return draft.schedule, 4, 4, 4


@case
def not_over_what_may_be_a_view() -> Case:
    draft = Draft()
    draft.over(4, draft.make(4, makes_memory=False))
    return draft.schedule, 8, 8, 8


@case
def not_over_what_keeps_a_workspace() -> Case:
    draft = Draft()
    draft.over(4, draft.make(4, retained_bytes=2))
    return draft.schedule, 10, 10, 10


@case
def not_over_what_was_handed_on() -> Case:
    draft = Draft(sinks=[gather(8)])
    a = draft.make(4)
    draft.hand_on(a)
    draft.over(4, a)
    return draft.schedule, 8, 8, 8


@case
def not_over_what_foreign_code_may_hold() -> Case:
    draft = Draft()
    a = draft.make(4)
    draft.make(0, a, holds_operands=True)
    draft.over(4, a)
    return draft.schedule, 8, 8, 8


@case
def not_over_a_storage_that_another_operand_shares() -> Case:
    draft = Draft()
    a = draft.make(4)
    draft.over(4, a, draft.view(a))
    return draft.schedule, 8, 8, 8


@case
def over_the_second_operand() -> Case:
    draft = Draft()
    a, b = draft.make(4), draft.make(4)
    c = draft.over(4, a, b, positions=(0, 1))
    draft.make(1, a, c)
    return draft.schedule, 9, 9, 9


@case
def over_a_view_of_a_dead_value() -> Case:
    draft = Draft()
    draft.over(4, draft.view(draft.make(4)))
    return draft.schedule, 4, 4, 4


# Workspaces.


@case
def workspace() -> Case:
    draft = Draft()
    draft.make(4, inside_bytes=10)
    return draft.schedule, 14, 14, 14


@case
def workspace_beside_operands() -> Case:
    draft = Draft()
    draft.make(2, draft.make(4), inside_bytes=3)
    return draft.schedule, 9, 9, 9


@case
def workspace_of_a_step_in_place() -> Case:
    draft = Draft()
    draft.over(4, draft.make(4), inside_bytes=3)
    return draft.schedule, 7, 7, 7


@case
def workspace_is_gone_afterwards() -> Case:
    draft = Draft()
    draft.make(8, draft.make(1, draft.make(1, inside_bytes=5)))
    return draft.schedule, 9, 9, 9


@case
def workspace_that_stays_with_the_result() -> Case:
    draft = Draft()
    draft.make(2, draft.make(1, retained_bytes=8))
    return draft.schedule, 11, 11, 11


# Merges, gathers, stored and streamed values.


@case
def merge_that_begins_with_its_value() -> Case:
    draft = Draft(sinks=[merge(4)])
    draft.hand_on(draft.make(4))
    draft.make(5)
    return draft.schedule, 9, 5, 5


@case
def merge_that_begins_with_a_copy() -> Case:
    draft = Draft(sinks=[merge(6)])
    draft.hand_on(draft.make(4), starts_merge=False)
    draft.make(5)
    return draft.schedule, 11, 5, 5


@case
def two_values_of_one_sum() -> Case:
    draft = Draft(sinks=[merge(4)])
    draft.hand_on(draft.make(4))
    draft.hand_on(draft.make(4))
    draft.make(3)
    return draft.schedule, 8, 4, 4


@case
def two_sums() -> Case:
    draft = Draft(sinks=[merge(4), merge(2)])
    draft.hand_on(draft.make(4), 0)
    draft.hand_on(draft.make(2), 1)
    draft.make(3)
    return draft.schedule, 9, 4, 4


@case
def gathered_value_is_copied() -> Case:
    draft = Draft(sinks=[gather(40)])
    draft.hand_on(draft.make(4))
    draft.make(5)
    return draft.schedule, 5, 5, 5


@case
def stored_values_stay() -> Case:
    draft = Draft(sinks=[STORE, STORE], chunk=None)
    draft.hand_on(draft.make(4), 0)
    draft.hand_on(draft.make(5), 1)
    draft.make(1)
    return draft.schedule, 10, 5, 5


@case
def stored_view_keeps_all_of_its_base() -> Case:
    draft = Draft(sinks=[STORE], chunk=None)
    draft.hand_on(draft.view(draft.make(4)))
    draft.make(5)
    return draft.schedule, 9, 5, 5


@case
def stored_view_of_an_input() -> Case:
    draft = Draft(1, sinks=[STORE], chunk=None)
    draft.hand_on(draft.view(0))
    draft.make(5)
    return draft.schedule, 5, 5, 5


@case
def streamed_value_is_there_until_the_chunk_ends() -> Case:
    draft = Draft(sinks=[STREAM])
    draft.hand_on(draft.make(4))
    draft.make(5)
    return draft.schedule, 9, 9, 5


@case
def product_added_to_a_sum() -> Case:
    draft = Draft(sinks=[merge(6)])
    draft.add_product(6, draft.make(2), draft.make(3))
    return draft.schedule, 11, 5, 5


@case
def two_products_of_one_sum() -> Case:
    draft = Draft(sinks=[merge(6)])
    draft.add_product(6, draft.make(2), draft.make(3))
    draft.add_product(6, draft.make(2), draft.make(3))
    return draft.schedule, 11, 5, 5


@case
def product_added_to_a_sum_that_a_value_began() -> Case:
    draft = Draft(sinks=[merge(6)])
    draft.hand_on(draft.make(6))
    draft.add_product(6, draft.make(2), draft.make(3))
    return draft.schedule, 11, 6, 6


@case
def gradients_of_a_network_are_added_up() -> Case:
    """Weights of 10: the sums are there by the end, their products are never."""
    draft = Draft(1, sinks=[merge(10), merge(10)])
    a = draft.make(2, 0)
    b = draft.make(2, a)
    gradient = draft.over(2, b)
    draft.add_product(10, a, gradient, sink=1)
    gradient = draft.over(2, gradient, a)
    draft.add_product(10, 0, gradient, sink=0)
    return draft.schedule, 22, 4, 4


@case
def region_with_a_sum() -> Case:
    draft = Draft(sinks=[merge(6)])
    a = draft.make(2)
    region = draft.step([a], 0, 3, inside_bytes=5, kind=Kind.SUB_PLAN, sinks=(0,), holds_operands=True)
    draft.make(1, draft.step([region], (0, 1)))
    return draft.schedule, 16, 10, 10


# Repeats and offload.


@case
def value_computed_again() -> Case:
    """Instead of 4 + 9: let go, and computed again after the 9."""
    draft = Draft(1)
    a = draft.make(4, 0)
    b = draft.make(9, draft.make(1, a))
    c = draft.make(1, b)
    again = draft.make(4, 0, is_repeat=True)
    draft.make(1, c, again)
    return draft.schedule, 10, 10, 10


@case
def value_offloaded_and_fetched() -> Case:
    draft = Draft(1)
    a = draft.make(4, 0)
    handle = draft.step([a], 0, kind=Kind.OFFLOAD, holds_operands=True)
    b = draft.make(1, draft.make(9))
    fetched = draft.step([handle], 4, kind=Kind.FETCH, makes_memory=False)
    draft.make(1, b, fetched)
    return draft.schedule, 10, 10, 10


@case
def not_over_what_was_fetched() -> Case:
    draft = Draft(1)
    handle = draft.step([draft.make(4, 0)], 0, kind=Kind.OFFLOAD, holds_operands=True)
    draft.over(4, draft.step([handle], 4, kind=Kind.FETCH, makes_memory=False))
    return draft.schedule, 8, 8, 8


# Orders that matter.


@case
def branches_in_breadth() -> Case:
    """Three branches of 10 that shrink to 1: one after the other they need 10 + 1 + 2, side by side 30 + 1."""
    draft = Draft()
    wide = [draft.make(10) for _ in range(3)]
    draft.make(1, *[draft.make(1, each) for each in wide])
    return draft.schedule, 31, 31, 13


@case
def large_branch_first() -> Case:
    draft = Draft()
    small = draft.make(1, draft.make(2))
    large = draft.make(1, draft.make(20))
    draft.make(1, small, large)
    return draft.schedule, 22, 22, 21


@case
def early_value_could_wait() -> Case:
    draft = Draft()
    early = draft.make(5)
    late = draft.make(1, draft.make(8))
    draft.make(1, early, late)
    return draft.schedule, 14, 14, 9


@case
def sums_should_be_added_to_at_once() -> Case:
    draft = Draft(sinks=[gather(4), gather(4)])
    a, b = draft.make(4), draft.make(4)
    draft.hand_on(a, 0)
    draft.hand_on(b, 1)
    return draft.schedule, 8, 8, 4


def test_there_are_fifty_cases() -> None:
    assert len(CASES) >= 50


@pytest.mark.parametrize("name", CASES)
def test_peaks(name: str) -> None:
    schedule, first, later, _ = CASES[name]()
    assert peak_of(schedule, is_first=True).num_bytes == first
    assert peak_of(schedule).num_bytes == later
    assert max(totals(schedule), default=0) == (first if schedule.chunk is None else later)


@pytest.mark.parametrize("name", CASES)
def test_the_number_is_what_a_run_would_need(name: str) -> None:
    schedule, first, later, _ = CASES[name]()
    assert (simulated_peak(schedule, True), simulated_peak(schedule, False)) == (first, later)


@pytest.mark.parametrize("name", [name for name in CASES if len(CASES[name]()[0].steps) <= 8])
def test_the_optimum_of_all_orders(name: str) -> None:
    schedule, _, _, best = CASES[name]()
    assert best_order(schedule) == best


def random_schedule(number: int, with_views: bool = True) -> Schedule:
    """Steps, views, results over operands and sinks in any mixture."""
    draw = random.Random(number)
    draft = Draft(2, sinks=[merge(7), gather(9), merge(5)])
    values, sizes = [0, 1], {0: 0, 1: 0}
    for _ in range(draw.randint(3, 25)):
        operands = draw.sample(values, min(len(values), draw.randint(1, 3)))
        size = draw.choice((1, 2, 4, 4, 4, 9))
        way = draw.randint(0, 9)
        if way < 3:
            values.append(draft.make(size, *operands, inside_bytes=draw.choice((0, 0, 3))))
        elif way < 6:
            positions = tuple(place for place, each in enumerate(operands) if sizes[each] == size)
            values.append(draft.over(size, *operands, positions=positions))
        elif way < 8 and with_views:
            values.append(draft.view(operands[0]))
            size = sizes[operands[0]]
        elif way < 9:
            draft.hand_on(operands[0], draw.randint(0, 2), starts_merge=draw.random() < 0.5)
        else:
            draft.add_product(7, *operands[:2])
        sizes.setdefault(values[-1], size)
    return draft.schedule


@pytest.mark.parametrize("number", range(200))
def test_random_schedules_need_what_a_run_would_need(number: int) -> None:
    schedule = random_schedule(number)
    for is_first in (True, False):
        assert peak_of(schedule, is_first).num_bytes == simulated_peak(schedule, is_first)


def test_what_is_handed_on_is_not_written_over_a_view() -> None:
    """Not even by two steps in a row, of which the first may be: a sum would start with a copy of it."""
    draft = Draft(1, sinks=[STORE], chunk=None)
    negative = draft.make(6, 0)
    view = draft.view(negative)
    exponential = draft.over(6, view)
    draft.hand_on(draft.over(6, exponential))
    assert draft.schedule.overwritten == {exponential: view}


def test_last_uses_of_values_and_storages() -> None:
    draft = Draft(1)
    a = draft.make(4, 0)
    v = draft.view(a)
    b = draft.make(2, a)
    c = draft.make(1, v, b)
    schedule = draft.schedule
    assert [schedule.last_use[value] for value in (0, a, v, b, c)] == [0, 2, 3, 3, 3]
    assert schedule.last_use_of_storage[schedule.storages.of[a][0]] == 3
    assert schedule.dying == [[0], [], [a], [v, b, c]]


def test_a_schedule_can_be_read_and_compared() -> None:
    draft = Draft(1, sinks=[merge(4)])
    draft.hand_on(draft.over(4, draft.make(4, 0)))
    first, second = draft.schedule, replace(draft.schedule)
    assert first.decisions() == second.decisions() == ["v0 = run(w0)", "v1 = run(v0) over v0", "hand on v1 to 0"]
