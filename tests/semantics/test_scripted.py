"""Scripted, traced and compiled code, functions that ask for overrides, and operators of `torch.library` (S9)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function_unary

import koila

BUDGETS = [{}, {"chunk_size": 2}, {"allowed": 1 << 20}]

pytestmark = [
    pytest.mark.semantics("S9"),
    # TorchScript is deprecated; people have it.
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


@pytest.fixture(params=BUDGETS, ids=["whole", "chunks", "bytes"])
def budget(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    yield
    torch.compiler.reset()


def data() -> torch.Tensor:
    return torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def counters(prefix: str) -> list[str]:
    return [name for name in koila.metrics.counter_names() if name.startswith(prefix)]


class Net(nn.Module):
    """A linear layer, batch normalisation, and a choice that depends on the mode."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm, self.head = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.linear(x))))


def train(net: Callable[..., torch.Tensor], module: nn.Module, x: torch.Tensor, budget: Any) -> list[torch.Tensor]:
    """Four steps: TorchScript optimises after the first ones."""
    losses = []
    for _ in range(4):
        module.zero_grad()
        with koila.budget(**budget):
            loss = F.cross_entropy(net(x * 2), torch.arange(7) % 3)
            loss.backward()
        losses.append(torch.tensor(loss.item(), dtype=torch.float64))
    state = [*module.buffers(), *(p.grad for p in module.parameters())]
    return [*losses, *state]  # type: ignore[list-item]


def check_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for mine, eager in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, eager, rtol=1e-11, atol=1e-14)


# TorchScript.


@pytest.mark.parametrize("compiled", ["script", "trace"])
def test_scripted_and_traced_modules_train(compiled: str, budget: Any) -> None:
    def make(net: nn.Module) -> nn.Module:
        return torch.jit.script(net) if compiled == "script" else torch.jit.trace(net, data(), check_trace=False)

    eager, mine = make(Net()), make(Net())
    expected = train(eager, eager, data(), {})
    koila.metrics.reset()
    check_equal(train(mine, mine, koila.lazy(data()), budget), expected)
    assert counters("eager::") == ["eager::script forward"]
    assert counters("eager_because::") == ["eager_because::code compiled by TorchScript"]


def test_a_scripted_function_keeps_the_gradient_of_what_it_is_given(budget: Any) -> None:
    script = torch.jit.script(_activation)
    for _ in range(4):
        eager, mine = nn.Linear(4, 3).double(), nn.Linear(4, 3).double()
        mine.load_state_dict(eager.state_dict())
        script(eager(data())).sum().backward()
        with koila.budget(**budget):
            script(mine(koila.lazy(data()))).sum().backward()
        torch.testing.assert_close(mine.weight.grad, eager.weight.grad)


def _activation(x: torch.Tensor) -> torch.Tensor:
    return x.relu() * 2 + x.mean(0)


def test_a_lazy_tensor_is_an_example_for_a_trace() -> None:
    traced = torch.jit.trace(lambda x: x.sin() * 2, koila.lazy(data()))
    assert torch.equal(traced(data()), data().sin() * 2)
    assert torch.equal(koila.run(traced(koila.lazy(data()))), data().sin() * 2)
    module = torch.jit.trace(Net().eval(), koila.lazy(data()))
    assert torch.equal(module(data()), Net().eval()(data()))


def test_factories_that_make_leaves_give_real_ones(budget: Any) -> None:
    """An output that requires grad although no argument does: it runs at the call."""
    with koila.budget(**budget):
        made = torch.ones_like(koila.lazy(data()), requires_grad=True)
        (made * 3).sum().backward()
    assert made.grad is not None and made.grad.tolist() == [[3.0] * 4] * 7


# torch.compile.


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_modules_are_recorded_and_say_so(backend: str, budget: Any) -> None:
    eager, mine = Net(), Net()
    expected = train(eager, eager, data(), {})
    compiled = torch.compile(mine, backend=backend)
    koila.metrics.reset()
    check_equal(train(compiled, mine, koila.lazy(data()), budget), expected)
    assert counters("compiled code is not used") == ["compiled code is not used: recorded instead"]


def test_dynamo_compiles_nothing_of_koila() -> None:
    graphs: list[list[str]] = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        calls = [str(node.target) for node in module.graph.nodes if node.op.startswith("call")]
        graphs.extend([calls] if calls else [])  # Reading a module's statistics is a graph without a call.
        return module

    net = Net().eval()
    compiled = torch.compile(lambda x: net(x).sin() * 2 if x.shape[0] > 3 else x, backend=backend)
    with koila.budget(chunk_size=2):
        found = koila.run(compiled(koila.lazy(data())))
        assert compiled(koila.lazy(data())).sum().item() == pytest.approx((net(data()).sin() * 2).sum().item())
    assert graphs == []
    torch.testing.assert_close(found, net(data()).sin() * 2)
    torch.testing.assert_close(compiled(data()), net(data()).sin() * 2)  # Real tensors use the compiled code as ever.
    assert len(graphs) == 1


def test_a_run_inside_of_compiled_code_is_not_compiled() -> None:
    graphs: list[Any] = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(module)
        return module

    compiled = torch.compile(lambda x: x * x.sum().item(), backend=backend)
    with koila.budget(chunk_size=2):
        found = koila.run(compiled(koila.lazy(data()) * 2))
    torch.testing.assert_close(found, data() * 2 * (data() * 2).sum())
    assert graphs == []


# Functions of the user's own.


calls: list[tuple[str, tuple[int, ...]]] = []


def overridable(x: torch.Tensor) -> torch.Tensor:
    if has_torch_function_unary(x):
        return handle_torch_function(overridable, (x,), x)
    calls.append((type(x).__name__, tuple(x.shape)))
    return x * len(calls)


def test_a_function_that_asks_for_overrides_runs_at_its_call(budget: Any) -> None:
    for expected in (1, 2, 3):
        w = torch.ones(4, dtype=torch.float64, requires_grad=True)
        with koila.budget(**budget):
            overridable(koila.lazy(data()) * w).sum().backward()
        torch.testing.assert_close(w.grad, data().sum(0) * expected)
    assert calls == [("Tensor", (7, 4))] * 3
    calls.clear()


# Operators of torch.library.


seen: list[tuple[int, ...]] = []


@torch.library.custom_op("koila_semantics::scale", mutates_args=())
def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    seen.append(tuple(x.shape))
    return x * factor


@torch.library.custom_op("koila_semantics::shapeless", mutates_args=())
def shapeless(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.library.custom_op("koila_semantics::add_one_", mutates_args={"x"})
def add_one_(x: torch.Tensor) -> None:
    x.add_(1)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.factor = inputs[1]


scale.register_fake(lambda x, factor: torch.empty_like(x))
scale.register_autograd(lambda ctx, gradient: (gradient * ctx.factor, None), setup_context=_setup)
shapeless.register_autograd(lambda ctx, gradient: gradient * 2)


def _written(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    add_one_(y)
    return y


class UsesOperator(torch.autograd.Function):
    """A Function that calls an operator of a library."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return scale(x, 3.0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.ops.koila_semantics.scale(gradient, 3.0)


OPERATORS: dict[str, Callable[..., torch.Tensor]] = {
    "a custom operator": lambda x: scale(x, 3.0),
    "the operator by name": lambda x: torch.ops.koila_semantics.scale(x, 3.0),
    "without shapes": lambda x: shapeless(x),
    "in place": _written,
    "in a Function": UsesOperator.apply,
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_of_a_library(name: str, budget: Any) -> None:
    def gradients(x: torch.Tensor) -> list[torch.Tensor]:
        net = Net()
        loss = OPERATORS[name](net.linear(x)).sigmoid().mean()
        loss.backward()
        return [torch.tensor(loss.item(), dtype=torch.float64), *(p.grad for p in net.linear.parameters())]  # type: ignore[list-item]

    expected = gradients(data())
    seen.clear()
    with koila.budget(**budget):
        check_equal(gradients(koila.lazy(data())), expected)
    assert seen == [] or set(seen) == {(7, 5)}
