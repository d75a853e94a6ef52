"""Small graphs, modules and backends that the tests of the delegates share.

Takes: nothing.
Gives: lowered modules and the eager functions that they must equal.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from koila.delegates import CompileSpec, LoweredBackendModule, Processed, call_delegate, to_backend
from koila.delegates.backends.eager import EagerBackend
from koila.delegates.gradient import recompute_gradients


def double(*shape: int, requires_grad: bool = False) -> torch.Tensor:
    """Give a random float64 tensor."""
    return torch.randn(*shape, dtype=torch.float64, requires_grad=requires_grad)


def lower(function: Callable[..., Any], *args: Any, backend_id: str = "eager") -> LoweredBackendModule:
    """Trace a function of tensors to ATen and lower it."""
    return to_backend(backend_id, make_fx(function)(*args), args)


def layer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Give a linear layer with tanh."""
    return torch.tanh(torch.addmm(bias, x, weight))


def gradients(function: Callable[..., torch.Tensor], args: Sequence[Any]) -> list[torch.Tensor | None]:
    """Give the gradients of a weighted sum of the result for the tensors among the arguments that require one."""
    wanted = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.requires_grad]
    out = function(*args)
    weights = torch.arange(1.0, out.numel() + 1, dtype=out.dtype).reshape(out.shape)
    return list(torch.autograd.grad((out * weights).sum(), wanted, allow_unused=True))


def assert_close(actual: object, expected: object) -> None:
    """Assert equality up to Rule 1's tolerance for float64."""
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def num_delegate_calls(graph_module: torch.fx.GraphModule) -> int:
    """Count the nodes that call a delegate."""
    return sum(node.target is call_delegate for node in graph_module.graph.nodes)


class MLP(torch.nn.Module):
    """Two linear layers in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 8, dtype=torch.float64)
        self.second = torch.nn.Linear(8, 3, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


class Around(torch.nn.Module):
    """A lowered module between ordinary operators."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x * 2) + 1


class CountingBackend(EagerBackend):
    """An eager backend that counts its calls."""

    backend_id = "counting"

    def __init__(self) -> None:
        self.num_executed = 0

    def execute(self, processed: Processed, *args: Any) -> Any:
        self.num_executed += 1
        return super().execute(processed, *args)


class BackwardBackend(CountingBackend):
    """A backend with a backward pass of its own."""

    backend_id = "backward"

    def __init__(self) -> None:
        super().__init__()
        self.num_backward = 0

    def backward(
        self,
        processed: Processed,
        args: Sequence[Any],
        grad_outputs: Sequence[torch.Tensor | None],
        wanted: Sequence[int],
    ) -> list[torch.Tensor | None]:
        self.num_backward += 1
        return recompute_gradients(processed.program, args, grad_outputs, wanted)


class PickyBackend(EagerBackend):
    """A backend that takes matrix products only."""

    backend_id = "picky"

    def supports(self, node: torch.fx.Node) -> bool:
        return "mm" in node.name

    def preprocess(self, graph_module: torch.fx.GraphModule, compile_specs: Sequence[CompileSpec]) -> Processed:
        return super().preprocess(graph_module, ())
