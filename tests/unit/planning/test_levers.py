"""The levers on lists of sizes: the optimum that is known is reached, and what cannot be is refused; no tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from koila.planning.levers.offload import can_offload
from koila.planning.levers.order import reorder
from koila.planning.levers.recompute import least_bytes, made_again, recompute
from koila.planning.peak import peak_alone, peak_of
from koila.planning.rates import offload_seconds
from koila.planning.schedule import Schedule
from koila.planning.step import Kind, Place
from tests.unit.planning.lists import STORE, Draft, best_order, gather, merge, simulated_peak
from tests.unit.planning.test_peaks import CASES, random_schedule

# Order.


def branches(count: int, wide: int = 10) -> Schedule:
    """Wide values that shrink to one byte each, all wide ones first."""
    draft = Draft()
    values = [draft.make(wide) for _ in range(count)]
    draft.make(1, *[draft.make(1, each) for each in values])
    return draft.schedule


@pytest.mark.parametrize(("count", "expected"), [(1, 11), (2, 12), (3, 13), (8, 18)])
def test_branches_one_after_the_other(count: int, expected: int) -> None:
    schedule = branches(count)
    assert peak_of(schedule).num_bytes == max(11, 10 * count + 1)
    assert peak_of(reorder(schedule)).num_bytes == expected


@pytest.mark.parametrize(
    "name", ["branches_in_breadth", "diamond_with_a_long_arm", "sums_should_be_added_to_at_once", "diamond", "residual"]
)
def test_order_reaches_the_optimum(name: str) -> None:
    schedule, _, _, best = CASES[name]()
    assert peak_of(reorder(schedule)).num_bytes == best


def test_values_are_handed_on_at_once() -> None:
    draft = Draft(sinks=[gather(10)] * 4)
    for index, value in enumerate([draft.make(4) for _ in range(4)]):
        draft.hand_on(value, index)
    assert peak_of(draft.schedule).num_bytes == 16
    assert peak_of(reorder(draft.schedule)).num_bytes == best_order(draft.schedule) == 4


def test_order_cannot_help_a_chain() -> None:
    schedule = CASES["growing_chain"]()[0]
    assert reorder(schedule).steps == schedule.steps


@pytest.mark.parametrize("number", range(60))
def test_an_order_respects_operands(number: int) -> None:
    schedule = random_schedule(number)
    ordered, seen = reorder(schedule), {0, 1}
    assert sorted(step.value for step in ordered.steps) == sorted(step.value for step in schedule.steps)
    for step in ordered.steps:
        assert set(step.operands) <= seen
        seen.add(step.value)


# Recomputation.


def training(layers: int, size: int = 4) -> Schedule:
    """Activations of a chain of layers, then their gradients, each of which reads the activation before it."""
    draft = Draft(1)
    activations = [0]
    for _ in range(layers):
        activations.append(draft.make(size, activations[-1]))
    gradient = draft.make(size, activations[-1])
    for activation in reversed(activations[1:-1]):
        gradient = draft.make(size, gradient, activation)
    draft.make(size, gradient, 0)
    return draft.schedule


@pytest.mark.parametrize(
    ("layers", "plain", "reachable"), [(2, 12, 12), (4, 20, 16), (8, 36, 20), (16, 68, 28), (32, 132, 44)]
)
def test_a_network_is_trained_in_fewer_bytes(layers: int, plain: int, reachable: int) -> None:
    """All activations and a gradient at first; a few of them, computed again from each other, in the end."""
    schedule = training(layers)
    assert peak_of(schedule).num_bytes == plain
    found = recompute(schedule, reachable)
    assert found is not None and peak_of(found).num_bytes <= reachable
    assert any(step.is_repeat for step in found.steps) == (reachable < plain)


@pytest.mark.parametrize("layers", [2, 4, 8, 16])
def test_less_than_a_step_needs_is_refused(layers: int) -> None:
    """A step of the backward pass has two operands and a result."""
    schedule = training(layers)
    assert least_bytes(schedule) == 12
    assert recompute(schedule, 11) is None


def test_a_value_that_waits_is_computed_again() -> None:
    draft = Draft(1)
    cheap = draft.make(4, 0)
    wide = draft.make(9, 0)
    draft.make(1, draft.make(1, wide), cheap)
    schedule = draft.schedule
    assert peak_of(schedule).num_bytes == 14
    found = recompute(schedule, 10)
    assert found is not None and peak_of(found).num_bytes == 10
    assert [step.is_repeat for step in found.steps] == [False, False, False, True, False]
    assert recompute(schedule, 9) is None


def test_the_cheapest_value_per_byte_goes() -> None:
    draft = Draft(1)
    dear = draft.step([0], 4, seconds=100.0)
    cheap = draft.step([0], 4, seconds=1.0)
    wide = draft.make(8, 0)
    draft.make(1, dear, cheap, draft.make(1, wide))
    found = recompute(draft.schedule, 13)
    assert found is not None
    assert [step.seconds for step in found.steps if step.is_repeat] == [1.0]


def test_operands_that_are_gone_are_computed_again_too() -> None:
    draft = Draft(1)
    a = draft.make(4, 0)
    b = draft.make(4, a)
    wide = draft.make(12, 0)
    draft.make(1, b, draft.make(1, wide))
    found = recompute(draft.schedule, 13)
    assert found is not None and peak_of(found).num_bytes <= 13
    assert sum(step.is_repeat for step in found.steps) == 2


def test_nothing_is_added_to_a_sum_twice() -> None:
    """The value of a region that adds to a sum cannot be had again: it stays."""
    draft = Draft(1, sinks=[merge(6)])
    region = draft.step([0], 4, seconds=0.0, kind=Kind.SUB_PLAN, sinks=(0,), holds_operands=True)
    value = draft.step([region], (0, 0), seconds=0.0)
    wide = draft.make(9, 0)
    draft.make(1, value, draft.make(1, wide))
    assert peak_of(draft.schedule).num_bytes == 14
    assert recompute(draft.schedule, 13) is None


def test_what_is_stored_stays() -> None:
    draft = Draft(1, sinks=[STORE], chunk=None)
    draft.hand_on(draft.make(4, 0))
    draft.make(1, draft.make(9, 0))
    assert peak_alone(draft.schedule).num_bytes == least_bytes(draft.schedule) == 14
    assert recompute(draft.schedule, 13) is None


def test_a_view_goes_with_its_base() -> None:
    draft = Draft(1)
    view = draft.view(draft.make(4, 0))
    wide = draft.make(9, 0)
    draft.make(1, view, draft.make(1, wide))
    found = recompute(draft.schedule, 10)
    assert found is not None and peak_of(found).num_bytes == 10
    assert [step.is_view for step in found.steps if step.is_repeat] == [False, True]


def test_results_over_operands_are_counted_while_playing() -> None:
    draft = Draft(1)
    value = draft.make(8, 0)
    for _ in range(5):
        value = draft.over(8, value)
    found = recompute(draft.schedule, 8)
    assert found is not None and found.steps == draft.schedule.steps
    assert recompute(draft.schedule, 7) is None


def test_a_result_is_not_counted_over_a_workspace() -> None:
    """The run would not write it there: the play must not count on it."""
    draft = Draft(1)
    value = draft.make(8, 0, retained_bytes=1)
    draft.over(8, value)
    assert peak_of(draft.schedule).num_bytes == 17
    assert recompute(draft.schedule, 16) is None


# Offload.


def waiting(size: int, is_view: bool = False, fills: bool = True) -> Schedule:
    """A value that took very long to compute waits while a wide one is there."""
    draft = Draft(1)
    value = draft.step([0], size, seconds=1e6, is_view=is_view, fills_storage=fills)
    wide = draft.make(9, 0)
    draft.make(1, value, draft.make(1, wide))
    return draft.schedule


def test_a_dear_value_goes_to_a_file() -> None:
    schedule = waiting(4)
    found = recompute(schedule, 10, offload=True)
    assert found is not None and peak_of(found).num_bytes == 10
    kinds = [step.kind for step in found.steps]
    assert kinds == [Kind.RUN, Kind.OFFLOAD, Kind.RUN, Kind.RUN, Kind.FETCH, Kind.RUN]
    offload, fetch, last = found.steps[1], found.steps[4], found.steps[5]
    assert fetch.operands == (offload.value,) and fetch.value in last.operands
    assert simulated_peak(found, False) == 10


def test_offload_alone_does_not_compute_again() -> None:
    found = recompute(waiting(4), 10, offload=True, again=False)
    assert found is not None and not any(step.is_repeat for step in found.steps)
    assert recompute(waiting(4), 10, offload=False, again=False) is None


@pytest.mark.parametrize(("is_view", "fills"), [(True, True), (False, False)])
def test_parts_of_a_storage_are_not_offloaded(is_view: bool, fills: bool) -> None:
    schedule = waiting(4, is_view, fills)
    assert not can_offload(schedule.steps[0])
    found = recompute(schedule, 10, offload=True)
    assert found is not None and not any(step.kind is Kind.OFFLOAD for step in found.steps)


def test_a_cheap_value_is_computed_again_rather_than_offloaded() -> None:
    draft = Draft(1)
    value = draft.step([0], 4, seconds=offload_seconds(4) / 2)
    wide = draft.make(9, 0)
    draft.make(1, value, draft.make(1, wide))
    found = recompute(draft.schedule, 10, offload=True)
    assert found is not None and not any(step.kind is Kind.OFFLOAD for step in found.steps)


# All of them, on anything.


@pytest.mark.parametrize("number", range(100))
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("with_views", [False, True])
def test_what_is_played_fits(number: int, offload: bool, with_views: bool) -> None:
    """And computes the same values: each step reads what it read before, or another copy of it.

    With views the play may hope for too much: a base that is computed again while a view of the first one is alive
    counts once. Who asks for a schedule simulates what he gets.
    """
    schedule = random_schedule(number, with_views)
    peak, least = peak_of(schedule).num_bytes, least_bytes(schedule)
    for limit in range(peak, least - 1, -1):
        found = recompute(schedule, limit, offload)
        if found is None:
            continue
        assert peak_of(found).num_bytes <= limit or with_views
        assert _meaning(found) == _meaning(schedule)
        assert recompute(schedule, limit, offload).decisions() == found.decisions()  # type: ignore[union-attr]
    assert recompute(schedule, least - 1, offload) is None


@pytest.mark.parametrize("number", range(40))
def test_moves_are_made_again_at_other_sizes(number: int) -> None:
    """In a schedule of other bytes they give the same steps, and mean the same."""
    schedule = random_schedule(number)
    larger = replace(schedule, steps=tuple(replace(step, places=_doubled(step.places)) for step in schedule.steps))
    ordered = reorder(schedule)
    for found in (ordered, recompute(schedule, least_bytes(schedule)), recompute(ordered, least_bytes(ordered))):
        if found is not None:
            assert found.moves is not None
            again = made_again(larger, found.moves)
            assert again is not None
            assert [(step.value, step.operands) for step in again.steps] == [(s.value, s.operands) for s in found.steps]
            assert sorted(map(str, _meaning(again))) == sorted(map(str, _meaning(larger)))  # An order moves effects.


def _doubled(places: tuple[Place, ...]) -> tuple[Place, ...]:
    return tuple(2 * place if isinstance(place, int) else place for place in places)


def test_moves_for_another_schedule_are_refused() -> None:
    draft = Draft(1, sinks=[merge(4)])
    first = draft.make(4, 0)
    second = draft.make(4, first)
    last = draft.hand_on(second)
    run = Kind.RUN
    assert made_again(draft.schedule, [(run, first), (run, second), (run, last)]) is not None
    assert made_again(draft.schedule, [(run, second), (run, first), (run, last)]) is None  # An operand is missing.
    assert made_again(draft.schedule, [(run, first), (run, second)]) is None  # Nothing is handed on.
    assert made_again(draft.schedule, [(run, first), (run, second), (run, last), (run, last)]) is None  # Twice.
    assert made_again(draft.schedule, [(run, first), (run, second), (run, last), (run, 9)]) is None  # Unknown.
    assert made_again(draft.schedule, [(run, first), (Kind.FETCH, second), (run, second), (run, last)]) is None


def _meaning(schedule: Schedule) -> list[object]:
    """What each effect of a schedule hands on, as a tree of calls, in order."""
    makers = {step.value: step for step in schedule.steps}
    known: dict[int, object] = {}

    def tree(value: int) -> object:
        if value not in makers:
            return value
        step = makers[value]
        if value not in known:
            if step.kind is Kind.FETCH:
                known[value] = tree(makers[step.operands[0]].operands[0])
            else:
                known[value] = (step.places, step.seconds, *(tree(operand) for operand in step.operands))
        return known[value]

    return [(step.kind, step.sinks, *(tree(o) for o in step.operands)) for step in schedule.steps if step.has_effects]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("lever", [reorder, lambda schedule: recompute(schedule, 10**6)], ids=["order", "recompute"])
def test_levers_do_nothing_where_nothing_is_asked(name: str, lever: Callable[[Schedule], Schedule | None]) -> None:
    schedule = CASES[name]()[0]
    found = lever(schedule)
    assert found is not None
    assert sorted(step.value for step in found.steps) == sorted(step.value for step in schedule.steps)
