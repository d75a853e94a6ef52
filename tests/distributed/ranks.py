"""Two ranks over gloo: a program's worker runs in two new processes, which meet through a file and not at a port.

*Takes* a worker `(rank) -> differences`, and a folder. *Gives* what each rank found different from plain PyTorch.
Starting a process costs seconds, so a worker runs many programs: each without koila, whole and in chunks (of another
size in each rank: ranks need not agree on a plan), and compares in place.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import koila
from benchmarks.witness import HANG_SECONDS

WORLD_SIZE = 2
TIMEOUT = datetime.timedelta(seconds=HANG_SECONDS)
"""Against hanging only: a rank may wait for long while its partner traces on a busy machine. One that fails closes its
connections, and its partner hears of it at once."""
TOLERANCE = 1e-10

Worker = Callable[[int], list[str]]
Way = Callable[..., Any]
"""How a program's tensors are made: as they are, or lazy."""
Program = Callable[[int, Way], Any]
"""A rank's program: returns a structure of tensors and numbers."""

WAYS: Mapping[str, Mapping[str, Any]] = {
    "whole": {},
    "chunks of 2 and 1": {"chunk_size": (2, 1)},
}
"""Arguments of `koila.budget`; a tuple has an entry for each rank."""


def assert_no_differences(worker: Worker, folder: Path, num_ranks: int = WORLD_SIZE) -> None:
    """Run a worker in two ranks, or alone in a new process; fail with what was found different."""
    mp.spawn(_rank, (worker, str(folder), num_ranks), nprocs=num_ranks)
    found = [line for rank in range(num_ranks) for line in json.loads((folder / f"{rank}.json").read_text())]
    assert not found, "\n".join(found)


def _rank(rank: int, worker: Worker, folder: str, num_ranks: int) -> None:
    torch.set_num_threads(1)
    if num_ranks > 1:
        store = dist.FileStore(f"{folder}/store", num_ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=TIMEOUT)
    try:
        found = worker(rank)
    except BaseException:  # The other rank must hear of it soon, the parent in full.
        found = [f"rank {rank}: {traceback.format_exc()}"]
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    if num_ranks > 1:
        dist.destroy_process_group()


def compare(rank: int, programs: Mapping[str, Program], ways: Mapping[str, Mapping[str, Any]] = WAYS) -> list[str]:
    """Run each program without koila and in each way; say where they differ."""
    found: list[str] = []
    for name, program in programs.items():
        expected = program(rank, _as_it_is)
        for way, arguments in ways.items():
            koila.settle()
            with _budget(rank, arguments):
                result = program(rank, koila.lazy)
            exact = way == "whole"
            found += [f"rank {rank}, {name}, {way}: {line}" for line in differences(result, expected, exact)]
    return found


@contextlib.contextmanager
def _budget(rank: int, arguments: Mapping[str, Any]) -> Iterator[None]:
    own = {name: value[rank] if isinstance(value, tuple) else value for name, value in arguments.items()}
    with koila.budget(**own):
        yield


def _as_it_is(*tensors: Any, **options: Any) -> Any:
    return tensors[0] if len(tensors) == 1 else tensors


def differences(result: Any, expected: Any, exact: bool, place: str = "result") -> list[str]:
    """Where two structures differ; tensors may differ by the order of summation unless `exact`."""
    if isinstance(expected, torch.Tensor):
        return _of_tensors(result, expected, exact, place)
    if isinstance(expected, (list, tuple)):
        if len(result) != len(expected):
            return [f"{place} has {len(result)} members for {len(expected)}"]
        pairs = enumerate(zip(result, expected, strict=True))
        return [line for i, (a, b) in pairs for line in differences(a, b, exact, f"{place}[{i}]")]
    if isinstance(expected, dict):
        if list(result) != list(expected):
            return [f"{place} has {list(result)} for {list(expected)}"]
        pairs = ((name, result[name], expected[name]) for name in expected)
        return [line for name, a, b in pairs for line in differences(a, b, exact, f"{place}.{name}")]
    return [] if result == expected else [f"{place} is {result!r} for {expected!r}"]


def _of_tensors(result: Any, expected: torch.Tensor, exact: bool, place: str) -> list[str]:
    if not isinstance(result, torch.Tensor):
        return [f"{place} is a {type(result).__name__} for a tensor"]
    a, b = koila.run(result).detach(), expected.detach()
    if a.shape != b.shape or a.dtype != b.dtype or a.stride() != b.stride():
        return [f"{place} is {a.dtype} {list(a.shape)} for {b.dtype} {list(b.shape)}"]
    if exact or not b.is_floating_point():
        return [] if torch.equal(a, b) else [f"{place} is {a} for {b}"]
    off = float((a.double() - b.double()).norm())
    return [] if off <= TOLERANCE * float(b.double().norm()) else [f"{place} is off by {off}: {a} for {b}"]
