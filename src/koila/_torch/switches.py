"""PyTorch's switches that hold for the whole process and that kernels read: what they are, and how they are set again.

Takes: PyTorch. Gives: `read_switches` and `set_switches`, and `FIRST_OF_KERNELS`, where those begin that still act when
a program was traced already. Every recorded call asks for all of them, so the private readers behind the public ones
are used, which have no Python layer; each line names the public form. All of them take too long to read for every call:
they are read again only after one of PyTorch's setters was called. What C++ sets by itself is not seen.
Look at: torch/backends/*/__init__.py, aten/src/ATen/Context.h.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.backends

_C = torch._C

_flash = _C._get_flash_sdp_enabled  # torch.backends.cuda.flash_sdp_enabled
_mem_efficient = _C._get_mem_efficient_sdp_enabled  # torch.backends.cuda.mem_efficient_sdp_enabled
_math = _C._get_math_sdp_enabled  # torch.backends.cuda.math_sdp_enabled
_cudnn = _C._get_cudnn_sdp_enabled  # torch.backends.cuda.cudnn_sdp_enabled
_mkldnn = _C._get_mkldnn_enabled  # torch.backends.mkldnn.enabled
_deterministic = _C._get_deterministic_algorithms  # torch.are_deterministic_algorithms_enabled
_warns = _C._get_deterministic_algorithms_warn_only  # torch.is_deterministic_algorithms_warn_only_enabled

_FLAGS: tuple[tuple[Callable[[], bool], Callable[[bool], None]], ...] = (
    (_flash, _C._set_sdp_use_flash),
    (_mem_efficient, _C._set_sdp_use_mem_efficient),
    (_math, _C._set_sdp_use_math),
    (_cudnn, _C._set_sdp_use_cudnn),
    (_mkldnn, _C._set_mkldnn_enabled),
    (_deterministic, lambda flag: _C._set_deterministic_algorithms(flag, warn_only=_warns())),
    (_warns, lambda flag: _C._set_deterministic_algorithms(_deterministic(), warn_only=flag)),
)
"""The switches that are on or off, in the order of `read_switches`."""
FIRST_OF_KERNELS = 4
"""The switches before choose an operator for attention, which a trace holds; kernels read the others when they run."""

_PRECISIONS = [(library, operators) for library in ("mkldnn", "cuda") for operators in ("matmul", "conv", "rnn")]
"""How float32 is rounded inside a library: `set_float32_matmul_precision`, `fp32_precision`, `allow_tf32`."""
_SETTERS = (
    "_set_sdp_use_flash",
    "_set_sdp_use_mem_efficient",
    "_set_sdp_use_math",
    "_set_sdp_use_cudnn",
    "_set_mkldnn_enabled",
    "_set_deterministic_algorithms",
    "_set_float32_matmul_precision",
    "_set_fp32_precision_setter",
    "_set_cublas_allow_tf32",
    "_set_cudnn_allow_tf32",
    "_set_onednn_allow_tf32",
)


_OLDER: tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...] = (
    (_C._get_float32_matmul_precision, _C._set_float32_matmul_precision),  # torch.set_float32_matmul_precision
    (_C._get_cudnn_allow_tf32, _C._set_cudnn_allow_tf32),  # torch.backends.cudnn.allow_tf32
)
"""Older names of the same: what was set by one of them is consistent only if it is set again by it."""


def _older(read: Callable[[], Any]) -> Any:
    """What an older name says; None where it raises, because a program used the newer names beside it."""
    try:
        return read()
    except RuntimeError:
        return None


def _read_precision() -> tuple[Any, ...]:
    """How float32 is rounded, under the older names, then for each of `_PRECISIONS`."""
    newer = [_C._get_fp32_precision_getter(*place) for place in _PRECISIONS]
    return (*[_older(read) for read, _ in _OLDER], *newer)


def _set_precision(wanted: tuple[Any, ...]) -> None:
    """Set it again."""
    for (read, change), before in zip(_OLDER, wanted, strict=False):
        if before is not None and before != _older(read):
            change(before)
    for place, before in zip(_PRECISIONS, wanted[len(_OLDER) :], strict=True):
        if _C._get_fp32_precision_getter(*place) != before:
            _C._set_fp32_precision_setter(*place, before)


class _Switches:
    """All switches, as they were read last."""

    def __init__(self) -> None:
        self.now: tuple[Any, ...] | None = None
        """None: one of them may have changed since."""
        self._num_changes = 0

    def read(self) -> tuple[Any, ...]:
        """Those that are on or off, then how float32 is rounded."""
        num_changes = self._num_changes
        found = (*[read() for read, _ in _FLAGS], _read_precision())
        if num_changes == self._num_changes:  # Else another thread has set one meanwhile.
            self.now = found
        return found

    def have_changed(self) -> None:
        """One of them may have been set."""
        self._num_changes += 1
        self.now = None

    def changing(self, setter: Callable[..., Any]) -> Callable[..., Any]:
        """The setter, after which all of them are read again."""

        @wraps(setter)
        def set_it(*args: Any, **kwargs: Any) -> Any:
            try:
                return setter(*args, **kwargs)
            finally:
                self.have_changed()

        return set_it


switches = _Switches()


def watch_switches() -> None:
    """From now on, setting a switch is noticed, whichever of PyTorch's names it is set by; called once."""
    for name in _SETTERS:
        setattr(_C, name, switches.changing(getattr(_C, name)))
    # Some names hold a setter since they were imported: all of them go through this class.
    kind: Any = torch.backends.ContextProp
    kind.__set__ = switches.changing(kind.__set__)
    switches.have_changed()


def read_switches() -> tuple[Any, ...]:
    """What every switch is now."""
    return switches.now or switches.read()


def set_switches(wanted: tuple[Any, ...]) -> None:
    """Set those switches that differ from what is wanted."""
    try:
        for (read, change), value in zip(_FLAGS, wanted, strict=False):
            if read() != value:
                change(value)
        if _read_precision() != wanted[-1]:
            _set_precision(wanted[-1])
    finally:
        switches.have_changed()


def without_cudnn(act: Callable[[], Any]) -> Any:
    """What something gives while `torch.backends.cudnn.enabled` is off; its `flags` would set other switches, too."""
    before = _C._get_cudnn_enabled()
    try:
        _C._set_cudnn_enabled(False)  # The public form refuses where somebody has frozen the switches.
        return act()
    finally:
        _C._set_cudnn_enabled(before)
