"""The reference backend: the graph as one flat function of PyTorch's own kernels.

Takes: a graph without state.
Gives: a `FlatProgram`, in which every value is freed after its last use.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from koila._torch.delegates import BoxedCodeGen
from koila.delegates.registry import CompileSpec, Processed
from koila.errors import DelegateError

__all__ = ["BACKEND", "EagerBackend", "FlatProgram"]


class FlatProgram:
    """A graph as straight-line Python.

    The code that FX writes drops each local name after its last use, so a value lives exactly as long as the graph
    needs it. Inputs too, if they are handed over by `run_boxed`: a caller's argument tuple would keep them alive.
    """

    def __init__(self, graph_module: torch.fx.GraphModule) -> None:
        graph = copy.deepcopy(graph_module.graph)
        graph.set_codegen(BoxedCodeGen())
        self._module = torch.fx.GraphModule(graph_module, graph)
        self.num_inputs = sum(node.op == "placeholder" for node in graph.nodes)

    def __call__(self, *args: Any) -> Any:
        """Run on arguments that the caller keeps."""
        return self.run_boxed(list(args))

    def run_boxed(self, args: list[Any]) -> Any:
        """Run on arguments that are given away: the list is emptied, each is freed after its last use."""
        if len(args) != self.num_inputs:
            raise DelegateError(f"the program takes {self.num_inputs} inputs, got {len(args)}")
        return self._module.forward(args)


class EagerBackend:
    """Runs the graph on the kernels that it names: the numbers of the original, bit for bit."""

    backend_id = "eager"

    def preprocess(self, graph_module: torch.fx.GraphModule, compile_specs: Sequence[CompileSpec]) -> Processed:
        """Flatten the graph; there are no options."""
        if compile_specs:
            names = ", ".join(spec.key for spec in compile_specs)
            raise DelegateError(f"backend 'eager' has no options, got {names}")
        return Processed(graph_module.code.encode(), FlatProgram(graph_module))

    def execute(self, processed: Processed, *args: Any) -> Any:
        """Run the flat program."""
        return processed.program(*args)


BACKEND = EagerBackend()
