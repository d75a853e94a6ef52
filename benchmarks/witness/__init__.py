"""The outside witness: peak bytes by a malloc hook, for a step that runs in a subprocess.

*Takes* the name of a function that makes a step. *Gives* the most bytes that the process had asked for while the step
ran, above what it held before. Unlike the tracker inside, it sees what operators allocate in their kernels.

The functions of the second half (`live_bytes`, `Watch`) work only inside such a subprocess.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("malloc_hook.c")
ROOT = Path(__file__).resolve().parents[2]
MARK = "witness: "
HANG_SECONDS = 3600.0
"""When a process counts as hanging: no process that works comes near it, however busy the machine is."""


class WitnessError(RuntimeError):
    """The hook cannot be built, or the subprocess failed."""


def hook_library() -> Path:
    """The compiled hook; built on first use, and again when its source changes."""
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    library = ROOT / "build" / "witness" / f"malloc_hook-{digest}.so"
    if not library.exists():
        compiler = shutil.which("gcc") or shutil.which("cc")
        if compiler is None:
            raise WitnessError(f"no C compiler: the outside witness builds {SOURCE.name} with gcc; install gcc")
        library.parent.mkdir(parents=True, exist_ok=True)
        partial = library.with_suffix(f".{os.getpid()}")
        command = [compiler, "-O2", "-shared", "-fPIC", "-fno-builtin", "-o", str(partial), str(SOURCE)]
        built = subprocess.run(command, capture_output=True, text=True, check=False)
        if built.returncode:
            raise WitnessError(f"{' '.join(command)} failed:\n{built.stderr}")
        partial.replace(library)
    return library


def call_outside(
    target: str, *args: Any, hook: bool = True, timeout_seconds: float = HANG_SECONDS, **kwargs: Any
) -> Any:
    """Call a function in a subprocess under the hook.

    Args:
        target: "package.module:function".
        args: Arguments that JSON can carry; what the function returns must be such a value, too.
        hook: Without it the subprocess is an ordinary one, for times.
        timeout_seconds: After this the subprocess is ended.
        kwargs: Like `args`.

    Raises:
        WitnessError: The function raised, or took too long.
    """
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT), environment.get("PYTHONPATH", "")])
    if hook:
        environment["LD_PRELOAD"] = str(hook_library())
    command = [sys.executable, "-m", "benchmarks.witness", target, json.dumps([args, kwargs])]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout_seconds, check=False
        )
    except subprocess.TimeoutExpired as late:
        raise WitnessError(f"{target} took more than {timeout_seconds:.0f} s") from late
    answers = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not answers:
        raise WitnessError(f"{target} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return json.loads(answers[-1].removeprefix(MARK))


def peak_outside(maker: str, *args: Any, warmups: int = 1, **kwargs: Any) -> int:
    """Peak bytes of a step above the state before it.

    Args:
        maker: "package.module:function"; the function returns the step, itself a function without arguments.
        args: Arguments of the maker.
        warmups: Steps before the one that is measured; libraries fill their caches in them.
        kwargs: Like `args`.
    """
    return int(call_outside("benchmarks.witness:measure_step", maker, warmups, args, kwargs))


# Inside the subprocess.


@cache
def _hook() -> ctypes.CDLL:
    process = ctypes.CDLL(None)
    if not hasattr(process, "koila_live"):
        raise WitnessError("the malloc hook is not loaded in this process; use call_outside")
    for name in ("koila_live", "koila_peak"):
        getattr(process, name).restype = ctypes.c_longlong
    return process


def live_bytes() -> int:
    """Bytes that the process holds now."""
    return int(_hook().koila_live())


class Watch:
    """Bytes asked for in a `with` block.

    `peak_bytes` is the most above the start, `kept_bytes` what is still held at the end.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self.kept_bytes = 0

    def __enter__(self) -> Watch:
        _hook().koila_reset_peak()
        self._start = live_bytes()
        return self

    def __exit__(self, *exception: object) -> None:
        self.peak_bytes = int(_hook().koila_peak()) - self._start
        self.kept_bytes = live_bytes() - self._start


def load(target: str) -> Callable[..., Any]:
    """The function that "package.module:function" names."""
    module, _, name = target.partition(":")
    __import__(module)
    return getattr(sys.modules[module], name)


def measure_step(maker: str, warmups: int, args: list[Any], kwargs: dict[str, Any]) -> int:
    """The body of `peak_outside`."""
    step = load(maker)(*args, **kwargs)
    for _ in range(warmups):
        step()
    gc.collect()
    with Watch() as watch:
        step()
    return watch.peak_bytes
