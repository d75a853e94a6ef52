"""Every collective of `torch.distributed` on lazy tensors: the numbers of the same program without koila, on two ranks.

All of them share one start of two processes, which is most of the time.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from types import FunctionType

import pytest
import torch.distributed as dist

import koila
from tests.distributed import collectives
from tests.distributed.ranks import compare, differences_of_ranks


def worker(rank: int) -> list[str]:
    return compare(rank, collectives.PROGRAMS) + counted(rank)


def counted(rank: int) -> list[str]:
    """A collective is made at once, which is said, with the reason (Rule 6)."""
    koila.metrics.reset()
    collectives.all_reduce(rank, koila.lazy)
    found = (
        koila.metrics.counter_value("eager::all_reduce"),
        koila.metrics.counter_value("eager_because::other processes take part in it"),
    )
    return [] if found == (3, 3) else [f"rank {rank}: counted {found}"]


@pytest.mark.semantics("S9")
def test_collectives_equal_eager(tmp_path: Path) -> None:
    assert differences_of_ranks(worker, tmp_path) == []


def test_no_collective_is_left_out() -> None:
    """Whatever of `torch.distributed` takes tensors or objects is called in one of the programs."""
    public = {name: getattr(dist, name) for name in dist.distributed_c10d.__all__}
    takes = ("has_torch_function(", "_object_to_tensor(", "p2p_op_list")
    found = [
        name for name, function in public.items()
        if type(function) is FunctionType and any(word in inspect.getsource(function) for word in takes)
    ]  # fmt: skip
    called = Path(collectives.__file__).read_text()
    assert len(found) > 20
    assert [name for name in found if f"dist.{name}(" not in called and f"dist.{name}," not in called] == []
