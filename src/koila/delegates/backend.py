"""Lowering: a graph and the name of a backend become something that runs.

Takes: a graph (`torch.fx.GraphModule` or `torch.export.ExportedProgram`) and example arguments.
Gives: a `LoweredBackendModule` for models, or by `delegate_for` a plain function for the execution stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from koila.delegates.contract import draws_random_numbers
from koila.delegates.lowered import LoweredBackendModule
from koila.delegates.original import OriginalModule, lift
from koila.delegates.registry import (
    Backend,
    CompileSpec,
    DifferentiableBackend,
    Processed,
    available_backends,
    get_backend,
    register_backend,
)
from koila.errors import DelegateError

__all__ = [
    "Backend",
    "BackendDelegate",
    "CompileSpec",
    "Delegate",
    "DifferentiableBackend",
    "Processed",
    "Segment",
    "available_backends",
    "delegate_for",
    "get_backend",
    "register_backend",
    "to_backend",
]


def to_backend(
    backend_id: str,
    module: torch.fx.GraphModule | torch.export.ExportedProgram,
    example_args: Sequence[Any] | None = None,
    compile_specs: Sequence[CompileSpec] = (),
) -> LoweredBackendModule:
    """Lower a graph to a backend.

    Args:
        backend_id: the name of the backend.
        module: the graph; it must change neither its inputs nor its state.
        example_args: arguments to check it on, real or fake; an exported program brings its own.
        compile_specs: options for the backend.

    Returns:
        A module with the graph's parameters, forward and gradient. It runs in the mode (training or evaluation) in
        which the graph was, also after a later ``train()`` or ``eval()``.

    Raises:
        DelegateError: no such backend, a graph that changes something, or one that the backend cannot compile.

    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> x = torch.ones(2)
    >>> lowered = to_backend("eager", make_fx(torch.exp)(x), (x,))
    >>> torch.equal(lowered(x), torch.exp(x))
    True
    """
    backend = get_backend(backend_id)
    lifted = lift(module)
    inputs = (*lifted.state.values(), *lifted.flatten(_example(module, example_args)))
    is_random = draws_random_numbers(OriginalModule(lifted.graph_module), inputs)
    processed = backend.preprocess(lifted.graph_module, compile_specs)
    return LoweredBackendModule(backend_id, lifted, processed, compile_specs, is_random=is_random)


def _example(module: object, example_args: Sequence[Any] | None) -> Sequence[Any]:
    if example_args is not None:
        return example_args
    if isinstance(module, torch.export.ExportedProgram) and module.example_inputs is not None:
        args, kwargs = module.example_inputs
        if not kwargs:
            return args
        raise DelegateError(
            f"the program was exported with {len(kwargs)} keyword arguments; a delegate takes positional ones only",
            hint="export it with positional arguments",
        )
    raise DelegateError("a lowering needs example arguments", hint="to_backend(backend_id, module, example_args)")


# The execution stage.


class Delegate(Protocol):
    """To whom the execution stage hands a segment."""

    def lower(
        self, graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., tuple[Any, ...]]:
        """Turn a segment into a function of the values of its placeholders.

        Args:
            graph_module: the segment; a forward and backward graph in one, so it needs no gradient.
            example_inputs: values, real or fake, with the shapes that it will get.

        Returns:
            A function that gives a tuple, also for a single result.
        """


class Segment:
    """A lowered segment: the program with its state bound, always giving a tuple."""

    def __init__(self, backend: Backend, processed: Processed, state: Sequence[torch.Tensor]) -> None:
        self._backend = backend
        self._processed = processed
        self._state = tuple(state)

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """Run on inputs that the caller keeps."""
        return _as_tuple(self._backend.execute(self._processed, *self._state, *inputs))

    def run_boxed(self, inputs: list[Any]) -> tuple[Any, ...]:
        """Run on inputs that are given away: the list is emptied, and a backend that can frees each after its use."""
        boxed = [*self._state, *inputs]
        inputs.clear()
        run_boxed = getattr(self._processed.program, "run_boxed", None)
        if run_boxed is None:
            return _as_tuple(self._backend.execute(self._processed, *boxed))
        return _as_tuple(run_boxed(boxed))


@dataclass(frozen=True)
class BackendDelegate:
    """A registered backend as a `Delegate`."""

    backend_id: str
    """The name of the backend."""
    compile_specs: tuple[CompileSpec, ...] = ()
    """Options for the backend."""

    def lower(self, graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Segment:
        """Lower a segment; see `Delegate.lower`."""
        backend = get_backend(self.backend_id)
        lifted = lift(graph_module)
        num_inputs = OriginalModule(lifted.graph_module).num_inputs - len(lifted.state)
        if len(example_inputs) != num_inputs:
            raise DelegateError(f"the segment has {num_inputs} inputs, got {len(example_inputs)} example values")
        processed = backend.preprocess(lifted.graph_module, self.compile_specs)
        return Segment(backend, processed, tuple(lifted.state.values()))


def delegate_for(backend_id: str, compile_specs: Sequence[CompileSpec] = ()) -> Delegate:
    """Give the delegate of a backend for the execution stage.

    Raises:
        DelegateError: no such backend.

    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> x = torch.ones(2)
    >>> run = delegate_for("eager").lower(make_fx(torch.neg)(x), (x,))
    >>> run(x)
    (tensor([-1., -1.]),)
    """
    get_backend(backend_id)
    return BackendDelegate(backend_id, tuple(compile_specs))


def _as_tuple(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)
