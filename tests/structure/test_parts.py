"""Every part that the documents name (DESIGN.md, section 7) is reached by a real program: no part is a name only.

The table below names each part, where it lives, and how it is reached: by one training step inside a budget, or by the
call that its documentation names. A profiler notes what runs. To add or move a part, change its row.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import koila
from koila import interfaces
from koila.delegates import call_delegate, to_backend
from koila.events import Metric
from koila.execution.out_of_memory import give_back
from koila.ir.cache import clear_all


@dataclass(frozen=True)
class Part:
    """A part of section 7."""

    document: str
    """The document that names it."""
    module: str
    """The module that it is imported from."""
    name: str
    """Its qualified name there; of a class, the method that does its work."""
    how: str = "step"
    """The program below that reaches it."""

    def __str__(self) -> str:
        return f"{self.document}: {self.name}"


PARTS = (
    # Eager execution interceptor, native engine or graph builder.
    Part("000", "koila.parts", "EagerTensor.__torch_function__"),
    Part("000", "koila.capture.eager", "_is_large", "eager"),
    Part("000", "koila.parts", "EagerTensor.run"),
    # The lazy graph.
    Part("001", "koila.parts", "LazyTensor.__torch_function__"),
    Part("001", "koila.parts", "lazy_forward"),
    Part("001", "koila.parts", "LazyFunction.__init__"),
    Part("001", "koila.parts", "lookup_method"),
    Part("001", "koila.parts", "lookup_function"),
    Part("001", "koila.parts", "run", "run"),
    Part("001", "koila.parts", "Evaluation.__init__"),
    Part("001", "koila.parts", "PrePass.__init__"),
    Part("001", "koila.parts", "reduce_dims"),
    Part("001", "koila.parts", "mean"),
    # The tensor abstraction layer.
    Part("002", "koila.parts", "Runnable", "run"),
    Part("002", "koila.parts", "TensorMixin"),
    Part("002", "koila.parts", "RunnableTensor"),
    Part("002", "koila.parts", "BatchInfo.__init__"),
    Part("002", "koila.parts", "PrePass.with_batch"),
    Part("002", "koila.parts", "LazyTensor.batch", "conversions"),
    # The memory optimizer: what is free, the largest chunks, powers of two, freeing.
    Part("002", "koila._free", "free_bytes", "default budget"),
    Part("002", "koila._budget", "current_budget"),
    Part("002", "koila.planning.search", "chunk_sizes"),
    Part("002", "koila.execution.out_of_memory", "give_back", "give back"),
    # The lazy core: nodes, their hashes, the trie.
    Part("003", "koila.parts", "Node.__init__"),
    Part("003", "koila.parts", "Node.num_outputs"),
    Part("003", "koila.parts", "Node.shapes", "conversions"),
    Part("003", "koila.capture.scan", "trie_key"),
    Part("003", "koila.capture.scan", "shape_key"),
    Part("003", "koila.ir.graph", "Graph.key"),
    Part("003", "koila.parts", "TrieNode.__init__"),
    Part("003", "koila.parts", "TrieCache.traverse"),
    Part("003", "koila.parts", "TrieCache.insert"),
    # Conversions between lazy and eager tensors.
    Part("003", "koila.parts", "LazyTensor.to_tensor", "conversions"),
    Part("003", "koila.parts", "LazyTensor.set_tensor", "conversions"),
    Part("003", "koila.parts", "LazyTensor.update_from_tensor", "conversions"),
    Part("003", "koila.parts", "LazyTensor.update_from_tensor_out", "conversions"),
    Part("003", "koila.parts", "LazyTensor.shallow_copy_to", "conversions"),
    Part("003", "koila.parts", "LazyTensor.prepass", "conversions"),
    Part("003", "koila.parts", "LazyTensor.data_value", "conversions"),
    Part("003", "koila.parts", "LazyTensor.shape"),
    # Shapes.
    Part("003", "koila.parts", "compute_shape"),
    Part("003", "koila.ir.cache", "Cache.get_or_add"),
    Part("003", "koila.parts", "apply_symbolic_shapes", "symbolic shapes"),
    # Metrics.
    Part("003", "koila.events", "count"),
    Part("003", "koila.parts", "Metric.add_sample"),
    Part("003", "koila.parts", "Metric.percentiles", "metrics"),
    Part("003", "koila.reporting.metrics", "report", "metrics"),
    # Delegates.
    Part("004", "koila.delegates.call", "CallDelegate.__call__", "delegates"),
    Part("004", "koila.delegates.call", "call_delegate_cpu", "delegates"),
    Part("004", "koila.delegates.call", "call_delegate_autograd", "delegates"),
    Part("004", "koila.delegates.call", "call_delegate_proxy_torch_dispatch_mode", "delegates"),
    Part("004", "koila.delegates.call", "call_delegate_fake_tensor_mode", "delegates"),
    Part("004", "koila.delegates.call", "call_delegate_functionalize", "delegates"),
    Part("004", "koila.parts", "trace_call_delegate", "delegates"),
    Part("004", "koila.delegates.call", "get_lowered_module_name", "delegates"),
    Part("004", "koila.delegates.call", "unwrap_immutable", "delegates"),
    Part("004", "koila.parts", "LoweredModule.forward", "delegates"),
)


# The programs.


def _step() -> None:
    """One training step in a budget that the whole batch does not fit into."""
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = koila.lazy(torch.randn(512, 256), budget="1800KiB")
    target = koila.eager(torch.randn(512, 256))
    assert x.shape == (512, 256)
    loss = (target - model(x)).square().mean(1).mean()
    loss.backward()
    optimizer.step()
    assert koila.last_report().how == "split"


def _run() -> None:
    class Job:
        def run(self) -> int:
            return 3

    assert koila.run([Job(), koila.lazy(torch.ones(2)) + 1])[0] == 3


def _eager() -> None:
    x = koila.eager(torch.ones(1 << 14))
    assert type(x + 1) is koila.EagerTensor


def _default_budget() -> None:
    with koila.budget(0.5):
        pass


def _conversions() -> None:
    x, y = koila.lazy(torch.ones(4, 2)), koila.lazy(torch.ones(4, 2)) * 2
    assert y.batch == koila.BatchInfo(0, 4) and y.size(0) == 4
    y.update_from_tensor_out(torch.zeros(4, 2))
    assert koila.graph(y).nodes[0].shapes == (tuple(y.prepass().shape),)
    x.update_from_tensor(torch.zeros(4, 2), sync=True)
    y.shallow_copy_to(x)
    assert x.data_value() is y.data_value() and torch.equal(x.to_tensor(detached=True), torch.zeros(4, 2))


def _symbolic_shapes() -> None:
    for length in (5, 7, 9):
        with koila.budget(chunk_size=2):
            (koila.lazy(torch.ones(4, length)).t() * 2).sum().item()
    assert koila.metrics.counter_value("sizes::built") > 0


def _metrics() -> None:
    metric = Metric("mine")
    metric.add_sample(2.0)
    assert metric.percentiles((0.5,)) == {0.5: 2.0} and "mine" in koila.metrics.report()


def _delegates() -> None:
    real = torch.randn(3)
    lowered = to_backend("eager", make_fx(torch.exp)(real), (real,))
    lowered(real.clone().requires_grad_()).sum().backward()

    def program(x: torch.Tensor) -> torch.Tensor:
        return call_delegate(lowered, x)

    make_fx(program)(real)
    torch.func.functionalize(program)(real)
    with FakeTensorMode() as mode:
        program(mode.from_tensor(real))


PROGRAMS: dict[str, Callable[[], None]] = {
    "step": _step,
    "run": _run,
    "eager": _eager,
    "default budget": _default_budget,
    "conversions": _conversions,
    "symbolic shapes": _symbolic_shapes,
    "metrics": _metrics,
    "delegates": _delegates,
    "give back": give_back,
}


# What runs.


class Seen:
    """The functions that ran, and the protocols that were asked for."""

    def __init__(self) -> None:
        self.codes: set[CodeType] = set()
        self.protocols: set[str] = set()

    def note(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self.codes.add(frame.f_code)
            if frame.f_code is _INSTANCE_CHECK:
                # Asking for a protocol asks for those that it is made of.
                self.protocols.update(base.__name__ for base in frame.f_locals["cls"].__mro__)


_INSTANCE_CHECK = interfaces._NamesOnly.__instancecheck__.__code__


@contextmanager
def watched() -> Iterator[Seen]:
    seen = Seen()
    before = sys.getprofile()
    sys.setprofile(seen.note)
    try:
        yield seen
    finally:
        sys.setprofile(before)


def find(part: Part) -> Any:
    """The object that a row names."""
    found: Any = importlib.import_module(part.module)
    for name in part.name.split("."):
        found = inspect.getattr_static(found, name)
    return found


def code_of(found: Any) -> CodeType:
    """The code of a function, a method or a property."""
    if isinstance(found, (staticmethod, classmethod)):
        found = found.__func__
    elif isinstance(found, property):
        found = found.fget
    elif isinstance(found, cached_property):
        found = found.func
    code: CodeType = inspect.unwrap(found).__code__
    return code


def is_reached(part: Part, seen: Seen) -> bool:
    found = find(part)
    return found.__name__ in seen.protocols if inspect.isclass(found) else code_of(found) in seen.codes


@cache
def seen_in(how: str) -> Seen:
    """Run a program with nothing known, once for all tests."""
    clear_all()
    with watched() as seen:
        PROGRAMS[how]()
    return seen


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_a_part_is_reached(part: Part) -> None:
    assert is_reached(part, seen_in(part.how)), f"{part.module}.{part.name} is not reached by: {part.how}"


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_a_part_that_is_not_reached_is_noticed(part: Part) -> None:
    with watched() as seen:
        torch.ones(2).sum()
    assert not is_reached(part, seen)


def test_every_program_is_there_for_a_part() -> None:
    assert set(PROGRAMS) == {part.how for part in PARTS}


def test_every_part_of_the_documented_module_is_in_the_table() -> None:
    parts = importlib.import_module("koila.parts")
    named = {part.name.split(".")[0] for part in PARTS} | {"call_delegate", "shape_cache"}
    assert set(parts.__all__) <= named, "call_delegate and shape_cache are objects: their methods are in the table"
