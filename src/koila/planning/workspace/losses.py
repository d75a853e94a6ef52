"""Losses that PyTorch reduces itself: the unreduced loss, and what it is made from."""

from __future__ import annotations

from typing import Any

import torch

from koila.planning.workspace.kernel_call import HALF, Formula, KernelCall, num_bytes

aten = torch.ops.aten


def _loss(num_floats: int, num_halves: int) -> Formula:
    def formula(call: KernelCall) -> int:
        source = call["self"]
        if not call["reduction"]:
            return 0
        return num_bytes(source) * (num_halves if source.dtype in HALF else num_floats)

    return formula


def _unreduced(call: KernelCall) -> int:
    """The reduced loss is a view of the unreduced one's storage."""
    return num_bytes(call["self"]) if call["reduction"] else 0


ROWS: dict[Any, Formula] = {
    aten.mse_loss.default: _loss(2, 4),
    aten.smooth_l1_loss.default: _loss(2, 4),
    aten.huber_loss.default: _loss(1, 3),
    aten.binary_cross_entropy.default: _loss(1, 3),
    aten.binary_cross_entropy_with_logits.default: _loss(2, 4),
}

RETAINED: dict[Any, Formula] = {
    aten.mse_loss.default: _unreduced,
    aten.smooth_l1_loss.default: _unreduced,
    aten.binary_cross_entropy.default: _unreduced,
}
"""What of it stays alive with the result."""
