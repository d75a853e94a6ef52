"""Pieces: a value that is held from one loop over the chunks to a later one, as the chunks that it was made in.

*Takes* the chunks of a value, one after the other. *Gives* chunks of the same size, parts of them, or several joined; a
piece is let go as soon as its last sample was read for the last time.
"""

from __future__ import annotations

from collections import deque

import torch

from koila.analysis.types import Sliced, chunk_of


class Held:
    """The chunks of one value, in memory."""

    def __init__(self) -> None:
        self._pieces: deque[tuple[int, int, torch.Tensor]] = deque()

    def add(self, start: int, stop: int, piece: torch.Tensor) -> None:
        """Hold the chunk of these samples; the next ones come later."""
        self._pieces.append((start, stop, piece))

    def chunk(self, kind: Sliced, start: int, stop: int) -> torch.Tensor:
        """The chunk of these samples: a piece, a part of one, or several of them joined."""
        found = [each for each in self._pieces if each[0] < stop and start < each[1]]
        if len(found) > 1:
            return torch.cat([piece for _, _, piece in found], kind.dim)
        first, last, piece = found[0]
        if (first, last) == (start, stop):
            return piece
        return chunk_of(piece, kind, start - first, stop - first, last - first)

    def let_go(self, stop: int) -> None:
        """Nobody reads the samples before `stop` any more."""
        while self._pieces and self._pieces[0][1] <= stop:
            self._pieces.popleft()
