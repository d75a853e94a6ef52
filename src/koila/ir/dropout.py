"""Dropout as one operator, which draws a mask and multiplies: what accelerators use.

*Takes* the layout of its input, or its input and a mask. *Gives* the mask alone, drawn as the operator draws it, and
the result that it has with a mask. How the operator of a device does both is found out by a self-test there. Where its
mask is not what `bernoulli_` draws, the operator itself is run on an input without content: for a moment that takes the
bytes of the input twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch

from koila._torch import without_modes
from koila.ir.generators import GeneratorState
from koila.ir.prepass import PrePass, empty, prepass_of

aten = torch.ops.aten

LAYOUTS = (((4099,), (0,)), ((37, 61), (1, 0)))
"""Shapes, and orders of their dimensions in memory, on which kernels are compared."""

Multiply = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]


def _scaled_last(given: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    return given.mul(mask).mul_(scale)


def _scaled_mask(given: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    return mask.to(given.dtype).mul_(scale).mul_(given)


@dataclass(frozen=True, slots=True)
class Dropout:
    """What a self-test found out about the dropout operator of a device."""

    multiply: Multiply | None
    """Makes its result from its input, its mask and the scale, to the last bit; None if nothing known does."""
    is_bernoulli: bool = False
    """Whether its mask is what `bernoulli_` draws."""


@cache
def dropout_of(dtype: torch.dtype, device: torch.device, probability: float) -> Dropout:
    """Self-test of the dropout operator: how it multiplies, and how it draws."""
    found, is_bernoulli, generator = [_scaled_last, _scaled_mask], True, GeneratorState(device)
    with without_modes(), torch.no_grad(), generator.restored():
        for shape, order in LAYOUTS:
            begun = generator.read()
            given = torch.linspace(-3, 3, prod(shape), device=device).to(dtype).view(shape).permute(order)
            result, mask = aten.native_dropout.default(given, probability, True)
            found = [each for each in found if torch.equal(each(given, mask, 1 / (1 - probability)), result)]
            after = generator.read()
            generator.write(begun)
            drawn = _bernoulli(prepass_of(given), probability)
            is_bernoulli = is_bernoulli and torch.equal(drawn, mask) and torch.equal(generator.read(), after)
            generator.write(after)
    return Dropout(found[0] if found else None, is_bernoulli)


def _bernoulli(prepass: PrePass, probability: float) -> torch.Tensor:
    return empty(prepass, torch.bool).bernoulli_(1 - probability)


def dropout_mask(prepass: PrePass, probability: float) -> torch.Tensor:
    """Draw the mask of a dropout operator whose input is laid out like this."""
    if dropout_of(prepass.dtype, prepass.device, probability).is_bernoulli:
        return _bernoulli(prepass, probability)
    return aten.native_dropout.default(empty(prepass), probability, True)[1]


def dropped(given: torch.Tensor, mask: torch.Tensor, probability: float) -> torch.Tensor:
    """The result of dropout with this mask."""
    multiply = dropout_of(given.dtype, given.device, probability).multiply
    assert multiply is not None  # Else it was not recorded.
    return multiply(given, mask, 1 / (1 - probability))


def is_drawn(given: Any, p: float, train: bool | None) -> bool:
    """Whether dropout with these arguments draws random numbers."""
    return train is not False and 0 < p < 1
