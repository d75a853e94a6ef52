"""What users call, and the only place where the stages are joined.

*Takes* the user's values. *Gives* lazy tensors, real tensors, graphs; `_Engine` is the realizer that capture asks to
run what is pending.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from koila import events
from koila._budget import current_budget, read_bytes
from koila.analysis.custom import add_rule
from koila.analysis.trace import Demand
from koila.capture.bridge import Bridge
from koila.capture.eager import EagerTensor
from koila.capture.inputs import make_lazy
from koila.capture.lazy import LazyTensor, real_tensor
from koila.capture.pending import recorder
from koila.execution.engine import Engine
from koila.execution.planned import PlannedRun, plan_values
from koila.execution.programs import NotSplittable, Program, forget_plans
from koila.execution.report import Report
from koila.interfaces import Runnable
from koila.ir.graph import Graph, collect
from koila.ir.node import Value
from koila.ir.source import user_site
from koila.ir.tree import leaves, map_leaves
from koila.ir.verify import verify
from koila.reporting.explain import Explanation, explain_values


def lazy(*values: Any, batch: Any = 0, budget: object = None) -> Any:
    """Make tensors lazy: what is computed from them is recorded, and run when a value is needed.

    Args:
        values: Tensors, or any structure of them (tuple, list, dict, dataclass, named tuple, a transformers
            `BatchEncoding`). What is not a tensor passes through.
        batch: The batch dimension: an int (negative counts from the right), None, or a structure of them that is a
            prefix of `values`: `batch=(0, None)`, `{"labels": 0}`. With an int, the first tensor that has the
            dimension sets the batch size; a tensor that lacks it is lazy without a batch.
        budget: What a run of these inputs may allocate: bytes as an int, a text such as "512MiB", or a share of what is
            free such as 0.5. The smallest budget of a program's inputs holds; without one, the scope's.

    Returns:
        The same structures; one value in, one value out.

    Raises:
        CaptureError: Two tensors have different batch sizes.
        BudgetError: The budget is not one.

    >>> x, y = lazy(torch.ones(4, 3), torch.zeros(4, 3))
    >>> ((x - y) ** 2).mean().item()
    1.0
    """
    allowed = None if budget is None else read_bytes(budget, "budget")
    return make_lazy(values, batch, allowed)


def eager(value: torch.Tensor) -> EagerTensor:
    """A real tensor that hands its calls to the graph builder where another operand is lazy.

    >>> eager(torch.ones(2)).run()
    tensor([1., 1.])
    """
    return real_tensor(value).as_subclass(EagerTensor)


def run(value: Any, detach: bool = False) -> Any:
    """Compute every lazy tensor in a structure, in one run.

    Args:
        value: A lazy tensor, any other `Runnable` (an object with a method `run()`), or any structure of them.
        detach: Give tensors without autograd history.

    Returns:
        The same structure with real tensors, and with the results of the other runnables. A value that requires grad
        comes out with a `grad_fn`.

    >>> run({"a": lazy(torch.ones(2)) + 1})
    {'a': tensor([2., 2.])}
    """
    pending = [leaf._value for leaf in leaves(value) if isinstance(leaf, LazyTensor)]
    Bridge.realizer.materialize(pending, "run")
    return map_leaves(value, lambda leaf: _result(leaf, detach))


def _result(leaf: Any, detach: bool) -> Any:
    if not isinstance(leaf, Runnable):
        return leaf
    found = leaf.run()
    return found.detach() if detach and isinstance(found, torch.Tensor) else found


def stream(value: LazyTensor, chunk_size: int | None = None) -> Iterator[torch.Tensor]:
    """Compute a value chunk by chunk, for one that should never exist whole.

    Args:
        value: A lazy tensor that carries the batch.
        chunk_size: Samples per chunk; the scope's, or one.

    Yields:
        The value of each chunk of samples, in the order of the batch, without autograd history. A value that cannot be
        cut comes in one piece.

    >>> [piece.tolist() for piece in stream(lazy(torch.arange(3.0)) * 2, chunk_size=2)]
    [[0.0, 2.0], [4.0]]
    """
    found = collect([value._value], [])
    size = chunk_size or current_budget().chunk_size or 1
    try:
        if value._value.real is None and found.num_samples > size:
            found.check_fresh()
            yield from Program(found, Demand()).stream(0, size)
            return
    except NotSplittable as reason:
        events.count(f"fallback::{reason}", site=str(user_site()))
    yield value.run(detach=True)


def rule(target: Any, dimensions: str) -> None:
    """Say how an operator of your own can be cut along the batch.

    Args:
        target: The operator: `torch.ops.my_library.my_operator.default`.
        dimensions: A letter for each dimension of each tensor argument, and of each result. A lower-case letter may
            hold the batch; an upper-case one may not; `_` stands for any further ones that may not. A result with `+`
            is the sum over the chunks if it lacks the batch's letter: `"x=bT w=TK -> bK"`, `"g=b_ x=b_ -> _+"`.

    Without a rule an operator runs whole: it costs memory, never correctness.
    """
    add_rule(target, dimensions)
    forget_plans()


def settle() -> None:
    """Run everything that this thread has pending: each lazy value that the user holds, and each write to a buffer.

    Call it before code that koila cannot see changes a tensor which was used lazily: a write through numpy, through an
    alias of `.data`, or in C++. What was recorded before then has the numbers of before.

    Raises:
        KoilaError: A pending value cannot be run; all others have been.

    >>> total = lazy(torch.ones(3)).sum()
    >>> settle()
    >>> total
    LazyTensor([], dtype=torch.float32, device=cpu, ready)
    """
    failed: list[Exception] = []
    Bridge.realizer.materialize([], "settle")
    for value in recorder.held():
        # One by one: programs of different batches have nothing to do with each other. Most are bound by a run before.
        if value.real is None:
            try:
                Bridge.realizer.materialize([value], "settle")
            except Exception as error:
                failed.append(error)
    if failed:
        raise failed[0]


def keep(value: Any) -> Any:
    """Make every lazy tensor in a structure a result of the run that computes it, however large it is.

    Without it, a split run keeps what the user still holds as long as it fits; what does not fit can be computed
    later only while its inputs are unchanged.

    >>> out = keep(lazy(torch.ones(2)) * 2)
    """
    for leaf in leaves(value):
        if isinstance(leaf, LazyTensor):
            leaf._value.keep = True
    return value


def explain(value: Any, *, backward: bool = False, chunk_size: int | None = None) -> Explanation:
    """Say how the program behind a value would be cut, and why; nothing is run.

    Args:
        value: A lazy tensor, or a structure of them.
        backward: Explain the joint program of forward and backward; `value` must then be a scalar.
        chunk_size: Samples per chunk; the scope's, or one.

    Returns:
        An `Explanation`; print it.

    >>> print(explain(lazy(torch.ones(4, 2)).sum(1)).num_phases)
    1
    """
    wanted = [leaf._value for leaf in leaves(value) if isinstance(leaf, LazyTensor)]
    return explain_values(wanted, backward, chunk_size or current_budget().chunk_size or 1)


def plan(value: Any, *, backward: bool = False, budget: object = None, total: object = None,
         device: str | torch.device = "cpu") -> PlannedRun:  # fmt: skip
    """Plan the program behind a value for a budget; nothing is run.

    Args:
        value: A lazy tensor, or a structure of them.
        backward: Plan forward and backward together; `value` must then be a scalar.
        budget: What the run may allocate, as in `koila.lazy`; the scope's if not given.
        total: What the device has in all, for a run that has it to itself.
        device: The device to plan for; it need not be here. Workspaces are those of the CPU's kernels.

    Returns:
        A `PlannedRun`: print it, compare it, turn it into JSON.

    Raises:
        BudgetError: No plan fits; the error names the smallest budget that would do.

    >>> print(plan(lazy(torch.ones(8, 4)).sum(), budget="1KiB").chunk_size)
    8
    """
    wanted = [leaf._value for leaf in leaves(value) if isinstance(leaf, LazyTensor)]
    given = budget if budget is not None else total
    limit = None if given is None else read_bytes(given, "budget" if budget is not None else "total")
    return plan_values(wanted, backward, limit, torch.device(device))


def last_report() -> Report:
    """What the last run did: bytes, time, chunks, what was computed again; print it.

    >>> _ = (lazy(torch.ones(4, 2)) * 2).sum().item()
    >>> last_report().how
    'whole'
    """
    return _engine.last_report


def graph(value: Any) -> Graph:
    """The pending program behind a value, or behind every lazy tensor in a structure.

    >>> print(len(graph(lazy(torch.ones(2)) + 1).nodes))
    1
    """
    wanted: list[Value] = [leaf._value for leaf in leaves(value) if isinstance(leaf, LazyTensor)]
    found = collect(wanted, [])
    verify(found)
    return found


_engine = Engine(recorder)
Bridge.realizer = _engine
