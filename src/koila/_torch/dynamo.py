"""Dynamo, the tracer behind `torch.compile`: it must not look into koila.

Takes: PyTorch's state; Dynamo itself is never imported here, because that takes a second. Gives: whether compiled code
calls, and two ways to keep Dynamo out. `torch.compiler.disable` would do the same by wrapping each function, which
imports Dynamo and costs every recorded call a microsecond.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_eval_frame = torch._C._dynamo.eval_frame


def keep_dynamo_out(packages: tuple[str, ...]) -> bool:
    """Let Dynamo skip the functions of these packages; False: it is not loaded yet.

    Look at: torch/_dynamo/trace_rules.py, `add`.
    """
    rules = getattr(sys.modules.get("torch._dynamo"), "trace_rules", None)
    if rules is None:
        return False
    for package in packages:
        rules.add(package)
    return True


def in_compiled_code() -> bool:
    """Whether Dynamo watches the functions that are called now. Look at: torch/csrc/dynamo/eval_frame.c."""
    return _eval_frame.get_eval_frame_callback() not in (None, False)


@contextmanager
def without_dynamo() -> Iterator[None]:
    """What is called inside is not compiled. Look at: torch/csrc/dynamo/eval_frame.c."""
    before = _eval_frame.set_eval_frame(None)
    try:
        yield
    finally:
        _eval_frame.set_eval_frame(before)
