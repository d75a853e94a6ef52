"""Devices: one row for each type, with what a plan must know of its memory and of its speed.

*Takes* the device that a job runs on. *Gives* its `DeviceRules`, and a scope in which plans are made for it. Nothing in
the rows of accelerators has been measured on hardware: they follow from what is documented, and from the allocator of
the simulated device of the tests, which follows CUDA's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from koila._scopes import Scopes

MiB = 1 << 20


@dataclass(frozen=True, slots=True)
class DeviceRules:
    """What is known of a type of device."""

    type: str
    """As in `torch.device(...).type`; "" stands for every accelerator without a row."""
    value_bytes: int
    """What a tensor takes beside its elements: objects of Python and PyTorch on a CPU, else the rest of a block."""
    small_bytes: int = 0
    """A block for more than this may be larger than was asked for, by `unsplit_bytes`."""
    unsplit_bytes: int = 0
    """The allocator does not split off a rest of up to so many bytes."""
    library_bytes: int = 0
    """What libraries keep for themselves after their first call: workspaces of matrix products."""
    context_bytes: int = 0
    """What the driver takes of a device before the first tensor."""
    runs_cpu_kernels: bool = False
    """Whether its kernels allocate what those of the CPU do (`koila.planning.workspace`)."""
    multiplies_halves: bool = True
    """Whether it has instructions for products of half precision."""
    has_pages: bool = False
    """Whether large results cost time because the system hands out new pages for them."""
    call_seconds: float = 1e-5
    """How long a call takes that does nothing."""
    byte_speed: float = 100.0
    """How many times faster than the rates of `koila.planning.rates` its kernels read and write."""
    flop_speed: float = 100.0
    """How many times faster they multiply."""
    speed_threads: int = 1
    """How many threads of a CPU have these speeds together."""
    offload_rate: float = 1e10
    """Bytes per second that are offloaded, or fetched."""
    num_threads: int = 1
    """How many threads kernels of the CPU may use: what was found out for one number does not hold for another."""

    def slack_bytes(self, num_bytes: int) -> int:
        """By how much a block for so many bytes may be larger, beyond `value_bytes`."""
        return self.unsplit_bytes if num_bytes > self.small_bytes else 0


CPU = DeviceRules(
    "cpu", value_bytes=384, runs_cpu_kernels=True, multiplies_halves=False, has_pages=True, call_seconds=1e-5,
    byte_speed=1.0, flop_speed=1.0, offload_rate=4e9,
)  # fmt: skip
"""Products of half precision ask the processor itself: `koila.planning.half_products`."""

_ACCELERATOR = DeviceRules("", value_bytes=512, small_bytes=MiB, unsplit_bytes=MiB)
"""Blocks of 512 bytes, and a rest of up to 1 MiB that stays with a large one: c10/core/CachingDeviceAllocator.h."""

_rows: dict[str, DeviceRules] = {
    "cpu": CPU,
    "": _ACCELERATOR,
    # cuBLAS takes 32 MiB on the largest GPUs and 8 on others; a context takes some hundred MiB.
    "cuda": replace(_ACCELERATOR, type="cuda", library_bytes=32 * MiB, context_bytes=512 * MiB),
}


def register_device(rules: DeviceRules) -> None:
    """Let plans know a type of device."""
    _rows[rules.type] = rules


def rules_for(device_type: str, environment: Mapping[str, str] = os.environ) -> DeviceRules:
    """What is known of a type of device, with what the environment says about it.

    >>> rules_for("cuda", {}).slack_bytes(2**30), rules_for("cpu").slack_bytes(2**30)
    (1048576, 0)
    >>> rules_for("cuda", {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}).slack_bytes(2**30)
    0
    >>> rules_for("cuda", {"CUBLAS_WORKSPACE_CONFIG": ":4096:2:16:8"}).library_bytes == (4096 * 2 + 16 * 8) * 1024
    True
    """
    found = _rows.get(device_type) or replace(_rows[""], type=device_type)
    if device_type != "cuda":
        return found
    settings = environment.get("PYTORCH_ALLOC_CONF") or environment.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    if "expandable_segments:true" in settings.replace(" ", "").lower():
        found = replace(found, unsplit_bytes=0)  # The rest of a block is always split off.
    workspace = _workspace_bytes(environment.get("CUBLAS_WORKSPACE_CONFIG", ""))
    return found if workspace is None else replace(found, library_bytes=workspace)


def _workspace_bytes(setting: str) -> int | None:
    """Pairs of KiB and a number of buffers, as cuBLAS reads them; None if they are not."""
    numbers = setting.strip(":").split(":")
    if len(numbers) % 2 or not all(number.isdigit() for number in numbers):
        return None
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    return 1024 * sum(int(size) * int(count) for size, count in pairs)


@dataclass(frozen=True, slots=True)
class _Target:
    device: str
    rules: DeviceRules


_targets = Scopes[_Target]("targets")


def planning_for(device: str, num_threads: int = 1) -> AbstractContextManager[object]:
    """A scope in which plans are made for a device, such as "cuda:1", and for so many threads of the CPU."""
    rules = rules_for(device.partition(":")[0])
    return _targets.inside(_Target(device, replace(rules, num_threads=num_threads)))


def current_rules() -> DeviceRules:
    """The rules of the device that plans are made for; those of the CPU outside of all scopes."""
    target = _targets.innermost
    return rules_for("cpu") if target is None else target.rules


def current_device() -> str:
    """The device that plans are made for."""
    target = _targets.innermost
    return "cpu" if target is None else target.device
