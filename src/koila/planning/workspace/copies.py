"""Copies of operands into a layout that a kernel can read: most of what is hidden."""

from __future__ import annotations

import torch

from koila.planning.workspace.kernel_call import Formula, num_bytes


def copy_bytes(tensor: torch.Tensor | None) -> int:
    """A kernel calls `contiguous()` on an operand.

    >>> copy_bytes(torch.ones(4, 4)), copy_bytes(torch.ones(4, 4).t())
    (0, 64)
    """
    return 0 if tensor is None or tensor.is_contiguous() else num_bytes(tensor)


def image_copy_bytes(tensor: torch.Tensor) -> int:
    """The same, where channels last is as good."""
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return 0
    return copy_bytes(tensor)


def copies(*names: str) -> Formula:
    """Copies of the operands with these names, if they are strided."""
    return lambda call: sum(copy_bytes(call[name]) for name in names)


def image_copies(*names: str) -> Formula:
    """The same for images."""
    return lambda call: sum(image_copy_bytes(call[name]) for name in names)
