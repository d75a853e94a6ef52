"""Rule 5: a recorded operation whose input was changed before it ran is an error that names both lines.

A method that writes is seen before it does (`tests/semantics/test_data.py`); these changes are seen afterwards.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import koila

LINES = r"recorded at .*test_stale\.py:(\d+), run at .*test_stale\.py:(\d+)"


replace_data = vars(torch._C.TensorBase)["data"].__set__
"""As C++ replaces the data of a tensor."""


def changed_in_place(parameter: torch.Tensor) -> None:
    with torch.no_grad():
        torch.add(parameter, 1.0, out=parameter)


def changed_storage(parameter: torch.Tensor) -> None:
    replace_data(parameter, torch.zeros(3))


def changed_shape(parameter: torch.Tensor) -> None:
    replace_data(parameter, torch.zeros(5, 3))


@pytest.mark.semantics("S18")
@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("change", [changed_in_place, changed_storage, changed_shape])
def test_a_changed_parameter_is_named_with_both_lines(change: Any, chunk_size: int | None) -> None:
    weight = torch.ones(3, requires_grad=True)
    out = (koila.lazy(torch.ones(5, 3)) * weight).sum()
    change(weight)
    with koila.budget(chunk_size=chunk_size), pytest.raises(koila.StaleInputError) as found:
        out.item()
    text = str(found.value)
    assert "was changed after the call was recorded and before it ran" in text and "Tensor.mul" in text
    recorded, run = re.search(LINES, text).groups()  # type: ignore[union-attr]
    assert int(recorded) < int(run)
    assert "koila.run(value), or koila.settle() for all that is pending, before the line that changes" in text


@pytest.mark.semantics("S18")
def test_a_changed_input_is_stale() -> None:
    x = torch.ones(3)
    out = koila.lazy(x) + 1
    torch.add(x, 1, out=x)
    with pytest.raises(koila.StaleInputError, match=r"an input of Tensor\.add"):
        out.run()


@pytest.mark.semantics("S18")
def test_what_ran_before_the_change_is_not_stale() -> None:
    x = torch.ones(3)
    out = koila.lazy(x) + 1
    koila.run(out)
    x.add_(1)
    assert out.sum().item() == 6.0


@pytest.mark.semantics("S16")
def test_values_read_after_the_step_are_those_before_it() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for chunk_size in (None, 2):
        with koila.budget(chunk_size=chunk_size):
            out = koila.lazy(torch.ones(4, 3)) * weight
            expected = 4 * weight.sum().item()
            out.sum().backward()
            optimizer.step()
            assert out.sum().item() == expected
