"""What used to be silent: a line that has no effect is warned about, once per place, with what to write instead."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import koila


@contextmanager
def recorded() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


def line_of(text: str, function: Callable[..., Any]) -> int:
    """The line of a function that holds a text."""
    lines, start = inspect.getsourcelines(function)
    return start + next(number for number, line in enumerate(lines) if text in line)


def assert_one(found: list[warnings.WarningMessage], line: int, *texts: str) -> None:
    assert len(found) == 1, [str(each.message) for each in found]
    assert found[0].category is koila.KoilaWarning and issubclass(koila.KoilaWarning, UserWarning)
    assert (found[0].filename, found[0].lineno) == (__file__, line)
    message = str(found[0].message)
    assert "\n  try: " in message
    for text in texts:
        assert text in message


NOTHING: dict[str, tuple[Callable[[], Any], str, str]] = {
    "module": (lambda: torch.nn.Linear(2, 2), "of a Linear", "model(koila.lazy(x))"),
    "loader": (lambda: DataLoader(torch.ones(4, 2)), "of a DataLoader", "for x, y in loader"),  # type: ignore[arg-type]
    "array": (lambda: np.ones(3), "of a ndarray", "torch.as_tensor(array)"),
    "arrays": (lambda: {"x": np.ones(3), "n": 3}, "of a dict of ndarray", "torch.as_tensor(array)"),
    "generator": (lambda: (torch.ones(2) for _ in range(3)), "of a generator", "for x, y in loader"),
    "iterator": (lambda: iter([torch.ones(2)]), "of a list_iterator", "for x, y in loader"),
    "object": (lambda: SimpleNamespace(x=torch.ones(2)), "of a SimpleNamespace", "koila.lazy(value.x"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "of a Tensor", "to_dense()"),
}


@pytest.mark.parametrize("name", NOTHING)
def test_lazy_says_if_it_makes_nothing_lazy(name: str) -> None:
    make, what, instead = NOTHING[name]
    value = make()
    with recorded() as found:
        for _ in range(3):
            assert koila.lazy(value) is value or name == "arrays"
    assert_one(found, line_of("koila.lazy(value) is", test_lazy_says_if_it_makes_nothing_lazy), what, instead)
    assert koila.metrics.counter_value("warned::nothing lazy") == 1
    if name == "generator":
        assert len(list(value)) == 3, "it is not consumed"


def test_one_value_of_several_that_is_not_lazy_is_named() -> None:
    with recorded() as found:
        x, model = koila.lazy(torch.ones(2), torch.nn.Linear(2, 2))
    assert isinstance(x, koila.LazyTensor) and type(model) is torch.nn.Linear
    assert len(found) == 1 and "of a Linear" in str(found[0].message)


def test_plain_data_beside_tensors_is_no_mistake() -> None:
    koila.lazy({"x": torch.ones(2), "ids": np.ones(2), "name": "a"}, None, 3, "text", [], torch.Size([2]), np.int64(3))


BATCHES: dict[str, tuple[tuple[Any, ...], Any]] = {
    "no such dimension": ((torch.ones(4, 2), torch.ones(4)), 2),
    "from the right": ((torch.ones(4),), -2),
    "a wrong name": (({"x": torch.ones(4, 2)},), {"y": 0}),
    "names for values": ((torch.ones(4, 2), torch.ones(4)), {"x": 0}),
    "a structure": (((torch.ones(4), torch.ones(4)),), (1, None)),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_that_matches_nothing_is_said(name: str) -> None:
    values, batch = BATCHES[name]
    with recorded() as found:
        for _ in range(2):
            koila.lazy(*values, batch=batch)
    line = line_of("koila.lazy(*values", test_a_batch_that_matches_nothing_is_said)
    assert_one(found, line, f"batch={batch!r} matches none of the tensors ([4", "never cut")


def test_a_batch_that_matches_something_or_is_not_named_is_no_mistake() -> None:
    koila.lazy(torch.tensor(1.0))
    koila.lazy(torch.ones(4, 2), batch=None)
    koila.lazy({"x": torch.ones(4, 2), "table": torch.ones(9)}, batch={"x": 0, "labels": 0})


def test_a_budget_that_is_not_a_scope_is_said() -> None:
    with recorded() as found:
        for _ in range(2):
            koila.budget("10KiB")
    line = line_of('koila.budget("10KiB")', test_a_budget_that_is_not_a_scope_is_said)
    assert_one(found, line, "never entered: it limits nothing", "with koila.budget(...):", "koila.lazy(x, budget=...)")


def test_a_budget_that_is_used_or_refused_says_nothing() -> None:
    scope = koila.budget("10KiB")
    with scope:
        pass
    koila.budget(chunk_size=2)(lambda: None)
    with pytest.raises(koila.BudgetError):
        koila.budget("10 bananas")


def test_a_scope_that_closes_before_the_backward_is_said() -> None:
    weight = torch.ones(3, requires_grad=True)
    with recorded() as found:
        for _ in range(2):
            with koila.budget("1MiB"):
                loss = (koila.lazy(torch.ones(4, 3)) * weight).square().sum()
            loss.backward()
    function = test_a_scope_that_closes_before_the_backward_is_said
    recorded_at, scope = line_of("loss = (", function), line_of("with koila.budget", function)
    assert_one(
        found, line_of("loss.backward()", function), f"recorded at {__file__}:{recorded_at}",
        f"of {__file__}:{scope}", "budget does not hold", "move this line into the scope",
    )  # fmt: skip
    assert torch.equal(weight.grad, torch.full((3,), 16.0))  # type: ignore[arg-type]


def test_a_scope_around_the_run_says_nothing() -> None:
    weight = torch.ones(3, requires_grad=True)
    loss = (koila.lazy(torch.ones(4, 3)) * weight).sum()
    with koila.budget("1MiB"):
        loss.backward()
    with koila.budget("1MiB"):
        inside = (koila.lazy(torch.ones(4, 3)) * weight).sum()
        inside.backward()
    assert (inside + 1).item() == 13.0, "recorded and run after the scope"
    with koila.budget("1MiB"):
        held = (koila.lazy(torch.ones(4, 3), budget="2MiB") * weight).sum()
    held.backward()  # The inputs have a budget of their own.
    with koila.budget(tune=False):
        other = (koila.lazy(torch.ones(4, 3)) * weight).sum()
    other.backward()  # The scope named no size.


class Batches(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2,), float(index))


def collate(samples: list[torch.Tensor]) -> torch.Tensor:
    return koila.lazy(torch.stack(samples)) * 2


@pytest.mark.semantics("S7")
def test_lazy_tensors_that_leave_a_worker_are_said() -> None:
    loader = DataLoader(Batches(), batch_size=2, num_workers=2, collate_fn=collate, multiprocessing_context="fork")
    with recorded() as found:
        batches = [batch for _ in range(2) for batch in loader]
    assert [type(batch) for batch in batches] == [torch.Tensor] * 6
    assert torch.equal(torch.cat(batches[:3]), torch.arange(6.0).mul(2).view(6, 1).expand(6, 2))
    found = [each for each in found if each.category is koila.KoilaWarning]
    assert_one(found, line_of("koila.lazy", collate), "computed there", "for x, y in loader")


@pytest.mark.asks_laziness("it is said of a program of which nothing could be recorded")
def test_a_program_that_ran_eagerly_as_a_whole_is_said() -> None:
    with recorded() as found:
        for _ in range(2):
            positions = koila.lazy(torch.eye(4))
            for _ in range(5):
                positions = positions.nonzero()
    function = test_a_program_that_ran_eagerly_as_a_whole_is_said
    line = line_of("koila.lazy(", function)
    assert_one(found, line, "nothing was recorded, no budget holds", "Tensor.nonzero", "koila.metrics.report()")


def test_a_program_of_which_a_part_was_recorded_says_nothing() -> None:
    for _ in range(2):
        positions = koila.lazy(torch.eye(4))
        for _ in range(5):
            positions = positions.nonzero()
        positions.sum().item()


def test_as_errors_they_come_before_anything_is_done() -> None:
    """The suite turns warnings into errors, as users may."""
    with pytest.raises(koila.KoilaWarning, match="nothing lazy of a Linear"):
        koila.lazy(torch.nn.Linear(2, 2))
    weight = torch.ones(3, requires_grad=True)
    with koila.budget("1MiB"):
        loss = (koila.lazy(torch.ones(4, 3)) * weight).sum()
    with pytest.raises(koila.KoilaWarning, match="its budget does not hold"):
        loss.backward()
    assert weight.grad is None
    with koila.budget("1MiB"):
        loss.backward()
    assert torch.equal(weight.grad, torch.full((3,), 4.0))  # type: ignore[arg-type]
