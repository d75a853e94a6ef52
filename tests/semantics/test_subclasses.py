"""S4: tensors of other classes beside lazy ones mean more than their data: their calls run eagerly, and are counted."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

import koila

pytestmark = pytest.mark.semantics("S4")
BUDGETS: list[dict[str, Any]] = [{}, {"chunk_size": 2}, {"allowed": "1MiB"}]


def data(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Quantised(torch.Tensor):
    """Whole numbers and a scale, which look like a tensor of floats: what torchao's weights are."""

    numbers: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, numbers: torch.Tensor, scale: torch.Tensor) -> Quantised:
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scale.dtype, device=numbers.device)

    def __init__(self, numbers: torch.Tensor, scale: torch.Tensor) -> None:
        self.numbers, self.scale = numbers, scale

    @classmethod
    def of(cls, weight: torch.Tensor) -> Quantised:
        scale = weight.detach().abs().max() / 127
        return cls((weight.detach() / scale).round().to(torch.int8), scale)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].numbers, args[0].scale)
        real = lambda t: t.numbers.to(t.scale.dtype) * t.scale if isinstance(t, cls) else t  # noqa: E731
        return func(*tree_map(real, args), **tree_map(real, kwargs or {}))


class Tagged(torch.Tensor):
    """A class without code of its own: results of its calls are of the class."""


class Logged(torch.Tensor):
    """A class that sees functions: it doubles every sum."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*tree_map(_unlogged, args), **(kwargs or {}))
        return result * 2 if func in (torch.add, torch.Tensor.add) else result


def _unlogged(leaf: Any) -> Any:
    return leaf.as_subclass(torch.Tensor) if isinstance(leaf, Logged) else leaf


def equal(found: Any, expected: Any) -> None:
    torch.testing.assert_close(koila.run(found).detach(), expected.detach(), rtol=1e-10, atol=1e-12)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def quantised() -> nn.Sequential:
    found = model()
    for layer in (found[0], found[2]):
        layer.weight = nn.Parameter(Quantised.of(layer.weight), requires_grad=False)
    return found


def counted(kind: str) -> int:
    return koila.metrics.counter_value(f"eager_because::an operand of class {kind}")


@pytest.mark.parametrize("budget", BUDGETS)
def test_quantised_weights(budget: dict[str, Any]) -> None:
    net = quantised()
    expected = net(data(7, 4))
    with koila.budget(**budget), torch.no_grad():
        equal(net(koila.lazy(data(7, 4))), expected)
    assert counted("Quantised") == 2


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_frozen_quantised_base_with_an_adapter(budget: dict[str, Any]) -> None:
    def gradients(wrap: Callable[[torch.Tensor], Any]) -> list[torch.Tensor]:
        base, adapter = quantised().requires_grad_(False), model()
        x = wrap(data(7, 4))
        (base(x) + adapter(x)).square().mean().backward()
        return [p.grad for p in adapter.parameters() if p.grad is not None]

    expected = gradients(lambda x: x)
    with koila.budget(**budget):
        found = gradients(koila.lazy)
    assert len(found) == len(expected) == 4
    for mine, theirs in zip(found, expected, strict=True):
        equal(mine, theirs)


@pytest.mark.parametrize("budget", BUDGETS)
def test_gradients_flow_through_a_quantised_weight(budget: dict[str, Any]) -> None:
    def gradient(wrap: Callable[[torch.Tensor], Any]) -> torch.Tensor:
        scale = data(4, seed=1).requires_grad_()
        quantised()(wrap(data(7, 4)) * scale).square().sum().backward()
        assert scale.grad is not None
        return scale.grad

    expected = gradient(lambda x: x)
    with koila.budget(**budget):
        equal(gradient(koila.lazy), expected)


@pytest.mark.parametrize("budget", BUDGETS)
def test_results_keep_their_class(budget: dict[str, Any]) -> None:
    tagged = data(7, 4, seed=1).as_subclass(Tagged)
    with koila.budget(**budget):
        x = koila.lazy(data(7, 4))
        for mine, theirs in ((x * tagged, data(7, 4) * tagged), (tagged * x, tagged * data(7, 4))):
            assert type(mine) is Tagged or isinstance(mine, koila.LazyTensor)
            equal(torch.Tensor.as_subclass(koila.run(mine), torch.Tensor), theirs.as_subclass(torch.Tensor))
    assert counted("Tagged") == 2


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_class_that_sees_functions_sees_them(budget: dict[str, Any]) -> None:
    logged = data(7, 4, seed=1).as_subclass(Logged)
    with koila.budget(**budget):
        equal(torch.add(koila.lazy(data(7, 4)) * 1, logged), torch.add(data(7, 4), logged))
        equal(torch.add(logged, koila.lazy(data(7, 4))), torch.add(logged, data(7, 4)))


@pytest.mark.parametrize("budget", BUDGETS)
def test_nested_tensors(budget: dict[str, Any]) -> None:
    weight = data(4, 4)
    for layout in (torch.strided, torch.jagged):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nested = torch.nested.nested_tensor([data(2, 4), data(3, 4)], layout=layout)
            assert koila.lazy(nested) is nested
            with koila.budget(**budget):
                found = nn.functional.linear(nested, koila.lazy(weight) * 2)
            expected = nn.functional.linear(nested, weight * 2)
            assert found.is_nested
            for mine, theirs in zip(found.unbind(), expected.unbind(), strict=True):
                equal(mine, theirs)


@pytest.mark.parametrize("budget", BUDGETS)
def test_masked_tensors(budget: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        masked = torch.masked.masked_tensor(data(7, 4, seed=1), data(7, 4, seed=1) > 0)
        expected = (data(7, 4) * 2 + masked).sum(0)
        with koila.budget(**budget):
            found = ((koila.lazy(data(7, 4)) * 2) + masked).sum(0)
            other = (masked + koila.lazy(data(7, 4)) * 2).sum(0)
        for mine in (found, other):
            assert type(mine) is type(expected)
            equal(mine.get_data(), expected.get_data())
            assert torch.equal(koila.run(mine.get_mask()), expected.get_mask())


def test_a_distributed_tensor_is_not_taken_for_a_plain_one() -> None:
    tensor = pytest.importorskip("torch.distributed.tensor")
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        weight = tensor.distribute_tensor(data(4, 4), mesh, [tensor.Replicate()])
        with pytest.warns(koila.KoilaWarning, match="run eagerly"):
            assert koila.lazy(weight) is weight
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor") as eager:
            data(7, 4) @ weight
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor") as lazy:
            koila.lazy(data(7, 4)) @ weight
        assert type(lazy.value) is type(eager.value)
        x = tensor.distribute_tensor(data(7, 4), mesh, [tensor.Replicate()])
        equal((x @ weight).full_tensor(), data(7, 4) @ data(4, 4))
    finally:
        dist.destroy_process_group()


def test_a_write_into_another_class_runs_what_reads_it() -> None:
    tagged, x = data(7, 4, seed=1).as_subclass(Tagged), koila.lazy(data(7, 4))
    before = x + 1
    tagged.add_(x)
    equal(before, data(7, 4) + 1)
    equal(tagged.as_subclass(torch.Tensor), data(7, 4, seed=1) + data(7, 4))


@pytest.mark.asks_laziness("it asks whether the value is pending")
def test_parameters_and_buffers_are_plain() -> None:
    weight, buffer = nn.Parameter(data(4)), nn.Buffer(data(4))
    found = koila.lazy(data(7, 4)) * weight + buffer
    assert "pending" in repr(found)
    equal(found, data(7, 4) * weight + buffer)
    assert not [name for name in koila.metrics.counter_names() if name.startswith("eager")]
