"""The exception tree: its shape, its messages, its fields."""

import copy
import pickle
import re

import pytest

from koila import errors
from koila.errors import BudgetError, KoilaError, compose_message

ALL = [KoilaError, *KoilaError.__subclasses__()]


def test_the_tree_is_the_one_in_the_docstring() -> None:
    assert errors.__doc__ is not None
    drawn = re.findall(r"^ +(?:[├└]── )?(\w+Error)\b", errors.__doc__, re.MULTILINE)
    assert drawn == [error.__name__ for error in ALL]


def test_a_budget_error_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="needs 2 B"):
        raise BudgetError("needs 2 B", needed_bytes=2, allowed_bytes=1)


@pytest.mark.parametrize("error", ALL)
def test_three_parts(error: type[KoilaError]) -> None:
    raised = error("needs 5.2 GiB", where="softmax, train.py:41", hint='budget="5.3GiB"')
    assert str(raised) == 'needs 5.2 GiB\n  at: softmax, train.py:41\n  try: budget="5.3GiB"'
    assert (raised.fact, raised.where, raised.hint) == ("needs 5.2 GiB", "softmax, train.py:41", 'budget="5.3GiB"')


@pytest.mark.parametrize(
    ("where", "hint", "text"),
    [
        (None, None, "fact"),
        ("a.py:1", None, "fact\n  at: a.py:1"),
        (None, "less", "fact\n  try: less"),
    ],
)
def test_missing_parts_are_left_out(where: str | None, hint: str | None, text: str) -> None:
    assert compose_message("fact", where, hint) == text
    assert str(KoilaError("fact", where=where, hint=hint)) == text


def test_a_part_set_on_the_way_is_rendered() -> None:
    error = KoilaError("fact")
    error.where = "a.py:1"
    assert str(error) == "fact\n  at: a.py:1"


@pytest.mark.parametrize("again", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_copies_keep_every_field(again) -> None:  # type: ignore[no-untyped-def]
    error = BudgetError("fact", where="a.py:1", hint="more", needed_bytes=7, allowed_bytes=5)
    twin = again(error)
    assert type(twin) is BudgetError
    assert str(twin) == str(error)
    assert vars(twin) == vars(error)
