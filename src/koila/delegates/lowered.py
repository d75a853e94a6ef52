"""The module that a lowering gives.

Takes: what a backend made of a graph, and the graph.
Gives: `LoweredBackendModule`, an ordinary module that runs on its backend, in eager code and inside of traces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from koila._torch import FakeTensor
from koila._torch.delegates import current_mode, pytree
from koila.delegates.call import call_delegate
from koila.delegates.gradient import recompute_gradients
from koila.delegates.original import Lifted, OriginalModule
from koila.delegates.registry import CompileSpec, DifferentiableBackend, Processed, get_backend

__all__ = ["LoweredBackendModule", "LoweredModule"]


class LoweredBackendModule(torch.nn.Module):
    """A graph on its backend. Export and Dynamo know it by the name of this class and by the first four fields.

    Parameters and buffers of the graph are registered here under ``state_*`` and handed to the operator as inputs; what
    the operator and a trace hold is then a child without state, because a trace registers its parameters by itself.

    Args:
        backend_id: the name of the backend.
        lifted: the graph without its state.
        processed: what the backend made of it; made again on demand after a copy or a load.
        compile_specs: the options of the lowering.
        is_random: whether the graph draws random numbers.
        module_name: the name that ``torch.export.save`` writes.
    """

    backend_id: str
    """The name of the backend."""
    compile_specs: list[CompileSpec]
    """The options of the lowering."""
    original_module: OriginalModule
    """The graph; ``original_module.module()`` is a function of state and arguments."""
    is_random: bool
    """Whether the graph draws random numbers."""
    module_name: str
    """The name that ``torch.export.save`` writes in place of the module."""
    state_names: tuple[str, ...]
    """The attributes that hold the state, in the order of the graph's placeholders."""

    def __init__(
        self,
        backend_id: str,
        lifted: Lifted,
        processed: Processed | None = None,
        compile_specs: Sequence[CompileSpec] = (),
        *,
        is_random: bool = True,
        module_name: str = "lowered_module",
    ) -> None:
        super().__init__()
        self.backend_id = backend_id
        self.compile_specs = list(compile_specs)
        self.original_module = OriginalModule(lifted.graph_module)
        self.is_random = is_random
        self.module_name = module_name
        self.state_names = tuple(lifted.state)
        self._lifted = Lifted(lifted.graph_module, {}, lifted.takes_leaves, lifted.out_spec)
        self._processed = processed
        self._register_state(lifted.state)
        self.stateless = (
            LoweredBackendModule(
                backend_id, self._lifted, processed, compile_specs, is_random=is_random, module_name=module_name
            )
            if lifted.state
            else None
        )

    def forward(self, *args: Any) -> Any:
        """Run the backend on the state and the arguments."""
        state = [getattr(self, name) for name in self.state_names]
        lowered_module = self if self.stateless is None else self.stateless
        return self._lifted.unflatten(call_delegate(lowered_module, *state, *self._lifted.flatten(args)))

    @property
    def processed_bytes(self) -> bytes:
        """What the backend made of the graph, as far as it can be written to a file."""
        return self.processed.data

    @property
    def processed(self) -> Processed:
        """What the backend made of the graph."""
        if self._processed is None:
            backend = get_backend(self.backend_id)
            self._processed = backend.preprocess(self.original_module.graph_module, self.compile_specs)
        return self._processed

    def run(self, *inputs: Any) -> Any:
        """Run the backend's program on all inputs of the graph; the original graph where they are fake."""
        if _has_fakes(inputs):
            return self.original_module.module()(*inputs)
        return get_backend(self.backend_id).execute(self.processed, *inputs)

    def gradients(
        self, inputs: Sequence[Any], grad_outputs: Sequence[torch.Tensor | None], wanted: Sequence[int]
    ) -> Sequence[torch.Tensor | None]:
        """Give the gradients of the wanted leaves of the inputs; see `DifferentiableBackend.backward`.

        The backend's own backward is used on real values. What must be differentiated again or seen by a dispatch
        mode (a trace, a counter) goes through the original graph.
        """
        backend = get_backend(self.backend_id)
        is_watched = torch.is_grad_enabled() or current_mode() is not None or _has_fakes(inputs)
        if isinstance(backend, DifferentiableBackend) and not is_watched:
            return backend.backward(self.processed, inputs, grad_outputs, wanted)
        return recompute_gradients(self.original_module.module(), inputs, grad_outputs, wanted)

    def extra_repr(self) -> str:
        return f"backend_id={self.backend_id!r}, inputs={self.original_module.num_inputs}"

    def __getstate__(self) -> dict[str, Any]:
        # A compiled program belongs to this process; a copy compiles its own.
        return {**self.__dict__, "_processed": None}

    def _register_state(self, state: dict[str, torch.Tensor]) -> None:
        for name, tensor in state.items():
            if isinstance(tensor, torch.nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)


LoweredModule = LoweredBackendModule


def _has_fakes(values: Sequence[Any]) -> bool:
    return any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(tuple(values)))
