"""Fake tensors in one thread at a time.

*Takes* a function that uses them. *Gives* the same function, which waits for its turn: two threads that decompose an
operator at once, each for the first time, end in a segmentation fault of PyTorch's (torch/_ops.py, `decompose`), and
`make_fx` keeps one flag for all threads (torch/fx/_symbolic_trace.py).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from functools import cache, wraps
from typing import ParamSpec, TypeVar

import torch
import torch.utils._python_dispatch

from koila._scopes import Mark

without_modes = torch.utils._python_dispatch._disable_current_modes
"""No mode sees what is called: shapes are koila's matter, and values of constants are real. Look at:
torch/utils/_python_dispatch.py."""


@cache
def cpu_mode() -> torch._subclasses.fake_tensor.FakeTensorMode:
    """The mode of what `fake_on_cpu` makes."""
    return torch._subclasses.fake_tensor.FakeTensorMode()


def fake_on_cpu(layout: torch.Tensor) -> torch.Tensor:
    """A fake tensor on the CPU with the layout of a meta tensor.

    To make one by a call takes ten times as long: the mode looks the call up among those it has seen. Look at:
    torch/_subclasses/fake_tensor.py, `FakeTensor.__new__`.

    >>> made = fake_on_cpu(torch.empty(2, 3, device="meta").T)
    >>> made.device, made.stride(), (made + 1).device
    (device(type='cpu'), (1, 3), device(type='cpu'))
    """
    return torch._subclasses.fake_tensor.FakeTensor(cpu_mode(), layout, torch.device("cpu"))


P = ParamSpec("P")
R = TypeVar("R")

_WAIT_SECONDS = 0.001
_PATIENCE_SECONDS = 10.0
_lock = threading.RLock()
_last: list[tuple[int, weakref.ref[Mark]]] = []
"""Whose turn it is: a thread, and what its function holds."""


def in_turn(function: Callable[P, R]) -> Callable[P, R]:
    """Calls of such functions come one after the other; one may call another.

    No mode of the user's sees them: a selective checkpoint would keep the fake results, and a counter count them.

    A turn ends with its function, and nobody has to end it: an interrupt may come before any line, and a lock that it
    leaves taken would stop all other threads for good. Whoever keeps the traceback of an error keeps the turn, too, so
    others wait for a while only.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        turn = _take()
        if turn is None or not torch._C._len_torch_dispatch_stack():
            return function(*args, **kwargs)
        with without_modes():
            return function(*args, **kwargs)

    return call


def _take() -> Mark | None:
    """A turn; None if this thread has it already."""
    mine, thread, patience = Mark(), threading.get_ident(), time.monotonic() + _PATIENCE_SECONDS
    while True:
        with _lock:
            others = [owner for owner, mark in _last if mark() is not None]
            if not others or time.monotonic() > patience:
                _last[:] = [(thread, weakref.ref(mine))]
                return mine
        if others[0] == thread:
            return None
        time.sleep(_WAIT_SECONDS)
