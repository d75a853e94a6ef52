"""The arena: blocks that live for some steps each get places in one buffer.

*Takes* blocks: their bytes, their first and their last step. *Gives* an offset for each, so that no two that are alive
at the same step overlap, and the bytes of the buffer. No tensors here, only numbers.

Finding the smallest buffer is NP-hard. Here the largest block is placed first, each into the smallest gap that is long
enough between those that are alive at the same time (Pisarchyk and Lee, "Efficient memory management for deep neural
net inference", 2020, greedy by size). On the schedules of real programs that is the sum of the live bytes at the worst
step, or a few percent more.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 64
"""Offsets are multiples of this, as PyTorch's own blocks on a CPU are: kernels then see the same alignment."""


@dataclass(frozen=True, slots=True)
class Block:
    """Memory that is needed for some steps."""

    num_bytes: int
    first: int
    """The step that makes it."""
    last: int
    """The last step that needs it."""

    @property
    def aligned_bytes(self) -> int:
        """Its bytes, rounded up to a multiple of the alignment."""
        return -(-self.num_bytes // ALIGNMENT) * ALIGNMENT


def arrange(blocks: Sequence[Block]) -> tuple[list[int], int]:
    """The offset of each block, and the bytes of a buffer that they all lie in.

    >>> arrange([Block(64, 0, 1), Block(128, 1, 2), Block(64, 2, 3)])
    ([128, 0, 128], 192)
    """
    offsets, placed = [0] * len(blocks), list[tuple[int, int, int, int]]()
    order = sorted(range(len(blocks)), key=lambda number: (-blocks[number].num_bytes, blocks[number].first))
    for number in order:
        block = blocks[number]
        offsets[number] = start = _best_gap(block, placed)
        insort(placed, (start, start + block.aligned_bytes, block.first, block.last))
    return offsets, max((stop for _, stop, _, _ in placed), default=0)


def _best_gap(block: Block, placed: Sequence[tuple[int, int, int, int]]) -> int:
    """Where the smallest gap starts that is long enough for a block, or the end of what is alive beside it."""
    size, best, best_length, end = block.aligned_bytes, -1, 0, 0
    for start, stop, first, last in placed:
        if first > block.last or block.first > last:
            continue
        if start - end >= size and (best < 0 or start - end < best_length):
            best, best_length = end, start - end
        end = max(end, stop)
    return end if best < 0 else best


def least_bytes(blocks: Sequence[Block]) -> int:
    """The most bytes that are alive at a step: no buffer can be smaller.

    >>> least_bytes([Block(64, 0, 1), Block(128, 1, 2), Block(64, 2, 3)])
    192
    """
    changes: dict[int, int] = {}
    for block in blocks:
        changes[block.first] = changes.get(block.first, 0) + block.aligned_bytes
        changes[block.last + 1] = changes.get(block.last + 1, 0) - block.aligned_bytes
    now = most = 0
    for step in sorted(changes):
        now += changes[step]
        most = max(most, now)
    return most
