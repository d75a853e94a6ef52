"""What users call, and the only place where the stages are joined.

*Takes* the user's values. *Gives* lazy tensors, real tensors, graphs; `_Engine` is the realizer that capture asks to
run what is pending.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from typing import Any

import torch

from koila import events
from koila._budget import (
    Budget,
    current_budget,
    default_bytes,
    free_bytes,
    is_any_named,
    make_budget,
    open_scopes,
    read_bytes,
    variable,
)
from koila.analysis.custom import add_rule
from koila.capture.again import recorded_again
from koila.capture.bridge import Bridge
from koila.capture.eager import EagerTensor
from koila.capture.gradients import BackwardRequest
from koila.capture.inputs import make_eager, make_lazy
from koila.capture.lazy import LazyTensor, real_tensor
from koila.capture.patches import install
from koila.capture.pending import recorder
from koila.capture.purity import declare_pure
from koila.errors import CaptureError, KoilaError
from koila.execution.engine import Engine
from koila.execution.jobs import LARGE_BYTES, Task, decision_of
from koila.execution.steps import is_measuring
from koila.interfaces import Runnable
from koila.ir.graph import Graph, collect
from koila.ir.node import Value
from koila.ir.source import user_site
from koila.ir.tree import leaves, map_leaves
from koila.ir.verify import verify
from koila.planning.in_force import any_forced, forget_decisions
from koila.reporting.explain import Explanation, explanation
from koila.reporting.planned_run import PlannedRun, planned_run
from koila.reporting.report import Report
from koila.reporting.report import reports as _reports

EAGER_VARIABLE = "KOILA_EAGER"
"""The environment variable that says what `koila.lazy` takes for `eager` where it is not named."""
_is_eager_named = variable(EAGER_VARIABLE)


def lazy(*values: Any, batch: Any = 0, budget: object = None, eager: object = None) -> Any:
    """Make tensors lazy: what is computed from them is recorded, and run when a value is needed.

    Args:
        values: Tensors, or any structure of them (tuple, list, dict, dataclass, named tuple, a transformers
            `BatchEncoding`). What is not a tensor passes through.
        batch: The batch dimension: an int (negative counts from the right), None, or a structure of them that is a
            prefix of `values`: `batch=(0, None)`, `{"labels": 0}`. With an int, the first tensor that has the
            dimension sets the batch size; a tensor that lacks it is lazy without a batch.
        budget: What a run may allocate: bytes, "512MiB", or a share of what is free (0.5); else the scope's holds.
        eager: With "auto", a small step that repeats the last one is run at once by `EagerTensor`s, not recorded.

    Returns:
        The same structures; one value in, one value out.

    Raises:
        CaptureError: Two tensors have different batch sizes, or `eager` is neither "auto" nor False.
        BudgetError: The budget is not one.

    >>> x, y = lazy(torch.ones(4, 3), torch.zeros(4, 3))
    >>> ((x - y) ** 2).mean().item()
    1.0
    """
    allowed = None if budget is None else read_bytes(budget, "budget", lambda: free_bytes(_accelerator_of(values)))
    if _is_auto(eager) and allowed is None:
        return make_eager(values, batch, _is_small)
    return make_lazy(values, batch, allowed)


def _is_auto(eager: object) -> bool:
    if eager is None and not _is_eager_named():
        return False
    if eager == "auto":
        return True
    found = os.environ.get(EAGER_VARIABLE) if eager is None else eager
    if found not in (None, False, "auto"):
        raise CaptureError(
            f'eager must be "auto" or False, got {found!r}',
            where=str(user_site()),
            hint='koila.lazy(x, y, eager="auto"), or leave it out; KOILA_EAGER is read where it is',
        )
    return found == "auto"


def _is_small(rough_bytes: int, thoroughly: bool) -> bool:
    """Whether a program that may need so many bytes runs whole, far below what is free, and nobody asks for less."""
    if open_scopes() or any_forced() or is_measuring() or (thoroughly and is_any_named()):
        return False
    return rough_bytes <= LARGE_BYTES or rough_bytes <= default_bytes(0) // FAR_BELOW


FAR_BELOW = 4
"""A program that needs at most this part of what is free may run at once."""


def _accelerator_of(values: Any) -> torch.device | None:
    """The first device that is not the host and that one of some tensors is on."""
    devices = (leaf.device for leaf in leaves(values) if isinstance(leaf, torch.Tensor))
    return next((device for device in devices if device.type != "cpu"), None)


def eager(value: torch.Tensor) -> EagerTensor:
    """A real tensor that hands its calls to the graph builder where another operand is lazy.

    >>> eager(torch.ones(2)).run()
    tensor([1., 1.])
    """
    return real_tensor(value).as_subclass(EagerTensor)


def run(value: Any, partial: tuple[int, int] | None = None, *, detach: bool = False) -> Any:
    """Compute every lazy tensor in a structure, in one run.

    Args:
        value: A lazy tensor, any other `Runnable` (an object with a method `run()`), or any structure of them.
        partial: Samples `(low, high)` of the batch to give; of scalars nothing else than all can be given.
        detach: Give tensors without autograd history.

    Returns:
        The same structure with real tensors, and with the results of the other runnables. A value that requires grad
        comes out with a `grad_fn`.

    >>> run({"a": lazy(torch.ones(2)) + 1})
    {'a': tensor([2., 2.])}
    """
    if partial is not None:
        value = map_leaves(value, lambda leaf: _samples(leaf, partial))
    pending = [leaf._value for leaf in leaves(value) if type(leaf) is LazyTensor]
    Bridge.realizer.materialize(pending, "run")
    return map_leaves(value, lambda leaf: _result(leaf, detach))


def _samples(leaf: Any, partial: tuple[int, int]) -> Any:
    if not isinstance(leaf, LazyTensor) or not leaf.ndim:
        return leaf
    return leaf._samples(partial) if type(leaf) is LazyTensor else leaf.run(partial)


def _result(leaf: Any, detach: bool) -> Any:
    if not isinstance(leaf, Runnable):
        return leaf
    found = leaf.run()
    return found.detach() if detach and isinstance(found, torch.Tensor) else found


def stream(value: LazyTensor, chunk_size: int | None = None, *, budget: object = None, total: object = None,
           offload: Any = None) -> Iterator[torch.Tensor]:  # fmt: skip
    """Compute a value chunk by chunk, for one that should never exist whole.

    Args:
        value: A lazy tensor that carries the batch.
        chunk_size: Samples per chunk; the scope's, or what a byte budget allows, or one.
        budget: What the run may allocate, as in `koila.lazy`; the one in force if not given.
        total: What it may allocate and what is alive, together.
        offload: As in `koila.budget`.

    Yields:
        The value of each chunk of samples, in the order of the batch, without autograd history. A value that cannot be
        cut comes in one piece.

    Raises:
        StaleInputError: An input was changed between two chunks.

    >>> [piece.tolist() for piece in stream(lazy(torch.arange(3.0)) * 2, chunk_size=2)]
    [[0.0, 2.0], [4.0]]
    """
    named = _named(value, budget, total, chunk_size, offload)
    if named.is_default:
        named = replace(named, chunk_size=1, is_default=False)
    if type(value) is LazyTensor:
        yield from _engine.stream(value._value, named)
    else:
        yield from _pieces(value, named)


def _pieces(value: Any, named: Budget) -> Iterator[torch.Tensor]:
    """The chunks of a value that was run at once already."""
    batch, real = value.batch, value.run(detach=True)
    size = named.chunk_size or (real.shape[0] if real.ndim else 1)
    yield from [real] if batch is None else real.split(size, batch.index)


def pure(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """Declare that an `autograd.Function` depends on nothing but its arguments, and changes nothing else.

    koila records such a Function and cuts it like any other call. It finds out by itself where the code of a Function,
    and of all that it calls, reads only arguments, `ctx`, constants and operators of PyTorch. Any other Function runs
    at its call, on real tensors, once per step. Declare one whose code cannot be followed (a helper written in C, a
    number kept in an object) although it is pure: its forward and backward are then run while a program is traced,
    and what they read from elsewhere is taken as it was then.

    Args:
        function: The Function; one that inherits from it is declared by itself.

    Returns:
        The same Function, so that this can be used as a decorator.

    Raises:
        CaptureError: It is not a subclass of `torch.autograd.Function`.

    >>> @pure
    ... class Halve(torch.autograd.Function):
    ...     settings = {"factor": 0.5}
    ...     @staticmethod
    ...     def forward(ctx, x):
    ...         return x * Halve.settings["factor"]
    ...     @staticmethod
    ...     def backward(ctx, gradient):
    ...         return gradient * Halve.settings["factor"]
    >>> Halve.apply(lazy(torch.ones(2))).run()
    tensor([0.5000, 0.5000])
    """
    if not (isinstance(function, type) and issubclass(function, torch.autograd.Function)):
        raise CaptureError(
            f"koila.pure takes a subclass of torch.autograd.Function, got {function!r}",
            where=str(user_site()),
            hint="koila.pure(MyFunction), or @koila.pure above the class",
        )
    return declare_pure(function)


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
    forget_decisions()


def settle() -> None:
    """Run everything that this thread has pending: each lazy value that the user holds, and each write to a buffer.

    Call it before code that koila cannot see changes a tensor which was used lazily: a write through NumPy, in C++, or
    by `out=` through an alias that was taken earlier. What was recorded before then has the numbers of before. Methods
    that write, and reads of `.data`, need no call: what is pending on the tensor runs before them.

    Raises:
        KoilaError: A pending value cannot be run; all others have been.

    >>> total = lazy(torch.ones(3)).sum()
    >>> settle()
    >>> total
    LazyTensor(tensor(3.), ready)
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
        if type(leaf) is LazyTensor:
            leaf._value.keep = True
    return value


def explain(value: Any, *, backward: bool = False, budget: object = None, total: object = None,
            chunk_size: int | None = None, offload: Any = None, device: str | torch.device | None = None,
            html: str | PathLike[str] | None = None) -> Explanation:  # fmt: skip
    """Say how the program behind a value will run: in what order, how much memory and time, and why. Nothing is run.

    Args:
        value: A lazy tensor, or a structure of them.
        backward: Explain the joint program of forward and backward; `value` must then be a scalar.
        budget: What the run may allocate, as in `koila.lazy`; the one in force if not given.
        total: What the run may allocate and what is alive on the device, together.
        chunk_size: Samples per chunk.
        offload: As in `koila.budget`.
        device: The device to plan for; where the inputs are if not given.
        html: A file for the same as one page, with the memory step by step, the program with its types, and plans for
            other budgets.

    Returns:
        An `Explanation`; print it.

    >>> print(explain(lazy(torch.ones(4, 2)).sum(1)).num_phases)
    1
    """
    with _lazily(value) as lazy:
        task = _task(lazy, backward, _named(lazy, budget, total, chunk_size, offload), device)
        found = explanation(task.job, decision_of(task), alternatives=html is not None)
    if html is not None:
        found.save(html)
    return found


def explain_request(request: BackwardRequest) -> Explanation:
    """Explain a backward pass that a program asks for, with plans for other budgets; nothing is run. For `koila plan`.

    Raises:
        BudgetError: No plan fits the budget in force.
    """
    values = [root for root in request.roots if isinstance(root, Value)]
    task = _engine.task(values, request)
    assert task is not None  # A backward pass was asked for.
    return explanation(task.job, decision_of(task), alternatives=True)


def plan(value: Any, *, backward: bool = False, budget: object = None, total: object = None,
         chunk_size: int | None = None, offload: Any = None,
         device: str | torch.device | None = None) -> PlannedRun:  # fmt: skip
    """Plan the program behind a value for a budget; nothing is run. What it says is what a run does.

    Args:
        value: A lazy tensor, or a structure of them.
        backward: Plan forward and backward together; `value` must then be a scalar.
        budget: As in `koila.explain`.
        chunk_size: As in `koila.explain`.
        offload: As in `koila.explain`.
        total: What the run may allocate and what is alive on the device, together; all of it on one that is not here.
        device: The device to plan for, by its own memory rules; it need not be here.

    Returns:
        A `PlannedRun`: print it, compare it, turn it into JSON.

    Raises:
        BudgetError: No plan fits; the error names the smallest budget that would do.

    >>> print(plan(lazy(torch.ones(8, 4)).sum(), budget="2KiB").chunk_size)
    8
    """
    with _lazily(value) as lazy:
        task = _task(lazy, backward, _named(lazy, budget, total, chunk_size, offload), device)
        return planned_run(task.job, decision_of(task))


def _named(value: Any, budget: object, total: object, chunk_size: object, offload: object) -> Budget:
    """The budget that the arguments name, else the one in force for the program."""
    budgets = collect(_pending(value), []).budgets
    if budget is None and total is None and chunk_size is None:
        found = current_budget(budgets)
        return found if offload is None else replace(found, offload=make_budget(offload=offload).offload)
    return make_budget(budget, total, offload=offload, chunk_size=chunk_size, name="budget")


def _pending(value: Any) -> list[Value]:
    return [leaf._value for leaf in leaves(value) if type(leaf) is LazyTensor]


@contextmanager
def _lazily(value: Any) -> Iterator[Any]:
    """A structure in which values that were run at once are pending, as they would be if they had been recorded."""
    eager = [leaf for leaf in leaves(value) if type(leaf) is EagerTensor]
    if not eager:
        yield value
        return
    with recorded_again(eager) as again:
        lazies = {id(tensor): lazy for tensor, lazy in zip(eager, again, strict=True) if lazy is not None}
        yield map_leaves(value, lambda leaf: lazies.get(id(leaf), leaf))


def _task(value: Any, backward: bool, named: Budget, device: str | torch.device | None) -> Task:
    values = _pending(value)
    request = None
    if backward:
        request = BackwardRequest(tuple(values), (None,) * len(values), False, False, None)
    task = _engine.task(values, request, named, None if device is None else torch.device(device))
    if task is None:
        raise KoilaError(
            "there is nothing to plan: no value is pending",
            where=str(user_site()),
            hint="plan before the value is read; koila.last_report() says what a run did",
        )
    return task


def last_report() -> Report:
    """What the last run did: bytes, time, chunks, what was computed again; print it.

    A value that is read and the backward pass after it are one run. Reading something small after it (an accuracy) is
    not what a person would call a run: `koila.reports()` has those, too.

    >>> _ = (lazy(torch.ones(4, 2)) * 2).sum().item()
    >>> last_report().how
    'whole'
    """
    return _reports.last


def reports() -> list[Report]:
    """The last hundred reports, oldest first.

    >>> _ = (lazy(torch.ones(4, 2)) * 2).sum().item()
    >>> reports()[-1] == last_report()
    True
    """
    return list(_reports.all)


def graph(value: Any) -> Graph:
    """The pending program behind a value, or behind every lazy tensor in a structure.

    >>> print(len(graph(lazy(torch.ones(2)) + 1).nodes))
    1
    """
    with _lazily(value) as lazy:
        found = collect(_pending(lazy), [])
    verify(found)
    return found


_engine = Engine(recorder)
Bridge.realizer = _engine
events.subscribe(_reports, events.StepEnd)
install()
