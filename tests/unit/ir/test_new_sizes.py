"""Calls at new sizes: what is inferred without being watched is what fake tensors say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks

from koila.ir.cache import clear_all
from koila.ir.infer import Inference, _told, _Truth, infer, infer_call

Case = tuple[Callable[..., Any], Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]], _Truth]


def grown(*shape: int) -> torch.Tensor:
    """A value that requires grad and is no leaf."""
    return torch.empty(shape, requires_grad=True).clone()


WEIGHT, BIAS = torch.empty(6, 4, requires_grad=True), torch.empty(6, requires_grad=True)
CASES: dict[str, Case] = {
    "view": (torch.Tensor.view, lambda n: ((grown(3, n, 4), 3 * n, 4), {}), _Truth.BARE),
    "transpose": (torch.Tensor.transpose, lambda n: ((grown(3, n, 4), 1, 2), {}), _Truth.BARE),
    "split": (torch.Tensor.split, lambda n: ((grown(3, n, 4), 2, -1), {}), _Truth.BARE),
    "index": (torch.Tensor.__getitem__, lambda n: ((grown(3, n, 4), (slice(None), slice(1, None))), {}), _Truth.BARE),
    "expand": (torch.Tensor.expand, lambda n: ((torch.empty(1, n), 5, n), {}), _Truth.BARE),
    "contiguous": (torch.Tensor.contiguous, lambda n: ((grown(3, n),), {}), _Truth.BARE),
    "matmul": (torch.matmul, lambda n: ((grown(3, n, 4), WEIGHT.mT), {}), _Truth.BARE),
    "device": (torch.Tensor.to, lambda n: ((grown(3, n), torch.device("cpu")), {}), _Truth.BARE),
    "linear": (F.linear, lambda n: ((grown(3, n, 4), WEIGHT, BIAS), {}), _Truth.PLAIN),
    "add": (torch.add, lambda n: ((grown(3, n), torch.empty(n)), {}), _Truth.PLAIN),
    "softmax": (F.log_softmax, lambda n: ((grown(3, n),), {"dim": -1}), _Truth.PLAIN),
    "layer norm": (F.layer_norm, lambda n: ((grown(3, n, 4), (4,)), {}), _Truth.PLAIN),
    "dropout of nothing": (F.dropout, lambda n: ((grown(3, n), 0.5, False), {}), _Truth.BARE),
    "dropout": (F.dropout, lambda n: ((grown(3, n), 0.5, True), {}), _Truth.SAME),
    "write": (torch.Tensor.add_, lambda n: ((torch.empty(3, n), 1), {}), _Truth.SAME),
    "other layout": (torch.floor_divide, lambda n: ((torch.empty(n, 3).mT, torch.empty(3, n)), {}), _Truth.SAME),
    "other device": (torch.Tensor.to, lambda n: ((grown(3, n), torch.device("meta")), {}), _Truth.OTHER),
}


def asked(case: Case, size: int) -> tuple[Inference, Inference]:
    """What is said about a call whose structure may be known, and what fake tensors say."""
    func, arguments, _ = case
    args, kwargs = arguments(size)
    operands = [each for each in args if isinstance(each, torch.Tensor)]
    return infer_call("the call", func, args, kwargs, operands), infer(func, args, kwargs, operands)


@pytest.mark.parametrize("name", CASES)
def test_a_new_size_is_inferred_as_by_fake_tensors(name: str) -> None:
    clear_all()
    for size in (5, 7, 2, 1):
        found, expected = asked(CASES[name], size)
        assert found == expected
    assert _told.get("the call") is CASES[name][2]


def test_what_pytorch_refuses_at_a_new_size_is_left_to_eager() -> None:
    clear_all()
    view: Case = (torch.Tensor.view, lambda n: ((grown(n), 2, 3), {}), _Truth.BARE)
    assert asked(view, 6)[0].forced is None
    found, expected = asked(view, 7)
    assert found == expected and found.forced is not None


def test_hooks_on_saved_tensors_see_nothing_of_it() -> None:
    clear_all()
    seen: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return tensor

    for size in (5, 7, 9):
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            found, expected = asked((torch.matmul, lambda n: ((grown(3, n), grown(n, 4)), {}), _Truth.BARE), size)
        assert found == expected
    assert _told.get("the call") is _Truth.BARE and not seen
