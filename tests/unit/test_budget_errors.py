"""Budgets: what they mean, which one holds, and what is said about those that make no sense."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import koila
from koila import _budget
from koila._budget import ACCEPTED, Budget, alive_bytes, current_budget, default_bytes, free_bytes, read_bytes
from koila.execution.jobs import resolved

CPU = torch.device("cpu")
MIB = 2**20

# What is written where an amount of memory belongs, and the fact that the error states; `{}` is what it is called.
NO_AMOUNTS: list[tuple[object, str]] = [
    ("12 parsecs", "{}='12 parsecs' cannot be read: 'parsecs' is not a unit of memory"),
    ("5 MBit", "{}='5 MBit' cannot be read: 'MBit' is not a unit of memory"),
    ("4G", "{}='4G' cannot be read: 'G' is not a unit of memory"),
    ("1,5GB", "{}='1,5GB' cannot be read: ',5GB' is not a unit of memory"),
    ("", "{}='' cannot be read: it is empty"),
    ("  ", "{}='  ' cannot be read: it is empty"),
    ("512", "{}='512' cannot be read: it has no unit"),
    ("0.5", "{}='0.5' cannot be read: it has no unit"),
    ("MiB", "{}='MiB' cannot be read: it does not begin with a number"),
    ("a lot\nof it", "{}='a lot\\nof it' cannot be read: it does not begin with a number"),
    (0, "{}=0 leaves nothing to run in"),
    (-5, "{}=-5 leaves nothing to run in"),
    ("0MiB", "{}='0MiB' leaves nothing to run in"),
    ("0.1B", "{}='0.1B' leaves nothing to run in"),
    ("-1GiB", "{}='-1GiB' leaves nothing to run in"),
    (1e-300, "{}=1e-300 leaves nothing to run in"),
    (0.0, "{}=0.0 is not a share in (0, 1]"),
    (1.5, "{}=1.5 is not a share in (0, 1]"),
    (-0.1, "{}=-0.1 is not a share in (0, 1]"),
    (1e9, "{}=1000000000.0 is not a share in (0, 1]"),
    (math.nan, "{}=nan is not a share in (0, 1]"),
    (math.inf, "{}=inf is not a share in (0, 1]"),
    (True, "{} is not a number of bytes but of type bool"),
    (torch.tensor(512), "{} is not a number of bytes but of type Tensor"),
    ([512, "MiB"], "{} is not a number of bytes but of type list"),
    (1j, "{} is not a number of bytes but of type complex"),
    (2**63, "{}=2^63 or more is more than any device has (2^63 bytes)"),
    (10**5000, "{}=2^16609 or more is more than any device has (2^63 bytes)"),
    ("99999PiB", "{}='99999PiB' is more than any device has (2^63 bytes)"),
    ("9" * 80 + "PB", "{}='" + "9" * 59 + "… is more than any device has (2^63 bytes)"),
]


def error_of(*args: Any, **arguments: Any) -> koila.BudgetError:
    with pytest.raises(koila.BudgetError) as found:
        koila.budget(*args, **arguments)
    return found.value


@pytest.mark.parametrize(("amount", "fact"), NO_AMOUNTS, ids=[fact.format("")[:40] for _, fact in NO_AMOUNTS])
def test_what_is_no_amount(amount: Any, fact: str) -> None:
    with pytest.raises(koila.BudgetError) as found:
        koila.lazy(torch.ones(2), budget=amount)
    for name, error in (
        ("allowed", error_of(amount)),
        ("total", error_of(total=amount)),
        ("budget", found.value),
    ):
        assert error.fact == fact.format(name)
        assert error.hint is not None and error.hint.startswith(f'{name}="') and ACCEPTED in error.hint
        assert "\n  try: " in str(error) and len(str(error).splitlines()) == 2


@pytest.mark.parametrize(
    ("text", "example"),
    [
        ("512", "512MiB"), ("12 parsecs", "12MiB"), ("", "512MiB"), ("2G", "2GiB"), ("2 gigs", "2GiB"), ("3k", "3KiB"),
        ("1.5Gi", "1.5GiB"), ("4 terabytes", "4TiB"), ("7Mo", "7MiB"),
    ],
)  # fmt: skip
def test_the_way_out_is_one(text: str, example: str) -> None:
    assert f'allowed="{example}"; accepted are ' in str(error_of(text))
    with koila.budget(example):
        pass


@pytest.mark.parametrize(
    ("amount", "fact"),
    [
        (None, "reserved is not a number of bytes but None"),
        (False, "reserved is not a number of bytes but of type bool"),
        (-5, "reserved=-5 is less than nothing"),
        ("-5MB", "reserved='-5MB' is less than nothing"),
        ("some", "reserved='some' cannot be read: it does not begin with a number"),
        (2.0, "reserved=2.0 is not a share in (0, 1]"),
    ],
)
def test_what_cannot_be_reserved(amount: Any, fact: str) -> None:
    error = error_of("1GiB", reserved=amount)
    assert error.fact == fact and ACCEPTED in str(error.hint)


@pytest.mark.parametrize("name", ["allowed", "total"])
def test_what_is_reserved_must_leave_something(name: str) -> None:
    error = error_of(**{name: 100}, reserved=100)
    assert error.fact == f"reserved=100 of {name}=100 bytes leaves nothing to run in"
    assert error.hint == "reserve less than 100 B, or allow more"


@pytest.mark.parametrize("size", [0, -3, 2.5, "4", True, torch.tensor(4), -(2**70)])
def test_what_is_no_chunk_size(size: Any) -> None:
    error = error_of(chunk_size=size)
    assert error.fact.startswith("chunk_size must be a whole number of at least 1, got ")
    assert "chunk_size=1" in str(error.hint) and len(str(error).splitlines()) == 2


@pytest.mark.parametrize("name", ["allowed", "total"])
def test_a_chunk_size_and_bytes(name: str) -> None:
    error = error_of(**{name: "1GiB"}, chunk_size=4)
    assert error.fact.startswith(f"both a chunk size (4) and a byte budget ({name}='1GiB'): with bytes, koila picks")
    assert error.hint == 'koila.budget("512MiB") or koila.budget(chunk_size=4)'


@pytest.mark.parametrize("process", [None, 1, "yes"])
def test_process_is_a_bool(process: Any) -> None:
    expected = f"process={process!r} is neither True nor False\n  try: process=True "
    assert str(error_of(process=process)).startswith(expected)


def test_a_scope_without_a_size_keeps_the_process_small_too() -> None:
    with koila.budget(100, process=True), koila.budget(reserved=10):
        assert current_budget() == Budget(allowed_bytes=100, reserved_bytes=10, process=True)
    with koila.budget(100), koila.budget(process=True):
        assert current_budget() == Budget(allowed_bytes=100, process=True)


@pytest.mark.parametrize(
    ("data", "resident", "left"),
    [(0, 0, 400), (32, 30, 400), (33, 0, 375), (72, 40, 350), (40, 132, 300), (900, 0, 200), (-50, -10, 400)],
)
def test_what_the_process_has_grown_by_counts(
    monkeypatch: pytest.MonkeyPatch, data: int, resident: int, left: int
) -> None:
    """Beyond what every process takes, and up to half of the budget."""
    held = [(500 * MIB, 600 * MIB)]
    monkeypatch.setattr(_budget, "held_by_process", lambda: held[-1])
    with koila.budget("400MiB", process=True), koila.budget(tune=False):
        held.append(((500 + data) * MIB, (600 + resident) * MIB))
        now = resolved(current_budget(), lambda: 0, (CPU,))
        assert (now.allowed_bytes, now.most_bytes) == (left * MIB, None if left == 400 else 400 * MIB)
    with koila.budget("400MiB"):
        held.append((5000 * MIB, 5000 * MIB))
        assert resolved(current_budget(), lambda: 0, (CPU,)).allowed_bytes == 400 * MIB


def test_what_the_process_has_grown_by_causes_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [(500 * MIB, 600 * MIB)]
    monkeypatch.setattr(_budget, "held_by_process", lambda: held[-1])
    x, weight = torch.randn(64, 32), torch.randn(32, 32, requires_grad=True)
    loss = (koila.lazy(x) @ weight).tanh().square().mean()
    with pytest.raises(koila.BudgetError) as refused:
        koila.plan(loss, backward=True, budget=1)
    with koila.budget(refused.value.needed_bytes, process=True):
        held.append((5000 * MIB, 5000 * MIB))
        assert koila.plan(loss, backward=True).projected_bytes == refused.value.needed_bytes
    with koila.budget(refused.value.needed_bytes - 1, process=True), pytest.raises(koila.BudgetError, match="needs"):
        koila.plan(loss, backward=True)


@pytest.mark.parametrize("tune", [None, 1, "no"])
def test_tune_is_a_bool(tune: Any) -> None:
    assert str(error_of(tune=tune)).startswith(f"tune={tune!r} is neither True nor False\n  try: tune=False ")


def test_where_nothing_can_be_offloaded_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setattr(os, "access", lambda path, mode: "locked" not in str(path))
    locked = tmp_path / "locked"
    locked.mkdir()
    for place, fault in [
        (str(tmp_path / "none"), "does not exist"),
        ("", "does not exist"),
        (str(file), "is not a directory"),
        (str(locked), "is a directory that koila may not write to"),
        (3, "is neither True, False nor a directory but of type int"),
        (b"/tmp", "is neither True, False nor a directory but of type bytes"),
    ]:
        error = error_of(offload=place)
        assert error.fact.startswith("offload=") and error.fact.endswith(fault)
        assert str(error.hint).endswith("accepted are True, False and a directory to write to")


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("12 parsecs", "KOILA_BUDGET='12 parsecs' cannot be read: 'parsecs' is not a unit of memory"),
        ("much", "KOILA_BUDGET='much' cannot be read: it does not begin with a number"),
        ("0", "KOILA_BUDGET=0 leaves nothing to run in"),
        ("-7", "KOILA_BUDGET=-7 leaves nothing to run in"),
        ("1.5", "KOILA_BUDGET=1.5 is not a share in (0, 1]"),
        ("nan", "KOILA_BUDGET=nan is not a share in (0, 1]"),
    ],
)
def test_what_the_variable_cannot_be(text: str, fact: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KOILA_BUDGET", text)
    for _ in range(2):
        with pytest.raises(koila.BudgetError) as found:
            current_budget()
        assert found.value.fact == fact
        assert "try: KOILA_BUDGET=" in str(found.value) and 'KOILA_BUDGET="' not in str(found.value)
    assert current_budget([8]).allowed_bytes == 8
    with pytest.raises(koila.BudgetError, match="KOILA_BUDGET"):
        koila.lazy(torch.ones(2)).sum().item()


def test_a_mistake_is_reported_where_it_is_written() -> None:
    with pytest.raises(koila.BudgetError, match="is not a unit of memory"):

        @koila.budget("12 parsecs")
        def never_called() -> None: ...


# The run says what only it can know.


def test_a_total_that_is_smaller_than_what_is_alive() -> None:
    with koila.budget(total="1MiB", reserved="1KiB") as scope, pytest.raises(koila.BudgetError) as found:
        scope.limit()
    assert found.value.fact.startswith("total=1.0 MiB leaves nothing to run in: ")
    assert found.value.fact.endswith(" MiB are alive on cpu and 1.0 KiB reserved")
    assert "or allowed=, which does not count what is alive" in str(found.value.hint)


def test_more_reserved_by_the_scope_than_lazy_allows() -> None:
    with (
        koila.budget(reserved="1KiB"),
        pytest.raises(koila.BudgetError, match=r"reserved=1\.0 KiB of 8 B allowed leaves nothing"),
    ):
        current_budget([8]).limit()


# What they mean.


def test_the_limit() -> None:
    assert Budget().limit() is None and Budget(chunk_size=3).limit() is None
    assert Budget(allowed_bytes=100).limit() == 100
    assert Budget(allowed_bytes=100, reserved_bytes=30).limit() == 70
    assert Budget(allowed_bytes=100, total_bytes=2**50, reserved_bytes=30).limit() == 70
    left = Budget(allowed_bytes=2**50, total_bytes=2**40, reserved_bytes=2**30).limit()
    assert left is not None and 0 < 2**40 - 2**30 - left < 2**36


def test_a_total_counts_what_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_budget, "alive_bytes", lambda device=None: 300 if device is None else 20)
    assert Budget(total_bytes=1000).limit() == 700
    assert Budget(total_bytes=1000).limit(torch.device("cuda")) == 980
    assert Budget(total_bytes=1000, allowed_bytes=650, reserved_bytes=50).limit() == 600


def test_a_device_that_is_not_here() -> None:
    if torch.accelerator.is_available():
        pytest.skip("an accelerator is here: the error for a missing one cannot be seen")
    with koila.budget(total="24GiB") as scope:
        assert scope.limit(torch.device("cuda", 1)) == 24 * 2**30
    with pytest.raises(koila.BudgetError, match=r"cuda is not here, so what is free on it is not known\n  try: total="):
        free_bytes(torch.device("cuda"))


def test_shares() -> None:
    with koila.budget(0.5) as half, koila.budget(total=1.0) as whole:
        assert half.allowed_bytes == pytest.approx(free_bytes() / 2, rel=0.2)
        assert whole.total_bytes is not None and whole.total_bytes > half.allowed_bytes + alive_bytes()


def test_where_to_offload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for place, directory in [(None, None), (False, None), (True, str(tmp_path)), (tmp_path, str(tmp_path))]:
        with koila.budget(offload=place) as scope:
            assert scope.offload == directory
    monkeypatch.chdir(tmp_path)
    with koila.budget("1GiB", offload=".") as scope:
        assert scope.offload == str(tmp_path)


def test_read_bytes_as_the_engine_calls_it() -> None:
    assert read_bytes("512MiB", "budget") == 512 * MIB
    assert read_bytes(7, "budget") == 7
    assert 0 < read_bytes(0.25, "budget") < free_bytes()


# Which one holds.


def test_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KOILA_BUDGET", raising=False)
    assert current_budget() == Budget(is_default=True) and not current_budget().limits
    monkeypatch.setenv("KOILA_BUDGET", "  ")
    assert current_budget().is_default
    monkeypatch.setenv("KOILA_BUDGET", "3MiB")
    assert current_budget() == Budget(allowed_bytes=3 * MIB)
    with koila.budget("2MiB"):
        assert current_budget() == Budget(allowed_bytes=2 * MIB)
        with koila.budget(total="5GiB"):
            assert current_budget() == Budget(total_bytes=5 * 2**30)
        assert current_budget([9, 7, 8]) == Budget(allowed_bytes=7)
    assert current_budget([7]).allowed_bytes == 7


@pytest.mark.parametrize(("text", "allowed"), [("1073741824", 2**30), ("64 MiB", 64 * MIB), (" 1.5GB ", 1_500_000_000)])
def test_the_variable_is_read_like_a_literal(text: str, allowed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KOILA_BUDGET", text)
    assert current_budget() == Budget(allowed_bytes=allowed)


def test_a_share_in_the_variable_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KOILA_BUDGET", "0.5")
    first = current_budget()
    held = torch.ones(8 * MIB)
    assert current_budget() == first and first.allowed_bytes and len(held) == 8 * MIB


def test_what_lazy_was_given_takes_the_settings_of_the_scope_but_no_size(tmp_path: Path) -> None:
    with koila.budget(chunk_size=4, reserved=2, offload=tmp_path, tune=False):
        assert current_budget().chunk_size == 4
        assert current_budget([7]) == Budget(None, 7, None, 2, str(tmp_path), False)
        assert current_budget([7]).limit() == 5


def test_a_scope_that_names_no_size_keeps_the_one_around_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KOILA_BUDGET", raising=False)
    with koila.budget(100, reserved=10, tune=False):
        with koila.budget(offload=tmp_path) as inner:
            assert inner == current_budget() == Budget(None, 100, None, 10, str(tmp_path), True)
        with pytest.raises(koila.BudgetError, match="reserved=200 of allowed=100"), koila.budget(reserved=200):
            pass
        assert current_budget() == Budget(allowed_bytes=100, reserved_bytes=10, tune=False)
    with koila.budget(reserved=3):
        assert current_budget() == Budget(reserved_bytes=3, is_default=True)
        monkeypatch.setenv("KOILA_BUDGET", "8B")
        assert current_budget() == Budget(allowed_bytes=8, reserved_bytes=3)


def test_a_scope_can_be_entered_again_and_inside_itself() -> None:
    @koila.budget(chunk_size=2)
    def depth(left: int) -> int:
        assert current_budget().chunk_size == 2
        return 1 + depth(left - 1) if left else 0

    assert depth(3) == 3
    scope = koila.budget("1KiB")
    for _ in range(2):
        with scope as outer, scope as inner:
            assert outer == inner == current_budget() == Budget(allowed_bytes=1024)
    assert current_budget().allowed_bytes != 1024


def test_what_is_free_less_a_margin() -> None:
    assert 0 < default_bytes() < free_bytes()
    assert default_bytes(reserved_bytes=2**62) == 0
