"""Files in which values wait: used again while they serve, never by two values at once, gone with the last plan."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import torch

from koila.execution.offload import Files, empty_in_file, files_in, offload_in

SHAPE, STRIDE = (8, 16), (16, 1)


def value(number: float) -> torch.Tensor:
    return empty_in_file(SHAPE, STRIDE, torch.float32).fill_(number)


def test_a_file_serves_the_next_value_and_the_next_run() -> None:
    files = Files()
    places = set[int]()
    for _ in range(3):
        with offload_in(None, files=files):
            for number in range(4):
                made = value(number)
                places.add(made.data_ptr())
                assert made.eq(number).all()
                del made
    assert len(places) == 1


def test_values_that_live_at_once_have_files_of_their_own() -> None:
    with offload_in(None, files=Files()):
        made = [value(number) for number in range(4)]
        view = made[1][2:]
        made[1] = value(9.0)  # The view holds the file of what was there.
        again = value(7.0)
        for number, each in enumerate(made):
            assert each.eq(9.0 if number == 1 else number).all()
        assert view.eq(1.0).all() and again.eq(7.0).all()


def test_a_file_is_not_taken_for_a_value_that_is_much_smaller_or_larger() -> None:
    with offload_in(None, files=Files()):
        place = value(1.0).data_ptr()
        held = [empty_in_file(shape, (1,), torch.float32) for shape in ((10,), (129,))]
        assert place not in [each.data_ptr() for each in held]
        assert empty_in_file((100,), (1,), torch.float32).data_ptr() == place


def test_what_two_runs_have_no_use_for_is_let_go() -> None:
    files = Files()
    with offload_in(None, files=files):
        value(1.0)
        empty_in_file((1000,), (1,), torch.float32)
    assert len(files._free) == 2
    with offload_in(None, files=files):
        value(2.0)
    assert len(files._free) == 2  # Two programs that take turns.
    with offload_in(None, files=files):
        value(3.0)
    assert len(files._free) == 1


def test_a_run_without_files_does_not_count() -> None:
    files = Files()
    with offload_in(None, files=files):
        place = value(1.0).data_ptr()
    for _ in range(3):
        with offload_in(None, files=files):
            pass
    with offload_in(None, files=files):
        assert value(2.0).data_ptr() == place


def test_the_first_run_of_a_plan_takes_the_place_of_what_was_there() -> None:
    """A loop that tries plans: the files of one are not held beside those of the next."""
    files = Files()
    for size in (1000, 3000, 9000, 27000):
        with offload_in(None, files=files, is_first_run=True):
            held = [empty_in_file((size,), (1,), torch.float32) for _ in range(2)]
            assert sum(length for length, _, _ in files._free) == 0
            del held
            assert sum(length for length, _, _ in files._free) == 2 * 4 * size


def test_the_first_run_of_a_plan_lets_go_of_no_more_than_it_takes() -> None:
    files = Files()
    with offload_in(None, files=files):
        held = [empty_in_file((1000,), (1,), torch.float32) for _ in range(4)]
        del held
    with offload_in(None, files=files, is_first_run=True):
        large = empty_in_file((2001,), (1,), torch.float32)
        assert len(files._free) == 1
        again = value(5.0)
        assert len(files._free) == 0 and large.numel() == 2001 and again.eq(5.0).all()


def test_plans_share_the_files_of_a_directory(tmp_path: Path) -> None:
    one, other = files_in(str(tmp_path)), files_in(None)
    assert one is files_in(str(tmp_path)) and one is not other and other is files_in(None)


def test_files_are_gone_with_the_last_plan(tmp_path: Path) -> None:
    files = files_in(str(tmp_path))
    with offload_in(str(tmp_path), files=files):
        memory = weakref.ref(files.take(100))
        kept = value(3.0)
    gone = weakref.ref(files)
    del files
    gc.collect()
    assert memory() is None and kept.eq(3.0).all() and gone() is None
    del kept
    gc.collect()
    assert files_in(str(tmp_path))._free == []


def test_outside_of_a_run_no_file_waits_for_another_value() -> None:
    made = value(1.0)
    memory = made.untyped_storage().data_ptr()
    again = value(2.0)
    assert again.data_ptr() != memory and made.eq(1.0).all()
    with offload_in(None):
        assert value(3.0).eq(3.0).all()


def test_nothing_waits_in_no_file() -> None:
    with offload_in(None, files=Files()):
        assert empty_in_file((0, 3), (3, 1), torch.float64).shape == (0, 3)
