"""`torch.utils.checkpoint`: eager's own without a budget, koila's recomputation inside one, and it says which."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import koila
from koila import events
from koila.planning.tracker import StorageTracker
from tests.semantics.modes import MODES, Scope, assert_same, plain

pytestmark = [
    pytest.mark.semantics("S13"),
    # Eager's own words for a first block whose input needs no gradient.
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True"),
]
REENTRANT = pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])


def _blocks(dropout: float = 0.0, size: int = 4, number: int = 3) -> nn.ModuleList:
    torch.manual_seed(0)
    layers = lambda: (nn.Linear(size, 4 * size), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * size, size))  # noqa: E731
    return nn.ModuleList(nn.Sequential(*layers()) for _ in range(number)).double()


def _train(blocks: nn.ModuleList, x: torch.Tensor, reentrant: bool) -> list[Any]:
    """A step with every block checkpointed; the generator's state is part of what it gives."""
    first = torch.ones(x.shape[1:], dtype=x.dtype, requires_grad=True)
    x = x * first
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=reentrant)
    loss = x.square().mean()
    loss.backward()
    gradients = [first.grad, *(parameter.grad for parameter in blocks.parameters())]
    return [loss.detach() + 0, *gradients, *blocks.buffers(), torch.get_rng_state()]


def _inputs(size: int = 4) -> torch.Tensor:
    return torch.randn(7, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@REENTRANT
@pytest.mark.filterwarnings("ignore:[\\s\\S]*torch.utils.checkpoint is taken as if:koila.KoilaWarning")
@MODES
def test_gradients_and_generator(scope: Scope, reentrant: bool) -> None:
    wanted = _train(_blocks(0.5), _inputs(), reentrant)
    with scope():
        assert_same(_train(_blocks(0.5), koila.lazy(_inputs()), reentrant), wanted)


@REENTRANT
def test_without_a_budget_it_is_eagers_checkpoint(reentrant: bool) -> None:
    """Batch statistics are updated twice, as in eager, and memory is what eager needs."""

    def measured(lazy: Any) -> tuple[int, list[Any]]:
        blocks = _blocks(size=32, number=6)
        blocks.append(nn.BatchNorm1d(32).double())
        x = _inputs(32).repeat(16, 1)
        gc.collect()
        with StorageTracker() as tracker:
            found = _train(blocks, lazy(x), reentrant)
        return tracker.peak_bytes, found

    eager_bytes, wanted = measured(lambda x: x.clone())
    peak_bytes, found = measured(koila.lazy)
    assert_same(found, wanted)
    assert peak_bytes <= 1.1 * eager_bytes
    assert events.counters()["checkpoint::kept"] == 7
    assert "checkpoint::recorded" not in events.counters()


@REENTRANT
@pytest.mark.parametrize("scope", [lambda: koila.budget(chunk_size=2), lambda: koila.budget("1MiB")])
def test_inside_a_budget_it_is_said_once_that_the_function_is_recorded(scope: Scope, reentrant: bool) -> None:
    net = _blocks(number=1)[0]
    with scope(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            checkpoint(net, koila.lazy(_inputs()), use_reentrant=reentrant).sum().backward()
    own = [str(each.message) for each in said if issubclass(each.category, koila.KoilaWarning)]
    assert len(own) == 1
    assert "torch.utils.checkpoint is taken as if it were not there" in own[0]
    assert "leave the checkpoint out" in own[0]
    assert events.counters()["checkpoint::recorded"] == 3


def _sequential(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    return checkpoint_sequential(list(blocks), 2, x, use_reentrant=False)


def _nested(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    inner = lambda x: checkpoint(blocks[1], blocks[0](x), use_reentrant=False)  # noqa: E731
    return checkpoint(lambda x: blocks[2](inner(x)), x, use_reentrant=False)


def _with_keywords(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    def block(x: torch.Tensor, *, scale: float, bias: torch.Tensor) -> tuple[torch.Tensor, int]:
        return blocks[0](x).tanh() * scale + bias, 3

    found, number = checkpoint(block, x, use_reentrant=False, scale=2.0, bias=x.detach(), preserve_rng_state=False)
    return found * number


def _in_a_module_under_autocast(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return checkpoint(blocks[0].float(), x.float(), use_reentrant=False).double()


@pytest.mark.filterwarnings("ignore:[\\s\\S]*torch.utils.checkpoint is taken as if:koila.KoilaWarning")
@MODES
@pytest.mark.parametrize("program", [_sequential, _nested, _with_keywords], ids=lambda program: program.__name__)
def test_forms(program: Callable[..., torch.Tensor], scope: Scope) -> None:
    def run(lazy: Any) -> list[Any]:
        blocks = _blocks()
        program(blocks, lazy(_inputs())).pow(2).sum().backward()
        return [parameter.grad for parameter in blocks.parameters() if parameter.grad is not None]

    with scope():
        found = run(koila.lazy)
    assert_same(found, run(plain))


def test_under_autocast() -> None:
    def run(lazy: Any) -> list[Any]:
        blocks = _blocks()
        _in_a_module_under_autocast(blocks, lazy(_inputs())).pow(2).sum().backward()
        return [parameter.grad for parameter in blocks[0].parameters()]

    found, wanted = run(koila.lazy), run(plain)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
