"""User-defined `autograd.Function`s: traced where their code is shown to be pure, else run at their call (S9, S13)."""

from __future__ import annotations

import gc
import importlib
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

import koila
from koila._torch.functions import IMPURE_FUNCTIONS
from koila.capture.purity import verdict_on
from koila.errors import CaptureError, StaleInputError

BUDGETS = [{}, {"chunk_size": 2}, {"allowed": 1 << 20}]
LIMIT = 2.0
log: list[str] = []
coefficient = 1.0
settings = {"scale": 2.0}


@pytest.fixture(autouse=True)
def empty_log() -> Iterator[None]:
    yield
    log.clear()


@pytest.fixture(params=BUDGETS, ids=["whole", "chunks", "bytes"])
def budget(request: pytest.FixtureRequest) -> Any:
    return request.param


def data() -> torch.Tensor:
    return torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4)).double()


def reason(function: type[Function]) -> str | None:
    return verdict_on(function).impure


def gradients(function: type[Function], x: torch.Tensor, *rest: Any) -> list[torch.Tensor]:
    """A program with something before and after the Function."""
    net = make_net()
    loss = (function.apply(net(x), *rest) * 3).sigmoid().mean()
    loss.backward()
    value = torch.tensor(loss.item(), dtype=torch.float64)
    return [value, *(parameter.grad for parameter in net.parameters())]  # type: ignore[list-item]


def check_equal(function: type[Function], budget: dict[str, Any], *rest: Any) -> None:
    expected = gradients(function, data(), *rest)
    with koila.budget(**budget):
        found = gradients(function, koila.lazy(data()), *rest)
    for mine, eager in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, eager, rtol=1e-12, atol=1e-14)


def counters(prefix: str) -> list[str]:
    return [name for name in koila.metrics.counter_names() if name.startswith(prefix)]


# State that a Function reads.


class Scale(Function):
    """Its coefficient is a class attribute, as of a gradient reversal that is annealed."""

    alpha = 1.0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * Scale.alpha

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -Scale.alpha * gradient


@pytest.mark.semantics("S13")
def test_a_function_reads_python_state_at_its_call_and_at_its_backward(budget: Any) -> None:
    w = torch.ones(3, requires_grad=True, dtype=torch.float64)
    x = torch.ones(4, 3, dtype=torch.float64)
    with koila.budget(**budget):
        Scale.alpha = 1.0
        recorded = Scale.apply(koila.lazy(x) * w).sum()
        Scale.alpha = 5.0
        assert recorded.item() == 12.0
        for Scale.alpha in (1.0, 2.0, 3.0):
            w.grad = None
            Scale.apply(koila.lazy(x) * w).sum().backward()
            assert w.grad is not None and w.grad.tolist() == [-4 * Scale.alpha] * 3
        Scale.alpha = 1.0
        w.grad = None
        loss = Scale.apply(koila.lazy(x) * w).sum()
        Scale.alpha = 7.0  # Eager's backward reads it when it runs.
        loss.backward()
        assert w.grad is not None and w.grad.tolist() == [-28.0] * 3


class Counted(Function):
    """It writes down when it is called, and with what."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        log.append(f"forward {type(x).__name__} {tuple(x.shape)}")
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        log.append(f"backward {type(gradient).__name__} {tuple(gradient.shape)}")
        return gradient * 3


@pytest.mark.semantics("S13")
def test_an_impure_function_runs_once_per_step_on_real_tensors_and_is_counted(budget: Any) -> None:
    expected = gradients(Counted, data())
    for _ in range(3):
        log.clear()
        koila.metrics.reset()
        with koila.budget(**budget):
            found = gradients(Counted, koila.lazy(data()))
        assert log == ["forward Tensor (7, 4)", "backward Tensor (7, 4)"]
        assert counters("eager::") == ["eager::Counted.apply"]
        assert counters("eager_because::a Function that is not known to be pure: Counted.forward reads log")
        for mine, eager in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, eager, rtol=1e-12, atol=1e-14)


@pytest.mark.semantics("S13")
def test_what_comes_before_and_after_an_impure_function_is_still_cut() -> None:
    koila.metrics.reset()
    with koila.budget(chunk_size=2):
        gradients(Counted, koila.lazy(data()))
    assert koila.metrics.counter_value("runs::split") == 2 and counters("runs::whole") == []
    assert counters("fallback::") == []


class ReadsData(Function):
    """Its backward looks at values."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 2 * (1 if float(x.abs().max()) > 0 else 0)


class BranchesOnData(ReadsData):
    """The same, in a way that its code does not show."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 5 if x.abs().max() > 0 else gradient


class Noise(Function):
    """Random numbers in both directions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * torch.rand_like(gradient)


class Catches(Function):
    """A trace raises where eager does not, and it would go on with that."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        try:
            return x * 2 if x.abs().sum() > 0 else x
        except Exception:
            return x * 100

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class InPlace(Function):
    """It writes to its argument."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(settings["scale"])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * settings["scale"]


class Two(Function):
    """Two results, one of integers."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        log.append("Two")
        index = x.argmax(1)
        ctx.mark_non_differentiable(index)
        return x.exp(), index

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> torch.Tensor:
        return gradient.tanh()


@pytest.mark.semantics("S13")
@pytest.mark.parametrize("function", [ReadsData, BranchesOnData, Noise, Catches, InPlace])
def test_functions_that_no_trace_can_follow_are_exact(function: type[Function], budget: Any) -> None:
    torch.manual_seed(1)
    expected = gradients(function, data())
    state = torch.get_rng_state()
    for _ in range(2):
        torch.manual_seed(1)
        with koila.budget(**budget):
            found = gradients(function, koila.lazy(data()))
        assert torch.equal(torch.get_rng_state(), state)
        for mine, eager in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, eager, rtol=1e-12, atol=1e-14)


@pytest.mark.semantics("S13")
def test_several_results_of_an_impure_function(budget: Any) -> None:
    def program(x: torch.Tensor) -> list[torch.Tensor]:
        net = make_net()
        y, index = Two.apply(net(x))
        loss = F.nll_loss(F.log_softmax(y, 1), index) + y.mean()
        loss.backward()
        return [loss.detach(), index, *(p.grad for p in net.parameters())]  # type: ignore[list-item]

    expected = program(data())
    with koila.budget(**budget):
        found = koila.run(program(koila.lazy(data())))
    for mine, eager in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, eager, rtol=1e-12, atol=1e-14)


class Appends(Function):
    """It leaves something in a list that it is given."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: list[int]) -> torch.Tensor:
        seen.append(x.shape[0])
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * 2, None


@pytest.mark.semantics("S13")
def test_a_function_may_write_to_a_list_that_it_is_given(budget: Any) -> None:
    seen: list[int] = []
    check_equal(Appends, budget, seen)
    assert seen == [7, 7]


class Holder:
    """An object that a Function is given."""

    factor = 2.0


class ByObject(Function):
    """It reads an object's state."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, holder: Any) -> torch.Tensor:
        ctx.holder = holder
        return x * holder.factor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.holder.factor, None


@pytest.mark.semantics("S13")
def test_a_function_reads_an_object_that_changes(budget: Any) -> None:
    holder = Holder()
    for holder.factor in (2.0, 3.0, 4.0):
        check_equal(ByObject, budget, holder)


# Names that are rebound.


def make_by_closure() -> tuple[type[Function], Callable[[float], None]]:
    factor = 2.0

    def change(value: float) -> None:
        nonlocal factor
        factor = value

    class ByClosure(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * factor

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * factor

    return ByClosure, change


@pytest.mark.semantics("S13")
def test_a_constant_of_an_enclosing_function_is_noticed_when_it_changes(budget: Any) -> None:
    function, change = make_by_closure()
    assert reason(function) is None
    for value in (2.0, 3.0, 4.0):
        change(value)
        check_equal(function, budget)
    assert reason(function) == "ByClosure.forward reads factor, which may be rebound"


class Limited(Function):
    """It reads a constant of its module."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clamp(max=LIMIT) * LIMIT

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * LIMIT


@pytest.mark.asks_laziness("the constant changes while the call is pending")
@pytest.mark.semantics("S13", "S18")
def test_a_constant_that_changes_while_a_call_is_pending_is_an_error(
    budget: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if hasattr(Limited, "__koila_purity__"):
        delattr(Limited, "__koila_purity__")
    check_equal(Limited, budget)
    pending = Limited.apply(koila.lazy(data()))
    monkeypatch.setattr(f"{__name__}.LIMIT", 3.0)
    with (
        koila.budget(**budget),
        pytest.raises(StaleInputError, match=r"LIMIT, which Limited\.apply reads, was rebound"),
    ):
        pending.sum().item()
    check_equal(Limited, budget)  # From now on it is taken for a variable.
    assert reason(Limited) == "Limited.forward reads LIMIT, which may be rebound"


@pytest.mark.semantics("S13", "S18")
def test_gradients_that_were_computed_ahead_are_not_used_after_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    if hasattr(Limited, "__koila_purity__"):
        delattr(Limited, "__koila_purity__")
    w = torch.ones(4, dtype=torch.float64, requires_grad=True)
    with koila.budget(chunk_size=2):
        for _ in range(2):  # The second time the gradients come with the value.
            loss = Limited.apply(koila.lazy(data()) * w).sum()
            loss.item()
            loss.backward()
        loss = Limited.apply(koila.lazy(data()) * w).sum()
        loss.item()
        monkeypatch.setattr(f"{__name__}.LIMIT", 3.0)
        with pytest.raises(StaleInputError, match="LIMIT"):
            loss.backward()


def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class ByHelper(Function):
    """Its helper is replaced, as in a notebook."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return twice(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


@pytest.mark.semantics("S13")
def test_a_helper_that_is_replaced_is_followed_again(budget: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check_equal(ByHelper, budget)
    monkeypatch.setattr(f"{__name__}.twice", lambda x: x * 7)
    check_equal(ByHelper, budget)
    assert reason(ByHelper) is None
    monkeypatch.setattr(ByHelper, "backward", staticmethod(lambda ctx, gradient: gradient * 11))
    check_equal(ByHelper, budget)


# What is shown to be pure, and what is not.


def as_function(forward: Any, backward: Any = lambda ctx, gradient: gradient) -> type[Function]:
    return type("Fn", (Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})


def _helper(x: torch.Tensor, power: int = 2) -> torch.Tensor:
    return F.softplus(x) * math.sqrt(power)


def _loop(ctx: Any, x: torch.Tensor) -> torch.Tensor:
    ctx.save_for_backward(x)
    ctx.shape = x.shape
    if x.dim() != 2:
        raise ValueError(f"two dimensions, not {x.dim()}")
    out = torch.zeros_like(x)
    for row in range(x.shape[0]):
        out[row] = x[row] * 2
    return out


def _chosen(ctx: Any, *gradients: torch.Tensor) -> Any:
    return tuple(g * 2 if ctx.needs_input_grad[i] else None for i, g in enumerate(gradients))


def _scoped(ctx: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = x.exp()
    return torch.where(y > 1, y, x).clamp(min=torch.finfo(x.dtype).eps)


def _decorated(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 3


PURE: dict[str, Any] = {
    "operators": as_function(lambda ctx, x: torch.tanh(x) * 2),
    "helpers": as_function(lambda ctx, x: _helper(x)),
    "a constant": as_function(lambda ctx, x: x * math.pi),
    "loops, context, errors": as_function(_loop, _chosen),
    "grad mode": as_function(_scoped, once_differentiable(_decorated)),
    "autocast": as_function(
        torch.amp.custom_fwd(lambda ctx, x: x * 2, device_type="cpu"),
        torch.amp.custom_bwd(_decorated, device_type="cpu"),
    ),
    "an operator by name": as_function(lambda ctx, x: torch.ops.aten.mul.Tensor(x, x)),
    "other modules": as_function(lambda ctx, x: torch.fft.fft(torch.linalg.qr(x)[0]).real),
}


def _writes_global(ctx: Any, x: torch.Tensor) -> torch.Tensor:
    global coefficient
    coefficient = 2.0
    return x * 2


def _imports(ctx: Any, x: torch.Tensor) -> torch.Tensor:
    import os

    return x * len(os.sep)


def _marks(ctx: Any, x: torch.Tensor) -> torch.Tensor:
    x.marked = True  # type: ignore[attr-defined]
    return x * 2


def _remembers(x: torch.Tensor, seen: list[Any] = []) -> torch.Tensor:  # noqa: B006
    seen.append(x)
    return x


def _makes_text(ctx: Any, x: torch.Tensor) -> torch.Tensor:
    text = f"{x}"
    return x * 2 if "nan" in text else x


IMPURE: dict[str, tuple[Any, str]] = {
    "a global number": (lambda ctx, x: x * coefficient, "reads coefficient, which may be rebound"),
    "a global dict": (lambda ctx, x: x * settings["scale"], "reads settings, a dict"),
    "a class attribute": (lambda ctx, x: x * Holder.factor, "reads Holder, a type"),
    "a helper's helper": (lambda ctx, x: (lambda y: _remembers(y))(x), "_remembers has a default of type list"),
    "a write to a global": (_writes_global, "does store global coefficient"),
    "an import": (_imports, "does import name os"),
    "a write to a tensor's attribute": (_marks, "sets the attribute marked"),
    "data": (lambda ctx, x: x * x.max().item(), "uses .item, which reads data"),
    "data as a number": (lambda ctx, x: x * float(x.max()), "calls float"),
    "data as a text": (_makes_text, "makes a text"),
    "printing": (lambda ctx, x: (print(x), x)[1], "calls print"),
    "random numbers": (lambda ctx, x: x * torch.rand(1), "calls rand, which is not known to be pure"),
    "random numbers in place": (lambda ctx, x: torch.empty_like(x).normal_(), "draws random numbers"),
    "dropout": (lambda ctx, x: F.dropout(x), "not known to be pure"),
    "the type of a tensor": (lambda ctx, x: x if type(x) is torch.Tensor else x * 2, "calls type"),
    "getattr": (lambda ctx, x: getattr(torch, "rand")(2), "calls getattr"),  # noqa: B009
    "a module": (lambda ctx, x: nn.Linear(4, 4)(x), "reads Linear, a type"),
    "gradients": (lambda ctx, x: x.grad, "uses .grad, which reads gradients"),
    "data past autograd": (lambda ctx, x: x.data.mul_(2), "uses .data"),
    "threads": (lambda ctx, x: torch.set_num_threads(1), "calls set_num_threads"),
}


@pytest.mark.semantics("S13")
@pytest.mark.parametrize("name", PURE)
def test_pure_code_is_traced_and_exact(name: str, budget: Any) -> None:
    assert reason(PURE[name]) is None
    koila.metrics.reset()
    check_equal(PURE[name], budget)
    assert counters("eager::") == []


@pytest.mark.semantics("S13")
@pytest.mark.parametrize("name", IMPURE)
def test_code_that_is_not_shown_to_be_pure_says_what_it_does(name: str) -> None:
    forward, text = IMPURE[name]
    assert text in (reason(as_function(forward)) or "")
    assert text in (reason(as_function(lambda ctx, x: x, forward)) or "")


@pytest.mark.semantics("S13")
def test_the_table_knows_functions_of_pytorch_by_name() -> None:
    for path, text in IMPURE_FUNCTIONS.items():
        module, _, name = path.rpartition(".")
        function = getattr(importlib.import_module(module), name)
        assert issubclass(function, Function) and reason(function) == text


# What users declare.


def make_stateful() -> type[Function]:
    class Stateful(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * settings["scale"]

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * settings["scale"]

    return Stateful


@pytest.mark.semantics("S13")
def test_a_declared_function_is_traced(budget: Any) -> None:
    plain, declared = make_stateful(), koila.pure(make_stateful())
    koila.metrics.reset()
    check_equal(declared, budget)
    assert counters("eager::") == []
    check_equal(plain, budget)
    assert counters("eager::") == ["eager::Stateful.apply"]


@pytest.mark.semantics("S13")
def test_only_functions_can_be_declared() -> None:
    with pytest.raises(CaptureError, match=r"koila\.pure takes a subclass of torch\.autograd\.Function"):
        koila.pure(lambda x: x)  # type: ignore[arg-type]


@pytest.mark.semantics("S13")
def test_a_verdict_does_not_keep_a_function_alive() -> None:
    function = make_stateful()
    koila.pure(function)
    kept = [weakref.ref(function), weakref.ref(make_by_closure()[0])]
    del function
    gc.collect()
    assert [reference() for reference in kept] == [None, None]


@pytest.mark.asks_laziness("only a pending tensor would lose its gradient; eager takes it for a constant")
@pytest.mark.semantics("S13")
def test_a_lazy_tensor_from_outside_of_a_function_is_an_error() -> None:
    mask = koila.lazy(torch.ones(3)) * 2
    function = as_function(lambda ctx, x: x * mask)
    with pytest.raises(CaptureError, match="returned a lazy tensor that comes from outside"):
        function.apply(torch.ones(3, requires_grad=True))


# transformers' own.


@pytest.mark.semantics("S13")
def test_functions_of_transformers_stay_cut() -> None:
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    gemma = pytest.importorskip("transformers.models.recurrent_gemma.modeling_recurrent_gemma")
    assert reason(bloom.GeLUFunction) is None
    assert reason(gemma.SqrtBoundDerivative) is None
    koila.metrics.reset()
    check_equal(bloom.GeLUFunction, {"chunk_size": 2})
    assert counters("eager::") == [] and counters("runs::") == ["runs::split"]
