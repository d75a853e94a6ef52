"""Running statistics that somebody reads from their module, after their pending updates.

*Takes* PyTorch's norms. *Gives* the same norms, except that reading `bn.running_mean` first runs what updates it.
"""

from __future__ import annotations

from sys import _getframe
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.nn.parameter import is_lazy

from koila._torch.modules import NORM_BASE, NORM_FORWARDS, buffer_of
from koila.capture.bridge import Bridge
from koila.capture.pending import recorder


def patch_statistics() -> None:
    """Reading `bn.running_mean` comes after its pending updates, unless it is read to be updated once more."""
    original, place = torch.nn.Module.__getattr__, recorder.place

    def is_pending(buffer: Any) -> bool:
        # A buffer of a norm that learns its size from its first input has no memory yet.
        storage = None if buffer is None or is_lazy(buffer) else recorder.storage_of(buffer)
        return storage is not None and bool(storage.writers)

    def read(self: Any, name: str) -> Any:
        if not name.startswith("running_") or is_dynamo_compiling():  # Inside compiled code nothing is pending.
            return original(self, name)
        is_asked = not recorder.is_idle and not place.runs and _getframe(1).f_code not in NORM_FORWARDS
        if is_asked and is_pending(buffer_of(self, name)):
            Bridge.realizer.materialize([], "running statistics")
        return original(self, name)

    NORM_BASE.__getattr__ = read  # type: ignore[method-assign]
