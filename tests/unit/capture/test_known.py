"""Known calls: which arguments are recognised, and what makes a step one that is followed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import koila
from koila.capture.at_once import MAX_PATIENCE, MAX_PROGRAMS, Program, here
from koila.capture.eager import EagerTensor, hand_out
from koila.capture.known import MAX_FORMS, Form, KnownCall, Origin, Unknowable
from koila.ir.source import user_site


def origin(*shape: int, requires_grad: bool = False) -> Origin:
    return Origin(torch.Size(shape), torch.float32, requires_grad)


def eager(source: Origin) -> Any:
    return hand_out(torch.zeros(source.shape), source)


def recognised(known: tuple[Any, dict[str, Any]], given: tuple[Any, dict[str, Any]]) -> bool:
    return bool(Form(*known).matcher(EagerTensor, frozenset())(*given))


HERE, THERE = origin(2, 3), origin(2, 3)
WEIGHT = torch.nn.Parameter(torch.ones(3, 3))
ALIKE: list[tuple[Any, Any]] = [
    ((1, 2.5, True, None, "mean", ...), (1, 2.5, True, None, "mean", ...)),
    (([1, 2], (3,), slice(1, None, 2)), ([1, 2], (3,), slice(1, None, 2))),
    ((torch.ones(2), WEIGHT), (torch.zeros(2), torch.nn.Parameter(torch.zeros(3, 3)))),
    ((torch.float32, torch.device("cpu")), (torch.float32, torch.device("cpu"))),
]
DIFFERENT: list[tuple[Any, Any]] = [
    ((1,), (2,)),
    ((1,), (1.0,)),
    ((1,), (1, 1)),
    ((True,), (False,)),
    (("mean",), ("sum",)),
    (([1, 2],), ([1],)),
    (([1],), ((1,),)),
    ((slice(1, None),), (slice(2, None),)),
    ((torch.ones(2),), (torch.ones(3),)),
    ((torch.ones(2),), (torch.ones(2, dtype=torch.float64),)),
    ((torch.float32,), (torch.float64,)),
]


@pytest.mark.parametrize(("known", "given"), ALIKE)
def test_arguments_that_are_recognised(known: Any, given: Any) -> None:
    assert recognised((known, {}), (given, None))
    assert recognised(((), {"of": known}), ((), {"of": given}))


@pytest.mark.parametrize(("known", "given"), DIFFERENT)
def test_arguments_that_are_not_recognised(known: Any, given: Any) -> None:
    assert not recognised((known, {}), (given, None))
    assert not recognised(((), {"of": known}), ((), {"of": given}))


def test_operands_are_known_by_where_they_came_from() -> None:
    known = (eager(HERE), torch.ones(3))
    assert recognised((known, {}), ((eager(HERE), torch.zeros(3)), {}))
    assert not recognised((known, {}), ((eager(THERE), torch.zeros(3)), {}))
    assert not recognised((known, {}), ((torch.zeros(2, 3), torch.zeros(3)), {}))
    lazy = koila.lazy(torch.zeros(2, 3))
    lazy._origin = HERE
    assert not recognised((known, {}), ((lazy, torch.zeros(3)), {}))


def test_what_cannot_be_compared_is_not_known() -> None:
    with pytest.raises(Unknowable):
        Form((object(),), None)


def test_a_number_that_varies_while_results_are_alike_may_be_any() -> None:
    root = KnownCall()
    call, is_new = root.learn(torch.mul, Form((eager(HERE), 0.5, 3), None), EagerTensor, [origin(2)], False)
    assert is_new
    assert not call.matches((eager(HERE), 0.25, 3), None)
    again, is_new = root.learn(torch.mul, Form((eager(HERE), 0.25, 3), None), EagerTensor, [origin(2)], False)
    assert again is call
    assert is_new
    assert call.matches((eager(HERE), 0.75, 3), None)
    assert not call.matches((eager(HERE), 0.75, 4), None)
    assert not call.matches((eager(HERE), 1, 3), None)


def test_a_number_that_changes_the_result_makes_another_call() -> None:
    root = KnownCall()
    for number in range(MAX_FORMS + 4):
        root.learn(torch.tile, Form((eager(HERE), number), None), EagerTensor, [origin(number)], False)
    forms = root.following[torch.tile]
    assert len(forms) == MAX_FORMS
    assert [form.results[0].shape for form in forms][-1] == (MAX_FORMS + 3,)


def test_a_program_that_went_astray_is_watched_for_longer_each_time() -> None:
    program = Program(user_site(), 0, [torch.ones(2)])
    found = []
    for _ in range(8):
        program.went_astray()
        found.append(program.patience)
    assert found == [2, 4, 8, 16, 32, MAX_PATIENCE, MAX_PATIENCE, MAX_PATIENCE]


def test_programs_of_a_place_are_bounded() -> None:
    for size in range(MAX_PROGRAMS + 5):
        koila.lazy(torch.ones(size + 1), eager="auto")
    (programs,) = here.programs.values()
    assert len(programs) == MAX_PROGRAMS


def test_layouts_make_programs() -> None:
    for given in (torch.ones(3, 4), torch.ones(4, 3).T, torch.ones(3, 4, dtype=torch.float64)):
        for _ in range(2):
            koila.lazy(given, eager="auto")
    (programs,) = here.programs.values()
    assert len(programs) == 3


def test_structures_are_handed_out_as_they_are() -> None:
    for _ in range(3):
        batch, number = koila.lazy({"x": torch.ones(2), "of": [torch.ones(2), "text"]}, 3, eager="auto")
        (batch["x"] + batch["of"][0]).sum().item()
    assert (type(batch["x"]), type(batch["of"][0]), batch["of"][1], number) == (EagerTensor, EagerTensor, "text", 3)
