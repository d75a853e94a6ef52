"""Convolutions of a few pixels as one product: the numbers, the bytes, and where a plan computes them so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import koila
from benchmarks.witness import Watch, call_outside
from koila.execution.unfolded import unfolded_convolution, unfolded_gradients
from koila.planning.few_pixels import runs_unfolded, unfolded_bytes

aten = torch.ops.aten
SHAPES = [
    # Samples, channels, outputs, kernel, stride, padding, dilation, size of the image.
    (1, 128, 256, 3, 1, 1, 1, 3),
    (1, 256, 128, 3, 2, 1, 1, 6),
    (3, 128, 64, 3, 1, 1, 1, 2),
    (2, 512, 256, 1, 2, 0, 1, 4),
    (1, 64, 128, 5, 1, 4, 2, 3),
    (5, 128, 128, 3, 1, 0, 1, 3),
    (1, 128, 128, 3, 1, 0, 1, 3),
    (2, 64, 128, (1, 9), 1, 0, 1, (2, 10)),
]


def calls(shape: Any, dtype: torch.dtype, bias: bool) -> tuple[list[Any], list[Any]]:
    """The arguments of a convolution, and of its gradient."""
    samples, channels, outputs, kernel, stride, padding, dilation, size = shape
    sides, image_sizes = ((each, each) if isinstance(each, int) else each for each in (kernel, size))
    image, weight = torch.randn(samples, channels, *image_sizes), torch.randn(outputs, channels, *sides)
    image, weight, offset = image.to(dtype), weight.to(dtype), torch.randn(outputs).to(dtype) if bias else None
    sizes = [[stride] * 2, [padding], [dilation] * 2, False, [0, 0], 1]
    gradient = torch.randn_like(aten.convolution(image, weight, offset, *sizes))
    return [image, weight, offset, *sizes], [gradient, image, weight, [outputs], *sizes, [True, True, bias]]


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_numbers_are_those_of_the_operator(shape: Any, bias: bool) -> None:
    torch.manual_seed(0)
    forward, backward = calls(shape, torch.float64, bias)
    expected = aten.convolution.default(*forward)
    assert runs_unfolded(aten.convolution.default, forward, expected)
    found = unfolded_convolution(*forward)
    gradients = aten.convolution_backward.default(*backward)
    assert runs_unfolded(aten.convolution_backward.default, backward, gradients)
    pairs = [(found, expected), *zip(unfolded_gradients(*backward), gradients, strict=True)]
    for own, theirs in pairs[: 4 if bias else 3]:
        assert own is not None and own.stride() == theirs.stride() and own._base is None
        torch.testing.assert_close(own, theirs, rtol=1e-12, atol=1e-12)


def test_a_gradient_that_nobody_wants_is_not_computed() -> None:
    _, backward = calls(SHAPES[0], torch.float64, bias=True)
    backward[-1] = [False, True, False]
    source, weight, bias = unfolded_gradients(*backward)
    assert source is None and weight is not None and bias is None


def bytes_of_convolutions() -> list[tuple[int, int]]:
    """(measured, counted) for each shape, forward and backward; runs under the hook."""
    torch.set_num_threads(1)
    found = []
    for shape in SHAPES:
        for bias in (False, True):
            forward, backward = calls(shape, torch.float32, bias)
            for target, function, args in (
                (aten.convolution.default, unfolded_convolution, forward),
                (aten.convolution_backward.default, unfolded_gradients, backward),
            ):
                result = function(*args)  # type: ignore[operator]
                with Watch() as watch:
                    kept = function(*args)  # type: ignore[operator]
                found.append((watch.peak_bytes - watch.kept_bytes, unfolded_bytes(target, args, result)))
                del kept
    return found


def test_the_bytes_are_counted() -> None:
    for measured, counted in call_outside("tests.unit.planning.test_few_pixels:bytes_of_convolutions"):
        assert measured <= counted + 4096
        assert counted <= 1.25 * measured + 4096


@pytest.mark.parametrize("change", ["groups", "transposed", "half", "channels last", "many pixels", "small weight"])
def test_other_convolutions_are_left_to_the_operator(change: str) -> None:
    forward, _ = calls(SHAPES[0], torch.float32, bias=False)
    output = torch.empty(1, 256, 3, 3)
    assert runs_unfolded(aten.convolution.default, forward, output)
    if change == "groups":
        forward[8], forward[1] = 2, torch.empty(256, 512, 3, 3)
    elif change == "transposed":
        forward[6] = True
    elif change == "half":
        forward[0], forward[1] = forward[0].bfloat16(), forward[1].bfloat16()
    elif change == "channels last":
        forward[0] = forward[0].to(memory_format=torch.channels_last)
    elif change == "many pixels":
        output = torch.empty(1, 256, 4, 4)
    else:
        forward[1] = forward[1][:8]
    assert not runs_unfolded(aten.convolution.default, forward, output)


def deep(dtype: torch.dtype) -> nn.Sequential:
    """A network whose last convolutions have large weights and small images."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(8, 128, 3, 2, 1), nn.GroupNorm(8, 128), nn.ReLU(), nn.Conv2d(128, 128, 3, 2, 1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Conv2d(128, 64, 3, padding=1, bias=False), nn.Flatten(), nn.Linear(256, 3))
    return model.to(dtype)


@pytest.fixture
def unfolded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The convolutions that a run computes as products."""
    from koila.execution import kernels

    found: list[Any] = []
    for key, function in kernels._INSTEAD.items():
        monkeypatch.setitem(
            kernels._INSTEAD, key, lambda *args, own=function, name=key: (found.append(name), own(*args))[1]
        )
    yield found


@pytest.mark.parametrize(("size", "times"), [(1, 4 * 7), (3, 4 * 3), (7, 0)])
def test_chunks_of_a_few_pixels_are_computed_as_products(unfolded: list[Any], size: int, times: int) -> None:
    model, x = deep(torch.float64), torch.randn(7, 8, 8, 8).double()
    model(x).square().mean().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with koila.budget(chunk_size=size):
        model(koila.lazy(x)).square().mean().backward()
    assert len(unfolded) == times
    for own, theirs in zip(model.parameters(), expected, strict=True):
        assert own.grad is not None
        assert float((own.grad - theirs).norm()) <= 1e-10 * float(theirs.norm())


def test_what_is_not_cut_keeps_the_kernels_of_eager(unfolded: list[Any]) -> None:
    model, x = deep(torch.float32), torch.randn(1, 8, 8, 8)
    with torch.no_grad():
        expected = model(x)
        found = koila.run(model(koila.lazy(x)))
    assert torch.equal(found, expected) and not unfolded
