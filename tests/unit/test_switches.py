"""Switches of PyTorch are noticed whichever of its names they are set by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import koila  # noqa: F401 - it watches the setters.
from koila._torch.switches import read_switches, set_switches

pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")  # PyTorch's own switch warns.


@contextmanager
def _set(change: Callable[[Any], Any], before: Any, after: Any) -> Iterator[None]:
    change(after)
    try:
        yield
    finally:
        change(before)


def _set_onednn(flag: bool) -> None:
    with torch.backends.__allow_nonbracketed_mutation():  # PyTorch's own test tools forbid the plain way, once loaded.
        torch.backends.mkldnn.enabled = flag  # type: ignore[assignment]


SCOPES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "use_deterministic_algorithms": lambda: _set(torch.use_deterministic_algorithms, False, True),
    "set_deterministic_debug_mode": lambda: _set(torch.set_deterministic_debug_mode, "default", "warn"),
    "mkldnn.flags": lambda: torch.backends.mkldnn.flags(enabled=False),
    "mkldnn.enabled": lambda: _set(_set_onednn, True, False),
    "sdpa_kernel": lambda: sdpa_kernel(SDPBackend.MATH),
    "enable_flash_sdp": lambda: _set(torch.backends.cuda.enable_flash_sdp, True, False),
    "enable_mem_efficient_sdp": lambda: _set(torch.backends.cuda.enable_mem_efficient_sdp, True, False),
    "enable_math_sdp": lambda: _set(torch.backends.cuda.enable_math_sdp, True, False),
    "enable_cudnn_sdp": lambda: _set(torch.backends.cuda.enable_cudnn_sdp, True, False),
}


@pytest.mark.parametrize("name", SCOPES)
def test_a_switch_that_is_set_is_read_again(name: str) -> None:
    before = read_switches()
    with SCOPES[name]():
        inside = read_switches()
        assert inside != before
    assert read_switches() == before


def test_switches_that_koila_sets_are_read_again() -> None:
    before = read_switches()
    with SCOPES["use_deterministic_algorithms"]():
        inside = read_switches()
    set_switches(inside)
    try:
        assert torch.are_deterministic_algorithms_enabled()
        assert read_switches() == inside
    finally:
        set_switches(before)
    assert read_switches() == before
