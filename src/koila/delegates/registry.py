"""What a backend is, and where backends are found by name.

Takes: objects that satisfy `Backend`, or the name of one that comes with koila.
Gives: the backend of a name, loaded when it is first asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from koila.errors import DelegateError

__all__ = [
    "Backend",
    "CompileSpec",
    "DifferentiableBackend",
    "Processed",
    "available_backends",
    "get_backend",
    "register_backend",
]

BUILT_IN = {"eager": "koila.delegates.backends.eager", "inductor": "koila.delegates.backends.inductor"}
"""Backends that come with koila: name → the module that holds it as ``BACKEND``."""

_registered: dict[str, Backend] = {}


@dataclass(frozen=True)
class CompileSpec:
    """One option of a lowering."""

    key: str
    """The name that the backend knows the option by."""
    value: object
    """Its value; the backend says of which type."""


@dataclass(frozen=True)
class Processed:
    """What a backend made of a graph."""

    data: bytes
    """The part that can be written to a file; for the backends of koila the text of the program."""
    program: Callable[..., Any]
    """The part that runs in this process: values of the placeholders in, output of the graph out."""


class Backend(Protocol):
    """Turns a graph without state into a program, and runs it.

    The graph's placeholders are all of its inputs (parameters included); it mutates none of them.
    """

    @property
    def backend_id(self) -> str:
        """The name by which the backend is registered."""

    def preprocess(self, graph_module: torch.fx.GraphModule, compile_specs: Sequence[CompileSpec]) -> Processed:
        """Compile the graph; called once per lowering. Raises DelegateError if it cannot."""

    def execute(self, processed: Processed, *args: Any) -> Any:
        """Run the program on real values; what it gives has the structure of the graph's output."""


@runtime_checkable
class DifferentiableBackend(Protocol):
    """A backend with a backward pass of its own; the others recompute through the original graph."""

    def backward(
        self,
        processed: Processed,
        args: Sequence[Any],
        grad_outputs: Sequence[torch.Tensor | None],
        wanted: Sequence[int],
    ) -> Sequence[torch.Tensor | None]:
        """Give the gradients of the inputs.

        Args:
            processed: what `preprocess` gave.
            args: the arguments of the forward pass.
            grad_outputs: one gradient per leaf of the output; None where there is none.
            wanted: which leaves of ``args`` (in pytree order) need a gradient.

        Returns:
            One gradient per entry of ``wanted``; None means zero.
        """


def register_backend(backend: Backend, *, replace: bool = False) -> Backend:
    """Make a backend known by its ``backend_id``.

    Args:
        backend: the backend.
        replace: whether it may take the place of another one of the same name.

    Returns:
        The backend.

    Raises:
        DelegateError: the name is taken.
    """
    name = backend.backend_id
    if not replace and name in available_backends():
        raise DelegateError(f"backend {name!r} is registered already", hint="register_backend(backend, replace=True)")
    _registered[name] = backend
    return backend


def available_backends() -> tuple[str, ...]:
    """Give the names that `get_backend` knows.

    >>> [name for name in available_backends() if name in ("eager", "inductor")]
    ['eager', 'inductor']
    """
    return tuple(sorted({*BUILT_IN, *_registered}))


def get_backend(backend_id: str) -> Backend:
    """Give the backend of a name, importing it if it comes with koila and was not needed before.

    Raises:
        DelegateError: nobody registered the name.

    >>> get_backend("eager").backend_id
    'eager'
    """
    if backend_id not in _registered:
        if backend_id not in BUILT_IN:
            known = ", ".join(available_backends())
            raise DelegateError(f"no backend {backend_id!r}; known: {known}", hint="koila.delegates.register_backend")
        _registered[backend_id] = importlib.import_module(BUILT_IN[backend_id]).BACKEND
    return _registered[backend_id]
