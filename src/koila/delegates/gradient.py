"""The gradient of a program by running it again.

Takes: a differentiable function, its arguments, the gradients of its outputs, and the surroundings of its first run.
Gives: the gradients of the arguments that want one; differentiable again where the caller asks for that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import get_device_states, set_device_states

from koila._torch.delegates import pytree

__all__ = ["Surroundings", "recompute_gradients"]


@dataclass(frozen=True)
class Surroundings:
    """What a second run must find as the first one did: generators and autocast."""

    cpu_state: torch.Tensor | None
    """State of the CPU's generator; None if the program draws no random numbers."""
    devices: tuple[int, ...]
    """The accelerators whose generators the program may use."""
    device_states: tuple[torch.Tensor, ...]
    """The states of their generators."""
    device_type: str
    """The type of device that the arguments live on."""
    autocast_dtype: torch.dtype | None
    """The dtype that autocast casts to on that device; None if it was off."""

    @classmethod
    def capture(cls, args: Sequence[Any], is_random: bool) -> Surroundings:
        """Note the surroundings now; the generators only if ``is_random``."""
        tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        device_type = tensors[0].device.type if tensors else "cpu"
        enabled = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type) if enabled else None
        if not is_random:
            return cls(None, (), (), device_type, dtype)
        devices, states = get_device_states(*tensors)
        return cls(torch.get_rng_state(), tuple(devices), tuple(states), device_type, dtype)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Put the surroundings back for a while."""
        with contextlib.ExitStack() as stack:
            if self.cpu_state is not None:
                # Rule 1: the second run draws the first one's numbers and leaves the generators where they stood.
                device_type = self.device_type if self.devices else "cuda"
                stack.enter_context(torch.random.fork_rng(self.devices, device_type=device_type))
                torch.set_rng_state(self.cpu_state)
                set_device_states(list(self.devices), list(self.device_states), device_type=device_type)
            stack.enter_context(self.autocast())
            yield

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Give the autocast of the first run, without its cache: a cast made here must not reach another graph."""
        if not torch.amp.is_autocast_available(self.device_type):
            return contextlib.nullcontext()
        enabled = self.autocast_dtype is not None
        return torch.autocast(self.device_type, self.autocast_dtype, enabled=enabled, cache_enabled=False)


def recompute_gradients(
    function: Callable[..., Any],
    args: Sequence[Any],
    grad_outputs: Sequence[torch.Tensor | None],
    wanted: Sequence[int],
) -> list[torch.Tensor | None]:
    """Run a function again and go back through it.

    Args:
        function: what to run.
        args: its arguments, of any structure.
        grad_outputs: one gradient per leaf of its output; None where there is none.
        wanted: which leaves of ``args`` (in pytree order) need a gradient.

    Returns:
        One gradient per entry of ``wanted``; None where the outputs do not depend on it. They have a graph of
        their own if grad mode is on, so that a second derivative exists.

    >>> x = torch.tensor(3.0)
    >>> with torch.no_grad():
    ...     recompute_gradients(torch.square, (x,), (torch.tensor(1.0),), (0,))
    [tensor(6.)]
    """
    create_graph = torch.is_grad_enabled()
    leaves, spec = pytree.tree_flatten(tuple(args))
    with torch.enable_grad():
        for index in wanted:
            leaves[index] = _own_input(leaves[index], create_graph)
        outputs = pytree.tree_leaves(function(*pytree.tree_unflatten(leaves, spec)))
        pairs = [
            (output, grad)
            for output, grad in zip(outputs, grad_outputs, strict=True)
            if grad is not None and isinstance(output, torch.Tensor) and output.requires_grad
        ]
        if not pairs:
            return [None] * len(wanted)
        gradients = torch.autograd.grad(
            [output for output, _ in pairs],
            [leaves[index] for index in wanted],
            [grad for _, grad in pairs],
            allow_unused=True,
            create_graph=create_graph,
        )
    return list(gradients)


def _own_input(value: torch.Tensor, connected: bool) -> torch.Tensor:
    """Give an alias at which the backward pass stops; ``connected`` if a later one must go on beyond it."""
    return value.view_as(value) if connected and value.requires_grad else value.detach().requires_grad_()
