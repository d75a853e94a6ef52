"""S18: an input that changes between the recording of a call and its run is an error with both lines, or is no error
because koila saw the change coming; where it can be known, the line of the change is named, too."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import koila
from tests.semantics.compare import Lazy, chunked, same_as_eager

pytestmark = pytest.mark.semantics("S18")


def line_of(text: str, function: Callable[..., Any]) -> str:
    """`file:line` of the line of a function that holds a text."""
    lines, start = inspect.getsourcelines(function)
    return f"{__file__}:{start + next(number for number, line in enumerate(lines) if text in line)}"


def _add(tensor: torch.Tensor) -> None:
    tensor.add_(1)


def _copy(tensor: torch.Tensor) -> None:
    tensor.copy_(torch.zeros_like(tensor))


def _slice(tensor: torch.Tensor) -> None:
    tensor[0] = 5.0


def _view(tensor: torch.Tensor) -> None:
    tensor.view(-1)[:1].mul_(2)


def _out(tensor: torch.Tensor) -> None:
    torch.add(tensor.clone(), 1, out=tensor)


def _foreach(tensor: torch.Tensor) -> None:
    torch._foreach_mul_([tensor], 2.0)


def _initialise(tensor: torch.Tensor) -> None:
    nn.init.zeros_(tensor)


def _resize(tensor: torch.Tensor) -> None:
    tensor.set_(torch.zeros(4, 3))  # type: ignore[call-overload]


SEEN = (_add, _copy, _slice, _view, _initialise, _resize)
"""Methods of the tensor: what is pending on it runs first."""
CHANGES = (_out, _foreach)
"""Changes that only the version tells."""


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("change", SEEN, ids=lambda change: change.__name__.strip("_"))
@pytest.mark.parametrize("which", ["parameter", "input", "buffer"])
def test_a_change_by_a_method_comes_after_what_reads_the_tensor(
    which: str, change: Callable[[torch.Tensor], None], chunk_size: int | None
) -> None:
    tensors = {"parameter": torch.ones(4, 3, requires_grad=True), "input": torch.ones(4, 3), "buffer": torch.ones(4, 3)}
    with chunked(chunk_size):
        out = (koila.lazy(tensors["input"]) * tensors["parameter"] + tensors["buffer"]).sum()
        with torch.no_grad():
            change(tensors[which])
        assert out.item() == 24.0
        assert not torch.equal(tensors[which], torch.ones(4, 3))


@pytest.mark.parametrize(
    "chunk_size", [pytest.param(None, marks=pytest.mark.asks_laziness("its input changes while it is pending")), 2]
)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
@pytest.mark.parametrize("which", ["parameter", "input", "buffer"])
def test_a_change_that_pytorch_can_see_is_an_error_with_both_lines(
    which: str, change: Callable[[torch.Tensor], None], chunk_size: int | None
) -> None:
    tensors = {"parameter": torch.ones(4, 3, requires_grad=True), "input": torch.ones(4, 3), "buffer": torch.ones(4, 3)}
    with chunked(chunk_size):
        out = (koila.lazy(tensors["input"]) * tensors["parameter"] + tensors["buffer"]).sum()
        with torch.no_grad():
            change(tensors[which])
        with pytest.raises(koila.StaleInputError) as found:
            out.item()
    text = str(found.value)
    function = test_a_change_that_pytorch_can_see_is_an_error_with_both_lines
    assert f"recorded at {line_of('out = (', function)}, run at {line_of('out.item()', function)}" in text
    assert f"an input of Tensor.{'add' if which == 'buffer' else 'mul'} (shape [4, 3])" in text
    assert "try: koila.run(value), or koila.settle() for all that is pending, before the line that changes" in text


def test_the_line_of_an_optimizer_step_is_named() -> None:
    """What does not fit beside a budget cannot be run before the step."""
    weight = nn.Parameter(torch.ones(64, 64))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    out = koila.lazy(torch.ones(64, 64), budget="20KiB") @ weight
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    with pytest.raises(koila.StaleInputError) as found:
        out.sum().item()
    function = test_the_line_of_an_optimizer_step_is_named
    lines = [line_of(text, function) for text in ("out = koila.lazy", "optimizer.step()", "out.sum().item()")]
    assert "recorded at {}, changed at {}, run at {}".format(*lines) in str(found.value)


@pytest.mark.asks_laziness("the input changes while the call is pending")
def test_after_the_error_the_rest_goes_on() -> None:
    weight = torch.ones(3, requires_grad=True)
    stale = (koila.lazy(torch.ones(4, 3)) * weight).sum()
    with torch.no_grad():
        torch._foreach_add_([weight], 1)
    fresh = (koila.lazy(torch.ones(4, 3)) * weight).sum()
    assert fresh.item() == 24.0
    with pytest.raises(koila.StaleInputError):
        stale.backward()
    assert weight.grad is None, "nothing is lost"
    fresh.backward()
    assert torch.equal(weight.grad, torch.full((3,), 4.0))  # type: ignore[arg-type]


def test_what_koila_sees_coming_is_no_error() -> None:
    """Steps, statistics, loaded states and writes that have a lazy operand come after what reads the old values."""

    def program(lazy: Lazy) -> Any:
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        buffer = torch.ones(3, dtype=torch.float64)
        x = lazy(torch.randn(5, 3, dtype=torch.float64))
        early = model(x) * buffer
        early.square().sum().backward()
        before = (x * model[0].weight.sum()).sum()
        optimizer.step()
        between = x + buffer
        buffer.add_(x.detach().mean(0))
        after = model(x) + buffer
        model.load_state_dict({name: tensor * 2 for name, tensor in model.state_dict().items()})
        return early.detach(), before.detach(), between, after.detach(), buffer, model(x).detach()

    same_as_eager(program, (2,))


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_an_unchanged_tensor_is_never_stale(chunk_size: int | None) -> None:
    weight, x = torch.ones(3, requires_grad=True), torch.ones(4, 3)
    with chunked(chunk_size):
        out = (koila.lazy(x) * weight).sum()
        weight.grad = torch.ones(3)
        weight.grad.zero_()
        weight.data_ptr(), weight.numpy(force=True), weight.view(-1), weight.detach().sum()
        x.requires_grad_(False)
        assert out.item() == 12.0
