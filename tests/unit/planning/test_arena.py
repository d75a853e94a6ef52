"""Places in a buffer, on lists of sizes: nothing that is alive at the same time overlaps, and little is wasted."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from koila.planning.arena import ALIGNMENT, Block, arrange, least_bytes
from koila.planning.forms import Form
from koila.planning.operation import Operation, OperatorWork, Ref
from koila.planning.peak import Lives
from koila.planning.placement import placement_of
from koila.planning.step import Destination, Sink
from tests.unit.planning.lists import Draft, merge, simulated_peak

aten = torch.ops.aten


def check(blocks: Sequence[Block]) -> int:
    """Look at every pair; gives the bytes of the buffer."""
    offsets, num_bytes = arrange(blocks)
    places = [(offset, offset + block.num_bytes, block) for offset, block in zip(offsets, blocks, strict=True)]
    assert all(offset % ALIGNMENT == 0 for offset in offsets)
    assert all(stop <= num_bytes for _, stop, _ in places)
    for number, (start, stop, one) in enumerate(places):
        for other_start, other_stop, other in places[:number]:
            together = one.first <= other.last and other.first <= one.last
            assert not together or stop <= other_start or other_stop <= start, (one, other)
    assert num_bytes >= least_bytes(blocks)
    return num_bytes


def test_nothing() -> None:
    assert arrange([]) == ([], 0) and least_bytes([]) == 0


def test_one_after_the_other_share_a_place() -> None:
    assert check([Block(100, 0, 1), Block(100, 2, 3), Block(90, 4, 4)]) == 128


def test_at_the_same_time_they_do_not() -> None:
    assert check([Block(64, 0, 2), Block(64, 2, 3)]) == 128


def test_the_smallest_gap_that_is_long_enough_is_taken() -> None:
    walls = [Block(640, 0, 9), Block(576, 0, 0), Block(512, 0, 9), Block(320, 0, 0), Block(310, 0, 9)]
    offsets, _ = arrange([*walls, Block(300, 1, 2)])
    assert offsets[-1] == offsets[3], "the gap of 320, not the one of 576"


def test_a_block_of_no_bytes_takes_none() -> None:
    assert check([Block(0, 0, 5), Block(10, 0, 5)]) == ALIGNMENT


@pytest.mark.parametrize("seed", range(40))
def test_random_blocks(seed: int) -> None:
    rng = random.Random(seed)
    blocks = []
    for _ in range(rng.randint(1, 60)):
        first = rng.randint(0, 40)
        blocks.append(
            Block(rng.choice((1, 64, 65, 1000, 4096, rng.randint(1, 9999))), first, first + rng.randint(0, 9))
        )
    assert check(blocks) <= 1.35 * least_bytes(blocks)


@pytest.mark.parametrize("depth", [2, 7, 30])
def test_a_forward_and_a_backward_pass_waste_nothing(depth: int) -> None:
    """What is alive from one end to the other, last in, first out, and a temporary at each step."""
    saved = [Block(4096 + 64 * (step % 5), step, 2 * depth - step) for step in range(depth)]
    passing = [Block(2048, step, step + 1) for step in range(2 * depth)]
    assert check([*saved, *passing]) <= 1.05 * least_bytes([*saved, *passing])


# Which results of a schedule lie there.


def work(num_bytes: int, target: object = aten.exp.default) -> OperatorWork:
    return OperatorWork(Operation(target, (Ref(0),), {}), Form((num_bytes // 4,), (1,), torch.float32))


def test_results_share_places_when_their_lives_do_not_meet() -> None:
    draft = Draft(1)
    first = draft.make(640, 0, work=work(640))
    second = draft.make(640, first, work=work(640))
    draft.make(640, second, work=work(640))
    found = placement_of(draft.schedule, 1)
    assert list(found.offsets) == [1, 2, 3] and found.offsets[1] == found.offsets[3] != found.offsets[2]
    assert found.num_bytes == 1280 and found.placed_bytes == 3 * 640
    assert [now for now, _ in Lives(draft.schedule, False, found.storages).walk()] == [0, 0, 0]


def test_what_is_written_over_a_result_keeps_its_place() -> None:
    draft = Draft(1)
    first = draft.make(640, 0, work=work(640))
    over = draft.over(640, first, work=work(640))
    other = draft.make(128, 0, work=work(128))
    draft.make(64, over, other, work=work(64))
    schedule = draft.schedule
    assert schedule.overwritten == {over: first}
    found = placement_of(schedule, 1)
    assert over not in found.offsets and len(found.storages) == 4
    blocks = sorted([(found.offsets[first], 640), (found.offsets[other], 128)])
    assert blocks[0][0] + blocks[0][1] <= blocks[1][0], "the first place is taken until its last heir is read"


@pytest.mark.parametrize("destination", list(Destination))
def test_what_is_handed_on_has_memory_of_its_own(destination: Destination) -> None:
    draft = Draft(1, [Sink("it", destination, 640, 640)])
    first = draft.make(640, 0, work=work(640))
    over = draft.over(640, first, work=work(640))
    draft.hand_on(draft.step([over], (0, 0), is_view=True, work=work(640, aten.t.default)))
    assert not placement_of(draft.schedule, 1).storages


def test_what_a_foreign_function_or_a_doubtful_view_reads_has_memory_of_its_own() -> None:
    for target in (print, aten.reshape.default):
        draft = Draft(1)
        first = draft.make(640, 0, work=work(640))
        draft.make(640, first, work=work(640, target))
        assert not placement_of(draft.schedule, 1).storages


def test_views_prolong_a_life() -> None:
    draft = Draft(1)
    first = draft.make(640, 0, work=work(640))
    view = draft.step([first], (0, 0), is_view=True, work=work(640, aten.t.default))
    second = draft.make(640, 0, work=work(640))
    draft.make(640, view, second, work=work(640))
    assert placement_of(draft.schedule, 1).num_bytes == 3 * 640


def test_small_results_stay_outside_and_the_rest_is_counted() -> None:
    draft = Draft(1, [merge(256)])
    small = draft.make(64, 0, work=work(64))
    large = draft.make(640, small, work=work(640))
    draft.hand_on(draft.make(256, large, work=work(256)))
    found = placement_of(draft.schedule, 128)
    assert list(found.offsets) == [large] and found.num_bytes == 640
    assert max(now for now, _ in Lives(draft.schedule, False, found.storages).walk()) == 256
    assert simulated_peak(draft.schedule, False) == 640 + 256
