"""The ambient state of a call: all that PyTorch reads beside the arguments, as it was when the call was recorded.

*Takes* PyTorch's modes and switches. *Gives* a frozen `Context`, the same object for equal states, that can be entered
again when the call runs: in the recorded mode a late call is eager's call. What a module knows (`training`) is no part
of it: a module's Python runs at the call. Switches hold for the whole process; they are only touched where they have
changed in between.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from koila._torch import is_any_autocast_enabled
from koila._torch.switches import FIRST_OF_KERNELS, read_switches, set_switches, switches


@dataclass(frozen=True, slots=True)
class Context:
    """The ambient state under which a call was recorded."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype, bool], ...]
    """(device type, dtype, weight cache) of each enabled autocast."""
    nested: bool
    """Whether it is inside any autocast region, enabled or not: the cache of cast weights lives as long."""
    default_dtype: torch.dtype
    anomaly: bool
    """Whether autograd notes where each of its nodes was made."""
    switches: tuple[Any, ...]
    """Fused kernels that are allowed, deterministic algorithms, precision of products: see `koila._torch.switches`."""
    stream: torch.Stream | None = None
    """The accelerator's current stream, and with it the current device; None as long as no input was on one."""

    @property
    def kernels(self) -> tuple[Any, ...]:
        """Those switches that kernels read while they run; a traced program must run under the same."""
        return self.switches[FIRST_OF_KERNELS:]

    def enter_dtype(self) -> ExitStack:
        """The default dtype that the call was recorded under."""
        stack, now = ExitStack(), torch.get_default_dtype()
        if now != self.default_dtype:
            stack.callback(torch.set_default_dtype, now)
            torch.set_default_dtype(self.default_dtype)
        return stack

    def enter_region(self) -> ExitStack:
        """The outermost autocast region; its cache of cast weights lives until the stack is closed."""
        stack = ExitStack()
        if self.nested:
            torch.autocast_increment_nesting()
            stack.callback(_leave_region)
        return stack

    def enter_stream(self) -> ExitStack:
        """The stream that the call was recorded on; what is queued on the current one comes before and after it."""
        stack, now = ExitStack(), _stream()
        if self.stream is not None and now is not None and self.stream != now:
            self.stream.wait_stream(now)
            stack.callback(now.wait_stream, self.stream)
            stack.enter_context(torch.accelerator.device_index(self.stream.device.index))
            stack.enter_context(self.stream)
        return stack

    def enter(self) -> ExitStack:
        """The rest of the context, entered; leave it by closing the stack."""
        stack = self.enter_stream()
        own = {device_type for device_type, _, _ in self.autocast}
        for device_type in _autocast_devices():
            if device_type not in own:
                stack.enter_context(torch.autocast(device_type, enabled=False))
        for device_type, dtype, cache in self.autocast:
            stack.enter_context(torch.autocast(device_type, dtype=dtype, cache_enabled=cache))
        stack.enter_context(torch.inference_mode(self.inference))
        stack.enter_context(torch.set_grad_enabled(self.grad))
        if torch.is_anomaly_enabled() != self.anomaly:
            stack.enter_context(torch.autograd.set_detect_anomaly(self.anomaly, torch.is_anomaly_check_nan_enabled()))
        now = read_switches()
        if now != self.switches:
            stack.callback(set_switches, now)
            set_switches(self.switches)
        stack.enter_context(self.enter_dtype())
        return stack


def _leave_region() -> None:
    if torch.autocast_decrement_nesting() == 0:
        torch.clear_autocast_cache()


_is_grad_enabled, _is_inference_enabled = torch.is_grad_enabled, torch.is_inference_mode_enabled
_increment_nesting, _decrement_nesting = torch.autocast_increment_nesting, torch.autocast_decrement_nesting
_default_dtype, _is_anomaly_enabled = torch.get_default_dtype, torch.is_anomaly_enabled
_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps", "mtia", "privateuseone")


def _autocast_devices() -> tuple[str, ...]:
    """The types of devices for which autocast is enabled now."""
    if not is_any_autocast_enabled():
        return ()
    return tuple(kind for kind in _AUTOCAST_DEVICES if torch.is_autocast_enabled(kind))


_has_accelerator = False


def watch_streams() -> None:
    """From now on calls carry the current stream, if there are any: an input is on an accelerator, or a meta tensor."""
    global _has_accelerator
    _has_accelerator = torch.accelerator.is_available()


def _stream() -> torch.Stream | None:
    return torch.accelerator.current_stream() if _has_accelerator else None


def without_autocast() -> ExitStack:
    """A scope in which autocast is enabled for no device: what was traced has its casts as calls."""
    stack = ExitStack()
    for device_type in _autocast_devices():
        stack.enter_context(torch.autocast(device_type, enabled=False))
    return stack


_contexts: dict[tuple[Any, ...], Context] = {}
_last: tuple[tuple[Any, ...], Context] | None = None
"""The state without autocast that was read last, and its context: mostly the next call has the same."""


def current_context() -> Context:
    """The ambient state now; equal states are the same object. Every recorded call and every run asks."""
    global _last
    state = (
        _is_grad_enabled(), _is_inference_enabled(), _increment_nesting() and _decrement_nesting() > 0,
        _default_dtype(), _is_anomaly_enabled(), switches.now or switches.read(),
        torch.accelerator.current_stream() if _has_accelerator else None,
    )  # fmt: skip
    if is_any_autocast_enabled():
        return _context(state, _autocast())
    last = _last
    if last is None or last[0] != state:
        last = _last = state, _context(state, ())
    return last[1]


def _autocast() -> tuple[tuple[str, torch.dtype, bool], ...]:
    return tuple(
        (kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()) for kind in _autocast_devices()
    )


def _context(state: tuple[Any, ...], autocast: tuple[tuple[str, torch.dtype, bool], ...]) -> Context:
    key = (*state[:2], autocast, *state[2:])
    found = _contexts.get(key)
    return found if found is not None else _contexts.setdefault(key, Context(*key))
