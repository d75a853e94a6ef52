"""An optional backend: the graph compiled by PyTorch's inductor, forward and backward.

Takes: a graph without state; compile specs are options of ``torch.compile``.
Gives: a compiled program. Random numbers are those of eager; sums may be taken in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from koila._torch.inductor import BackendCompilerFailed, InvalidCxxCompiler, get_cpp_compiler
from koila.delegates.gradient import recompute_gradients
from koila.delegates.registry import CompileSpec, Processed
from koila.errors import DelegateError

__all__ = ["BACKEND", "InductorBackend"]


class InductorBackend:
    """Compiles with ``torch.compile`` at the first run of a program."""

    backend_id = "inductor"

    def preprocess(self, graph_module: torch.fx.GraphModule, compile_specs: Sequence[CompileSpec]) -> Processed:
        """Prepare the compilation, after checking that there is a C++ compiler."""
        _require_compiler()
        options = {"fallback_random": True, **{spec.key: spec.value for spec in compile_specs}}  # Rule 1
        try:
            compiled = torch.compile(graph_module, fullgraph=True, dynamic=False, options=options)  # type: ignore[arg-type]
        except RuntimeError as error:
            raise DelegateError(f"backend 'inductor' does not take these options: {error}") from error
        return Processed(graph_module.code.encode(), compiled)

    def execute(self, processed: Processed, *args: Any) -> Any:
        """Run the compiled forward pass."""
        with _compile_errors(), torch.no_grad():
            return processed.program(*args)

    def backward(
        self,
        processed: Processed,
        args: Sequence[Any],
        grad_outputs: Sequence[torch.Tensor | None],
        wanted: Sequence[int],
    ) -> Sequence[torch.Tensor | None]:
        """Run the compiled forward pass again, now keeping what the compiled backward pass needs."""
        with _compile_errors():
            return recompute_gradients(processed.program, args, grad_outputs, wanted)


class _compile_errors:
    """Tells a failed compilation as a DelegateError."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, BackendCompilerFailed):
            raise DelegateError(
                f"inductor cannot compile the graph: {error}", hint="the backend 'eager' runs every graph"
            ) from error


def _require_compiler() -> None:
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise DelegateError(
            "backend 'inductor' needs a C++ compiler, and none was found",
            hint="install g++ or set CXX; the backend 'eager' needs none",
        ) from error


BACKEND = InductorBackend()
