"""The simulated accelerator: `from tests.accelerator import sim`, then `tensor.to("sim")`. See README.md.

*Takes* the C++ sources beside it. *Gives* the device `sim` in PyTorch, and switches for what it simulates. It is built
once per checkout, version of PyTorch and content of the sources, into `build/`, which git ignores.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import os
import shutil
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import cpp_extension

from koila.planning.devices import DeviceRules, register_device

_HERE = Path(__file__).parent
_NAME = "koila_sim"
_SOURCES = sorted((_HERE / "source").glob("*.[hc]*"))


def _key() -> str:
    """What the build depends on."""
    digest = hashlib.sha256(torch.__version__.encode())
    for source in _SOURCES:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _why_not() -> str | None:
    """Why it cannot be built here."""
    missing = [name for name in (os.environ.get("CXX", "c++"), "ninja") if shutil.which(name) is None]
    return f"the simulated accelerator must be compiled: there is no {' and no '.join(missing)}" if missing else None


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Several test processes start at once: one builds, the others wait."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "alone").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _load() -> Any:
    """The compiled module; built if it is not there."""
    folder = _HERE / "build" / _key()
    with _alone(folder):
        if (folder / f"{_NAME}.so").exists():
            return cpp_extension._import_module_from_library(_NAME, str(folder), True)
        reason = _why_not()
        if reason is not None:
            pytest.skip(reason, allow_module_level=True)
        sources = [str(source) for source in _SOURCES if source.suffix == ".cpp"]
        flags = ["-O1", "-g0"]
        return cpp_extension.load(name=_NAME, sources=sources, build_directory=str(folder), extra_cflags=flags)


def _index(device: object = None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index  # type: ignore[call-overload]
    return _native.current_device() if index is None else index


class _Device:
    """A scope in which this is the current device."""

    def __init__(self, device: object) -> None:
        self._index, self._before = _index(device), 0

    def __enter__(self) -> None:
        self._before = _native.current_device()
        _native.set_device(self._index)

    def __exit__(self, *exception: object) -> None:
        _native.set_device(self._before)


def _seed_all(seed: int) -> None:
    for index in range(_native.device_count()):
        _native.manual_seed(index, seed)


def _module() -> types.ModuleType:
    """`torch.sim`, as `torch.cuda` is for CUDA."""
    made = types.ModuleType("torch.sim")
    made.__dict__.update(
        device_count=_native.device_count,
        current_device=_native.current_device,
        set_device=lambda device: _native.set_device(_index(device)),
        device=_Device,
        is_available=lambda: True,
        is_initialized=lambda: True,
        init=lambda: None,
        _lazy_init=lambda: None,
        _is_in_bad_fork=lambda: False,
        synchronize=lambda device=None: torch.accelerator.synchronize(),
        manual_seed=lambda seed: _native.manual_seed(_native.current_device(), seed),
        manual_seed_all=_seed_all,
        seed=lambda: _native.seed(_native.current_device()),
        initial_seed=lambda: _native.initial_seed(_native.current_device()),
        get_rng_state=lambda device=None: _native.get_rng_state(_index(device)),
        set_rng_state=lambda state, device=None: _native.set_rng_state(_index(device), state),
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        is_bf16_supported=lambda: True,
        memory_allocated=torch.accelerator.memory_allocated,
        max_memory_allocated=torch.accelerator.max_memory_allocated,
        empty_cache=torch.accelerator.empty_cache,
        Stream=torch.Stream,
        Event=torch.Event,
    )
    return made


os.environ["SIM_DEVICES"] = "3"
_native = _load()
torch.utils.rename_privateuse1_backend("sim")
num_kernels: int = _native.start()
"""How many operators use the CPU's kernel."""
torch._register_device_module("sim", _module())
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


# The device's thread of autograd must have let go of what it holds before Python ends, else it crashes there.
atexit.register(time.sleep, 0.2)


def limit(num_bytes: int | None, device: int = 0) -> None:
    """A hard limit: beyond it `torch.OutOfMemoryError`."""
    _native.set_limit(device, num_bytes)


def fail_in(num_allocations: int, device: int = 0) -> None:
    """After so many allocations, one fails; -1 takes it back."""
    _native.fail_in(device, num_allocations)


def allocations(device: int = 0) -> int:
    """How many allocations there were."""
    return int(_native.allocations(device))


def counts() -> dict[str, int]:
    """Calls, times that the host waited for the device, bytes copied up and down, pinned bytes, late copies, races."""
    return dict(_native.counts())


def live(device: int = 0) -> int:
    """Bytes that are allocated."""
    return int(torch.accelerator.memory_allocated(device))


def peak(device: int = 0) -> int:
    """The most bytes that were allocated since `reset_peak`."""
    return int(torch.accelerator.max_memory_allocated(device))


def reset_peak(device: int = 0) -> None:
    """Begin anew with `peak`."""
    torch.accelerator.reset_peak_memory_stats(device)


def _switch(name: str, before: Any) -> Any:
    """A scope with another setting."""

    @contextmanager
    def scope(value: Any = True) -> Iterator[None]:
        setting = getattr(_native, f"set_{name}")
        setting(value)
        try:
            yield
        finally:
            setting(before)

    return scope


asynchronous = _switch("asynchronous", False)
"""Copies from and to pinned memory that do not block are late, and streams are in no order unless they wait."""
counted_generator = _switch("counted", False)
"""Generators are a seed and an offset, as CUDA's are: drawing in blocks gives other numbers than drawing at once."""
cudnn_norm = _switch("cudnn_norm", False)
"""Batch normalisation is cuDNN's operator, which hides its writes."""
attention = _switch("attention", 1)
"""0: by formulas, 1: the flash attention of the CPU, 2: the efficient one of CUDA, 3: that of other devices."""


RULES = DeviceRules("sim", value_bytes=32, runs_cpu_kernels=True)
"""What plans know of the device: an allocation takes no more than was asked for."""
register_device(RULES)


CACHING = "sim:2"
"""The device with a caching allocator: blocks of 512 bytes from segments of 2 and 20 MiB."""
_native.set_caching(2, True)


@contextmanager
def caching() -> Iterator[str]:
    """A scope in which plans know the blocks of the caching allocator; gives the device that has it."""
    register_device(replace(RULES, value_bytes=512, small_bytes=1 << 20, unsplit_bytes=1 << 20))
    try:
        yield CACHING
    finally:
        register_device(RULES)
