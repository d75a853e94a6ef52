"""`koila doctor`: whether koila works here, what it found, and what is missing for what.

*Takes* the installation, the machine and the environment as they are. *Gives* a line for each of them; what is missing
comes with the command that gets it. Only what koila cannot work without is a failure.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from koila import __version__
from koila._api import lazy
from koila._budget import VARIABLE, budget, literal, read_bytes
from koila._bytes import format_bytes
from koila._free import default_bytes, free_bytes
from koila._torch import SUPPORTED
from koila.cli import exits
from koila.delegates.registry import BUILT_IN
from koila.errors import BudgetError

if sys.platform != "win32":
    import resource

EXTRAS: dict[str, dict[str, str]] = {
    "report": {"rich": "a bar while a run is on its way", "matplotlib": "memory over time as a picture"},
    "hf": {"transformers": "koila.integrations.hf", "accelerate": "koila.loader with Accelerate", "peft": "LoRA"},
    "lightning": {"lightning": "koila.integrations.lightning", "torchmetrics": "metrics over lazy values"},
}
"""The extras of koila: the packages in them, and what each is for; the same as in pyproject.toml."""
TESTED_PYTHON = (3, 11)
"""The version of Python that the suite runs on; later ones are allowed and not tested."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    mark: str
    """`ok`, `--` for something that is not here and not needed, `!!` for something that should be changed."""
    name: str
    """What was looked at."""
    text: str
    """What was found, and what to do about it."""

    def __str__(self) -> str:
        return f"[{self.mark}] {self.name:<12} {self.text}"


def add_to(commands: Any) -> None:
    """The command's arguments."""
    parser = commands.add_parser(
        "doctor", help="check the installation, and say what is missing for what",
        description="Whether koila works here, what it found, and how to get what is missing.",
        epilog="exit codes: 0 if koila works here; 1 if it does not",
    )  # fmt: skip
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Print all findings."""
    findings = list(examine())
    print("\n".join(map(str, findings)))
    broken = [finding for finding in findings if finding.mark == "!!" and finding.name == "self-test"]
    print("koila works here" if not broken else "koila does not work here")
    return exits.FAILED if broken else exits.OK


def examine() -> Iterator[Finding]:
    """Everything that is worth looking at, the most important first."""
    yield _versions()
    yield self_test()
    yield from _devices()
    yield from _limits()
    yield _malloc()
    yield _threads()
    yield _files()
    yield from _backends()
    yield from _packages()


def _versions() -> Finding:
    python = platform.python_version()
    tested = ", tested" if sys.version_info[:2] == TESTED_PYTHON else f", not tested: {_dotted(TESTED_PYTHON)} is"
    supported = ", ".join(f"{release}.x" for release in SUPPORTED)
    text = f"koila {__version__}, Python {python}{tested}, PyTorch {torch.__version__}, tested: {supported}"
    return Finding("ok", "versions", text)


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def self_test() -> Finding:
    """A small training step, in chunks and by eager, must give the same gradients."""
    inputs, weight = torch.ones(6, 4, dtype=torch.float64), torch.ones(4, 3, dtype=torch.float64, requires_grad=True)
    (inputs @ weight).softmax(-1).square().mean().backward()
    expected, weight.grad = weight.grad, None
    with budget(chunk_size=2):
        (lazy(inputs) @ weight).softmax(-1).square().mean().backward()
    if expected is None or weight.grad is None or not torch.allclose(expected, weight.grad, rtol=1e-10, atol=1e-12):
        return Finding("!!", "self-test", "a gradient in chunks differs from eager's; please report it")
    return Finding("ok", "self-test", "a training step in chunks has eager's gradients")


def _devices() -> Iterator[Finding]:
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        yield Finding("ok", "device", "the CPU; no accelerator was found")
    else:
        free = format_bytes(free_bytes(found))
        yield Finding("ok", "device", f"{torch.accelerator.device_count()} of type {found.type}, {free} free")


def _limits() -> Iterator[Finding]:
    free, left = format_bytes(free_bytes()), format_bytes(default_bytes())
    yield Finding("ok", "memory", f"{free} free for this process; without a budget, {left} of it are used at the most")
    yield from _resource_limits()
    text = os.environ.get(VARIABLE, "").strip()
    if text:
        yield _variable(text)


def _resource_limits() -> Iterator[Finding]:
    if sys.platform == "win32":
        return
    for name, which in (("RLIMIT_DATA", resource.RLIMIT_DATA), ("RLIMIT_AS", resource.RLIMIT_AS)):
        soft, _ = resource.getrlimit(which)
        if soft != resource.RLIM_INFINITY:
            yield Finding("ok", "limit", f"{name} is {format_bytes(soft)}: what is free above respects it")


def _variable(text: str) -> Finding:
    try:
        found = read_bytes(literal(text), VARIABLE, quoted=False)
    except BudgetError as error:
        return Finding("!!", "budget", str(error).replace("\n", ";"))
    return Finding("ok", "budget", f"{VARIABLE}={text}: {format_bytes(found)} for every run that names no other")


def _malloc() -> Finding:
    """Freed blocks that the C library keeps are not free for a limit of the process."""
    preloaded = os.environ.get("LD_PRELOAD", "")
    if any(name in preloaded for name in ("jemalloc", "tcmalloc", "mimalloc")):
        return Finding("ok", "malloc", f"another allocator is loaded: {preloaded}")
    threshold = os.environ.get("MALLOC_MMAP_THRESHOLD_")
    if threshold is not None:
        return Finding("ok", "malloc", f"MALLOC_MMAP_THRESHOLD_={threshold}: freed tensors above it go back at once")
    return Finding(
        "--", "malloc", "the C library may keep freed memory, which a limit of the process counts; under a tight one: "
        "MALLOC_MMAP_THRESHOLD_=1048576 koila run ... (slower for networks with convolutions)",
    )  # fmt: skip


def _threads() -> Finding:
    return Finding("ok", "threads", f"PyTorch uses {torch.get_num_threads()}; results are compared at the same number")


def _files() -> Finding:
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    return Finding("ok", "offload", f"{format_bytes(free)} free in {folder}, for offload=True")


def _backends() -> Iterator[Finding]:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    for name in sorted(BUILT_IN):
        if name == "inductor" and compiler is None:
            yield Finding("--", "backend", "inductor needs a C++ compiler: apt install g++")
        else:
            yield Finding("ok", "backend", f"{name}, for koila.delegates")


def _packages() -> Iterator[Finding]:
    for extra, packages in EXTRAS.items():
        for package, purpose in packages.items():
            try:
                yield Finding("ok", "package", f"{package} {metadata.version(package)}: {purpose}")
            except metadata.PackageNotFoundError:
                how = f'pip install "koila[{extra}]"'
                yield Finding("--", "package", f"{package} is not installed: {purpose}; {how}")
