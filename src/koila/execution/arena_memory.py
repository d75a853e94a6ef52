"""The memory of an arena: one buffer per run.

*Takes* the bytes of an arena. *Gives* tensors at planned places in it. The buffer belongs to one run and goes when that
ends: a run inside of another one, or in another thread, has its own, and nothing is held between steps that eager code
would lack. Its pages are new in every run, which costs time once per run instead of once per result; they are asked for
as large pages, of which there are few.
"""

from __future__ import annotations

import torch

from koila._malloc import ask_for_large_pages
from koila.execution.codegen import Loop


class ArenaMemory:
    """A buffer, made when it is first needed, and the tensors in it by the code that writes to them."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._typed: dict[torch.dtype, torch.Tensor] = {}
        self._views: dict[Loop, list[torch.Tensor]] = {}

    def of(self, code: Loop) -> list[torch.Tensor]:
        """The memory of the results that some code writes into the arena, one tensor for each."""
        found = self._views.get(code)
        if found is None:
            found = self._views[code] = [
                self._as(form.dtype).as_strided(form.shape, form.stride, offset // form.dtype.itemsize)
                for offset, form in code.placed
            ]
        return found

    def _as(self, dtype: torch.dtype) -> torch.Tensor:
        """The whole buffer as numbers of a dtype."""
        if not self._typed:
            self._typed[torch.uint8] = torch.empty(self._num_bytes, dtype=torch.uint8)
            ask_for_large_pages(self._typed[torch.uint8].data_ptr(), self._num_bytes)
        if dtype not in self._typed:
            self._typed[dtype] = self._typed[torch.uint8].view(dtype)
        return self._typed[dtype]
