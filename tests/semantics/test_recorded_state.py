"""All that a call reads beside its arguments is that of the time of recording."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import koila
from koila._torch import RunMode
from tests.semantics.modes import MODES, Scope, assert_same, plain

pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")  # PyTorch's own switch warns.


@contextmanager
def _set(change: Callable[[Any], None], before: Any, after: Any) -> Iterator[None]:
    change(after)
    try:
        yield
    finally:
        change(before)


def _allow_tf32(flag: bool) -> None:
    with torch.backends.__allow_nonbracketed_mutation():  # PyTorch's own test tools forbid the plain way, once loaded.
        torch.backends.cudnn.allow_tf32 = flag


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


STATES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "no_grad": (torch.no_grad, torch.is_grad_enabled),
    "default dtype": (
        lambda: _set(torch.set_default_dtype, torch.float32, torch.float64),
        torch.get_default_dtype,
    ),
    "deterministic": (lambda: _set(torch.use_deterministic_algorithms, False, True), _deterministic),
    "deterministic, warns": (
        lambda: _set(lambda mode: torch.use_deterministic_algorithms(mode > 0, warn_only=mode > 1), 0, 2),
        _deterministic,
    ),
    "matmul precision": (
        lambda: _set(torch.set_float32_matmul_precision, "highest", "medium"),
        torch.get_float32_matmul_precision,
    ),
    "TF32": (lambda: _set(_allow_tf32, True, False), lambda: torch.backends.cudnn.allow_tf32),
    "fp32_precision": (
        lambda: _set(lambda value: setattr(torch.backends.mkldnn.conv, "fp32_precision", value), "none", "bf16"),
        lambda: torch.backends.mkldnn.conv.fp32_precision,
    ),
    "oneDNN": (lambda: torch.backends.mkldnn.flags(enabled=False), lambda: torch.backends.mkldnn.enabled),
    "attention": (lambda: sdpa_kernel(SDPBackend.MATH), torch.backends.cuda.flash_sdp_enabled),
    "anomaly": (lambda: torch.autograd.set_detect_anomaly(True), torch.is_anomaly_enabled),
}
"""For each state, a scope that changes it and what reads it."""


class Probe(RunMode):
    """Reads a state whenever numbers are added."""

    def __init__(self, read: Callable[[], Any]) -> None:
        super().__init__()
        self.read = read
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add.Tensor:
            self.seen.append(self.read())
        return func(*args, **(kwargs or {}))


@pytest.mark.asks_laziness("the call runs later than it is recorded")
@pytest.mark.semantics("S15")
@pytest.mark.parametrize("name", STATES)
def test_a_late_call_finds_the_state_of_its_recording(name: str) -> None:
    scope, read = STATES[name]
    outside = read()
    with scope():
        inside = read()
        value = koila.lazy(torch.zeros(3)) + 1
    assert inside != outside
    with Probe(read) as probe:
        assert torch.equal(value.run(), torch.ones(3))
    assert probe.seen == [inside]
    assert read() == outside
    with scope():
        value = koila.lazy(torch.zeros(3)) + 1
        value = value * 2
    outer = value + 1
    with Probe(read) as probe:
        assert torch.equal(outer.run(), torch.full((3,), 3.0))
    assert probe.seen == [inside, outside]


@pytest.mark.semantics("S15")
@MODES
def test_autocast_of_the_time_of_recording(scope: Scope) -> None:
    def run(lazy: Any) -> list[Any]:
        torch.manual_seed(0)
        net, x = nn.Linear(4, 4), torch.randn(7, 4)
        with torch.autocast("cpu", torch.bfloat16):
            inside = net(lazy(x))
        outside = net(lazy(x))
        (inside.float() + outside).sum().backward()
        return [inside.detach() + 0, outside.detach() + 0, net.bias.grad]

    wanted = run(plain)
    with scope():
        found = run(koila.lazy)
        assert [tensor.dtype for tensor in found] == [torch.bfloat16, torch.float32, torch.float32]
        assert_same(found[1:], wanted[1:])
        assert torch.equal(koila.run(found[0]), wanted[0])


@pytest.mark.semantics("S15")
@MODES
def test_settings_of_kernels_that_changed_in_between_are_respected(scope: Scope) -> None:
    def loss_of(lazy: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net, x = nn.Conv1d(3, 4, 3), torch.randn(7, 3, 8)
        with torch.backends.mkldnn.flags(enabled=False):
            loss = net(lazy(x)).square().sum()
        loss.backward()
        return [loss.detach() + 0, *(parameter.grad for parameter in net.parameters())]  # type: ignore[misc]

    wanted = loss_of(plain)
    with scope():
        found = [koila.run(tensor) for tensor in loss_of(koila.lazy)]
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def _layer(x: torch.Tensor, module: nn.Module) -> torch.Tensor:
    return module(x)


def _attention(x: torch.Tensor, module: nn.Module) -> torch.Tensor:
    found, weights = module(x, x, x)
    return found.sum(-1) + weights.sum(-1)


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[..., torch.Tensor]]] = {
    "layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True), _layer),
    "layer, norm first, gelu": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.5, "gelu", batch_first=True, norm_first=True),
        _layer,
    ),
    "encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.5, batch_first=True), 2, nn.LayerNorm(8)),
        _layer,
    ),
    "attention": (lambda: nn.MultiheadAttention(8, 2, 0.5, batch_first=True), _attention),
}


@pytest.mark.semantics("S15")
@MODES
@pytest.mark.parametrize("name", MODULES)
def test_eval_then_train(name: str, scope: Scope) -> None:
    """The usual end of a validation loop: what was computed in `eval()` is asked for after `train()`."""
    make, call = MODULES[name]
    torch.manual_seed(0)
    module, x = make().double().eval(), torch.randn(7, 5, 8, dtype=torch.float64)
    with torch.no_grad(), scope():
        wanted, found = call(x, module), call(koila.lazy(x), module)
        assert isinstance(found, koila.LazyTensor)
        module.train()
        state = torch.get_rng_state()
        assert_same(found.run(), wanted)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.semantics("S15")
@MODES
def test_train_then_eval(scope: Scope) -> None:
    """Dropout and batch normalisation that were recorded in `train()` run so after `eval()`."""

    def step(lazy: Any) -> list[Any]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4), nn.Dropout(0.5)).double()
        loss = net(lazy(torch.randn(7, 4, dtype=torch.float64))).square().sum()
        net.eval()
        loss.backward()
        return [*(p.grad for p in net.parameters()), *net.buffers(), torch.get_rng_state().double()]

    with scope():
        found = step(koila.lazy)
    assert_same(found, step(plain))


@pytest.mark.semantics("S15", "S12")
@MODES
@pytest.mark.parametrize("masks", [("key",), ("attention",), ("key", "attention")], ids="+".join)
def test_fused_modules_with_masks_and_hooks(masks: tuple[str, ...], scope: Scope) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).double().eval()
    encoder = nn.TransformerEncoder(layer, 2).eval()
    x, padding = torch.randn(7, 5, 8, dtype=torch.float64), torch.arange(5) >= torch.tensor([[5, 4, 3, 5, 2, 1, 5]]).T
    causal = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
    options = {"src_key_padding_mask": padding if "key" in masks else None}
    mask = causal if "attention" in masks else None
    seen: list[int] = []
    with torch.no_grad(), scope(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*nested tensors.*")
        for hooked in (False, True):
            if hooked:
                layer.linear1.register_forward_hook(lambda module, args, result: seen.append(result.dim()))
            assert_same(layer(koila.lazy(x), mask, **options), layer(x, mask, **options))
            assert_same(encoder(koila.lazy(x), mask, **options), encoder(x, mask, **options))
    assert seen == [3, 3]  # Once for each call of the layer.


@pytest.mark.semantics("S9")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("how", ["compile", "script", "trace"])
def test_compilers_take_fused_modules_as_without_koila(how: str) -> None:
    koila.lazy(torch.ones(2))  # Whatever koila patches is patched now.
    torch.manual_seed(0)
    module, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), torch.randn(3, 5, 8)
    with torch.no_grad():
        made: Any = {
            "compile": lambda: torch.compile(module, backend="eager", fullgraph=True),
            "script": lambda: torch.jit.script(module),
            "trace": lambda: torch.jit.trace(module, x),
        }[how]()
        assert_same(made(x), module(x))


@pytest.mark.semantics("S15")
@MODES
def test_anomaly_mode(scope: Scope) -> None:
    """No inner error while planning; eager's gradients, eager's error, and the user's line in what it says."""

    def run(lazy: Any, offset: float) -> torch.Tensor | None:
        w = torch.ones(4, dtype=torch.float64, requires_grad=True)
        with torch.autograd.set_detect_anomaly(True):
            (lazy(torch.zeros(7, 4, dtype=torch.float64) + offset) * w - offset).sum().sqrt().mul(0).backward()
        return w.grad

    said = pytest.warns(UserWarning, match=r"Error detected in SqrtBackward0[\s\S]*test_recorded_state.py")
    with scope(), said, pytest.raises(RuntimeError, match="SqrtBackward0' returned nan"):
        run(koila.lazy, 1.0)
    with torch.autograd.set_detect_anomaly(True), scope():
        w = torch.ones(4, dtype=torch.float64, requires_grad=True)
        (koila.lazy(torch.ones(7, 4, dtype=torch.float64)) * w).sum().sqrt().backward()
    assert_same(w.grad, torch.full((4,), 3.5 / 28**0.5, dtype=torch.float64))
