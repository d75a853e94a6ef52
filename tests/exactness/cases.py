"""One program, eagerly on the whole batch and through koila in chunks, from the same seed.

*Takes* a program, how to make its inputs from `Sizes`, and its module. *Gives* an assertion: the same results,
gradients, buffers and generator at every chunk size, once with a prime batch and once with all sizes equal.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import koila
from koila._torch import RunMode

TOLERANCES = {torch.float64: 1e-10, torch.complex128: 1e-10, torch.float32: 1e-6, torch.complex64: 1e-6}
"""Rule 1: ‖a−b‖ ≤ tol·‖b‖."""
ROUNDING = 1e-14
"""What each element of a value that is zero in exact arithmetic may differ by, as a share of one."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of one trial, and tensors made from them."""

    B: int = 7
    """Samples."""
    T: int = 3
    """Positions of a sequence."""
    D: int = 4
    """Features, channels."""
    C: int = 5
    """Classes."""
    H: int = 6
    """Height and width of an image."""
    dtype: torch.dtype = torch.float64

    def x(self, *shape: int, grad: bool = True) -> torch.Tensor:
        """Normal values, a leaf of autograd."""
        return torch.randn(shape, dtype=self.dtype).requires_grad_(grad)

    def p(self, *shape: int, grad: bool = True) -> torch.Tensor:
        """Values between 0.1 and 0.9."""
        return (torch.rand(shape, dtype=self.dtype) * 0.8 + 0.1).requires_grad_(grad)

    def y(self, *shape: int, high: int | None = None) -> torch.Tensor:
        """Labels."""
        return torch.randint(0, self.C if high is None else high, shape)

    def bits(self, *shape: int) -> torch.Tensor:
        """Zeros and ones as floats."""
        return torch.randint(0, 2, shape).to(self.dtype)

    def mask(self, *shape: int) -> torch.Tensor:
        """Booleans."""
        return torch.rand(shape) > 0.4


PRIME = Sizes()
EQUAL = Sizes(4, 4, 4, 4, 4)
EVEN = (Sizes(B=6), EQUAL)
"""For programs that pair samples."""


@dataclass(frozen=True)
class Case:
    """A row of a table of programs."""

    name: str
    program: Callable[..., Any]
    """From the module, if there is one, and the inputs to results; scalars are losses, other results are weighted."""
    inputs: Callable[[Sizes], Any]
    module: Callable[[Sizes], nn.Module] | None = None
    whole: str = ""
    """Why it may run whole; empty where it must be cut."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `check`."""


def table(*rows: Case) -> Any:
    """Parametrise a test over cases, each with its name."""
    return pytest.mark.parametrize("case", rows, ids=[row.name for row in rows])


def verify(case: Case, **more: Any) -> None:
    """`check` on a row."""
    check(case.program, case.inputs, case.module, whole=case.whole, **case.options, **more)


@dataclass(frozen=True)
class Seen:
    """What one execution left behind."""

    outputs: list[Any]
    gradients: dict[str, torch.Tensor | None]
    state: dict[str, torch.Tensor]
    """Parameters and buffers."""
    generator: torch.Tensor


def check(
    program: Callable[..., Any],
    make_inputs: Callable[[Sizes], Any],
    module: Callable[[Sizes], nn.Module] | None = None,
    *,
    sizes: Sequence[Sizes] = (PRIME, EQUAL),
    chunks: Sequence[int] | None = None,
    whole: str = "",
    batch: Any = 0,
    tolerance: float | None = None,
    backward: bool = True,
    seed: int = 0,
    repeats: bool = True,
) -> None:
    """Compare koila with eager at every chunk size.

    `whole` says why the run may fall back; `batch` is that of `koila.lazy`, or makes the inputs lazy by itself;
    `repeats` is false where eager's own bits depend on where its memory lies.
    """
    for size in sizes:
        expected = observe(program, make_inputs, module, size, None, batch, backward, seed)
        for chunk in chunks or ((1, 2, 3, size.B) if size.B > 4 else (1, 3)):
            koila.metrics.reset()
            found = observe(program, make_inputs, module, size, chunk, batch, backward, seed)
            where = f"batch of {size.B} in chunks of {chunk}"
            compare(found, expected, where, 0.0 if chunk >= size.B and repeats else tolerance)
            if chunk < size.B and not whole:
                assert_split(where)


def observe(
    program: Callable[..., Any],
    make_inputs: Callable[[Sizes], Any],
    module: Callable[[Sizes], nn.Module] | None,
    size: Sizes,
    chunk: int | None,
    batch: Any = 0,
    backward: bool = True,
    seed: int = 0,
) -> Seen:
    """One execution; eager where `chunk` is None."""
    torch.manual_seed(seed)
    made = make_inputs(size)
    inputs = made if isinstance(made, tuple) else (made,)
    net = None if module is None else module(size).to(size.dtype)
    torch.manual_seed(seed + 1)
    if chunk is None:
        outputs = _call(program, net, inputs, backward)
    else:
        lazies = batch(*inputs) if callable(batch) else koila.lazy(*inputs, batch=batch)
        with koila.budget(chunk_size=chunk):
            outputs = koila.run(_call(program, net, lazies if len(inputs) > 1 else (lazies,), backward), detach=True)
            koila.settle()
    generator = torch.get_rng_state()
    leaves = {f"input {number}": leaf for number, leaf in enumerate(tree_leaves(inputs))}
    parameters = dict(net.named_parameters()) if net is not None else {}
    buffers = dict(net.named_buffers()) if net is not None else {}
    tracked = {name: leaf for name, leaf in {**leaves, **parameters}.items() if isinstance(leaf, torch.Tensor)}
    gradients = {name: leaf.grad for name, leaf in tracked.items() if leaf.requires_grad and leaf.is_leaf}
    return Seen(tree_leaves(outputs), gradients, {**tracked, **buffers}, generator)


def _call(program: Callable[..., Any], net: nn.Module | None, inputs: tuple[Any, ...], backward: bool) -> Any:
    outputs = program(*inputs) if net is None else program(net, *inputs)
    if backward:
        losses = [
            scalar(leaf) for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        if losses:
            sum(losses[1:], losses[0]).backward()
    return outputs


def scalar(value: torch.Tensor) -> torch.Tensor:
    """A loss of any result: its sum with fixed weights."""
    if value.is_complex():
        value = torch.view_as_real(value)
    if value.ndim == 0:
        return value
    return (value * torch.arange(1, value.numel() + 1, dtype=value.dtype).cos().view(value.shape)).sum()


def compare(found: Seen, expected: Seen, where: str, tolerance: float | None = None) -> None:
    """Rule 1; the same bits where the tolerance is zero."""
    assert len(found.outputs) == len(expected.outputs)
    for number, (one, other) in enumerate(zip(found.outputs, expected.outputs, strict=True)):
        assert_same(one, other, f"result {number}, {where}", tolerance)
    for name, other in expected.gradients.items():
        assert_same(found.gradients[name], other, f"gradient of {name}, {where}", tolerance)
    for name, other in expected.state.items():
        assert_same(found.state[name], other, name + ", " + where, tolerance)
    assert torch.equal(found.generator, expected.generator), f"generator, {where}"


def assert_same(found: Any, expected: Any, where: str, tolerance: float | None = None) -> None:
    """Equal up to the order of summation, NaN and infinities in the same places."""
    if expected is None:
        assert found is None, f"{where}: {found} instead of None"
        return
    if not isinstance(expected, torch.Tensor):
        assert found == pytest.approx(expected, rel=tolerance or 1e-10, nan_ok=True), (
            f"{where}: {found}, not {expected}"
        )
        return
    assert isinstance(found, torch.Tensor), f"{where}: {found} instead of a tensor"
    one, other = found.detach(), expected.detach()
    if other.layout != torch.strided:
        assert one.layout == other.layout, f"{where}: layout {one.layout}, not {other.layout}"
        one, other = one.to_dense(), other.to_dense()
    assert one.shape == other.shape and one.dtype == other.dtype, f"{where}: {one.dtype} {list(one.shape)}"
    if not (other.is_floating_point() or other.is_complex()):
        assert torch.equal(one, other), where
        return
    if tolerance == 0.0:
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0)), f"{where}: other bits"
    assert torch.equal(one.isnan(), other.isnan()), f"{where}: NaN in other places"
    finite = other.isfinite()
    assert torch.equal(one[~finite].nan_to_num(), other[~finite].nan_to_num()), f"{where}: other infinities"
    error, size = float((one - other)[finite].norm()), float(other[finite].norm())
    allowed = (TOLERANCES.get(other.dtype, 1e-2) if tolerance is None else tolerance) * size
    assert error <= allowed + ROUNDING * other.numel() ** 0.5, f"{where}: off by {error:.1e} of {size:.1e}"


def fallbacks() -> list[str]:
    """Why runs that should have been cut were not."""
    return [name for name in koila.metrics.counter_names() if name.startswith("fallback::")]


def eager_calls() -> list[str]:
    """What ran eagerly in the middle."""
    return [name for name in koila.metrics.counter_names() if name.startswith("eager::")]


def assert_split(where: str = "") -> None:
    """Every run since the last reset was cut."""
    assert fallbacks() == [], f"{where}: ran whole: {fallbacks()}"
    assert koila.metrics.counter_value("runs::split") >= 1, f"{where}: never cut; eagerly: {eager_calls()}"


_SHAPE = re.compile(r" \[([\d, ]*)\] \(")


def held_elements(explanation: koila.reporting.explain.Explanation) -> int:
    """The number of elements of the largest value that is gathered, or kept between phases."""
    assert explanation.whole_because is None, explanation.whole_because
    largest = 0
    for text in (*explanation.gathers, *explanation.kept):
        found = _SHAPE.search(text)
        assert found is not None, text
        largest = max(largest, _product(int(size) for size in found[1].split(",") if size.strip()))
    return largest


def _product(sizes: Iterable[int]) -> int:
    count = 1
    for size in sizes:
        count *= size
    return count


class Largest(RunMode):
    """Watches for the largest real tensor that any operator gives, in elements of float64."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0
        self.operator = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(results):
            if type(leaf) is torch.Tensor and leaf.untyped_storage().nbytes() // 8 > self.num_elements:
                self.num_elements = leaf.untyped_storage().nbytes() // 8
                self.operator = f"{func} {list(leaf.shape)}"
        return results
