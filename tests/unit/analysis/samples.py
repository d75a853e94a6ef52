"""Sample calls: every functional aten call that torch's own operator samples make, forward and backward.

*Takes* `op_db` (in float64) and a share of its samples. *Gives* `Recorded` calls by operator, without repetitions.
"""

from __future__ import annotations

import contextlib
import warnings
import zlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch._ops import OpOverload
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from koila.analysis.rules import RULES
from tests.unit.analysis.harness import Recorded, as_results, bound

MAX_ELEMENTS = 4000
"""Larger operands are left out: they prove nothing more."""


class Recorder(TorchDispatchMode):
    """Records every functional call, and the functional twin of every in-place one."""

    def __init__(self, found: dict[OpOverload, dict[str, Recorded]], limit: int) -> None:
        super().__init__()
        self.found, self.limit = found, limit

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        twin = functional(func)
        before = None
        if twin is not None and self.wanted(twin, args, kwargs):
            before = tree_map_only(torch.Tensor, lambda t: t.detach().clone(), (args, kwargs))
        outcome = func(*args, **kwargs)
        if before is not None and twin is not None:
            with contextlib.suppress(RuntimeError, TypeError, NotImplementedError):
                self.keep(twin, *before)
        return outcome

    def wanted(self, target: OpOverload, args: Any, kwargs: Any) -> bool:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        plain = all(t.layout is torch.strided and not t.is_quantized and t.device.type == "cpu" for t in tensors)
        small = all(t.numel() <= MAX_ELEMENTS for t in tensors)
        plain = plain and all(t.dtype is not torch.complex32 for t in tensors)  # Torch can hardly compute in it.
        return bool(tensors) and plain and small and len(self.found.get(target, ())) < self.limit

    def keep(self, target: OpOverload, args: Any, kwargs: Any) -> None:
        arguments = bound(target, args, kwargs)
        probe = Recorded(target, arguments, ())
        calls = self.found.setdefault(target, {})
        signature = probe.signature()
        if signature not in calls:
            with torch.no_grad():
                results = as_results(target(**arguments))
            calls[signature] = Recorded(target, arguments, tree_map_only(torch.Tensor, torch.clone, results))


def functional(func: OpOverload) -> OpOverload | None:
    """The operator itself, or its functional twin if it is an in-place one; None if there is none."""
    random = torch.Tag.nondeterministic_seeded in func.tags and func not in RULES
    if func.namespace != "aten" or random:
        return None
    if not func._schema.is_mutable:
        return func
    name = func._schema.name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None) if name.endswith("_") else None
    return getattr(packet, func._overloadname, None) if packet is not None else None


def capture(share: float, limit: int) -> dict[OpOverload, list[Recorded]]:
    """Record a share of all samples, at most `limit` calls per operator."""
    found: dict[OpOverload, dict[str, Recorded]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in op_db:
            capture_op(op, share, Recorder(found, limit))
    return {target: list(calls.values()) for target, calls in found.items()}


def capture_op(op: Any, share: float, recorder: Recorder) -> None:
    """Run the chosen samples of one operator under the recorder."""
    dtype = torch.float64 if torch.float64 in op.supported_dtypes("cpu") else None
    dtype = dtype or (torch.int64 if torch.int64 in op.supported_dtypes("cpu") else None)
    if dtype is None or op.name.startswith(("empty", "new_empty")):
        return
    grad = bool(op.supports_autograd and dtype.is_floating_point)
    for sample in chosen(op, dtype, grad, share):
        with contextlib.suppress(RuntimeError, NotImplementedError, TypeError, AssertionError, ValueError), recorder:
            outcome = op(sample.input, *sample.args, **sample.kwargs)
            if grad:
                backward(outcome, sample)


def chosen(op: Any, dtype: torch.dtype, grad: bool, share: float) -> Iterator[Any]:
    """A fixed share of an operator's samples, chosen by hash; always the first one."""
    torch.manual_seed(0)
    samples = op.sample_inputs("cpu", dtype, requires_grad=grad)
    for index, sample in enumerate(samples if share == 1 else islice(samples, 60)):
        if index == 0 or zlib.crc32(f"{op.full_name}{index}".encode()) % 1000 < share * 1000:
            yield sample


def backward(outcome: Any, sample: Any) -> None:
    """Differentiate every floating result with respect to everything that asks for it."""
    outputs = [leaf for leaf in tree_leaves(outcome) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    inputs = [
        leaf
        for leaf in tree_leaves((sample.input, sample.args, sample.kwargs))
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    if outputs and inputs:
        torch.autograd.grad(outputs, inputs, [torch.randn_like(o) for o in outputs], allow_unused=True)
