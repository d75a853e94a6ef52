"""What capture warns about: lines that make nothing lazy, or whose laziness is lost.

*Takes* the values and the batch that `koila.lazy` was given, what a thread has recorded, and tensors that leave a
loader's worker. *Gives* warnings, each once per place in the user's code; see `koila._warnings`.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from numbers import Number
from types import FrameType
from typing import Any

import torch
from torch.utils.data import get_worker_info

from koila._warnings import warn_once
from koila.capture.pending import recorder
from koila.ir.source import Site, user_site
from koila.ir.tree import leaves

LEAST_CALLS = 4
"""Fewer calls are no program, only a question or two to a tensor."""
_PLAIN = (type(None), Number, str, bytes, Enum, type, torch.Size, torch.dtype, torch.device, torch.layout)
"""What nobody expects to become lazy."""


def _warn(kind: str, fact: str, hint: str) -> None:
    site = user_site()
    warn_once(kind, fact, hint, site.file, site.line)


def warn_of_nothing_lazy(value: Any) -> None:
    """A value that `koila.lazy` was given holds no tensor that it could make lazy; plain numbers and texts may."""
    found = next((leaf for leaf in leaves(value) if not isinstance(leaf, _PLAIN)), None)
    if found is not None:
        what = f"a {type(found).__name__}" if found is value else f"a {type(value).__name__} of {type(found).__name__}"
        _warn("nothing lazy", f"koila.lazy made nothing lazy of {what}: it passes through as it is", _instead_of(found))


def _instead_of(found: Any) -> str:
    if isinstance(found, torch.nn.Module):
        return "make its inputs lazy: model(koila.lazy(x))"
    if isinstance(found, torch.Tensor) and type(found) not in (torch.Tensor, torch.nn.Parameter):
        return "leave it out: calls on tensors of such a class run eagerly, with eager's numbers"
    if isinstance(found, torch.Tensor):
        return "make a strided tensor lazy: koila.lazy(x.to_dense())"
    if hasattr(found, "__array__"):
        return "make a tensor of it first: koila.lazy(torch.as_tensor(array))"
    if isinstance(found, Iterable):
        return "make each batch lazy, in the loop: for x, y in loader: x, y = koila.lazy(x, y)"
    return "make its tensors lazy: koila.lazy(value.x, value.y)"


def warn_of_batch(batch: Any, shapes: list[tuple[int, ...]]) -> None:
    """No tensor of a call of `koila.lazy` has the batch dimension that it was told."""
    shown = ", ".join(str(list(shape)) for shape in shapes[:4]) + (", …" if len(shapes) > 4 else "")
    _warn(
        "batch matches nothing",
        f"batch={batch!r} matches none of the tensors ({shown}): they are lazy without a batch, and what is computed "
        "from them is never cut",
        "name a dimension that they have: koila.lazy(x, y, batch=0), koila.lazy({'x': x}, batch={'x': 0})",
    )


# Programs that ran eagerly.


def begin_program(frame: FrameType) -> None:
    """New inputs are made lazy in this frame of the user's: say it if all of the program before them ran eagerly."""
    place = recorder.place
    log = place.log
    if place.eager_calls:
        warn_of_eager_program()
        place.eager_calls.clear()
    place.started = (frame.f_code, frame.f_lasti, log.num_before + log.count)


def warn_of_eager_program() -> None:
    """If every call since the last `koila.lazy` ran at once, on real tensors, koila did nothing but slow them down."""
    place = recorder.place
    if place.started is None or len(place.eager_calls) < LEAST_CALLS:
        return
    code, offset, recorded = place.started
    if recorder.num_recorded() == recorded:
        since, (name, why) = Site(code, offset), place.eager_calls[0]
        warn_once(
            "a program ran eagerly",
            f"every call on what is made lazy here ran at once, on real tensors: nothing was recorded, no budget "
            f"holds; the first of {len(place.eager_calls)} was {name}: {why}",
            "koila.metrics.report() names each call and why; leave koila.lazy out, or move it behind these calls",
            since.file,
            since.line,
        )


# Loaders' workers.


_made_in_worker: list[Site] = []
"""Where this process, a loader's worker, made tensors lazy last."""


def note_worker() -> None:
    """Tensors are made lazy here; in a loader's worker they will not stay so."""
    if get_worker_info() is not None:
        _made_in_worker[:] = [user_site()]


def leaving_worker(real: torch.Tensor) -> tuple[Any, ...] | None:
    """How a lazy tensor is pickled that leaves a loader's worker; None outside of workers, and if nobody knows where
    it was made lazy."""
    if get_worker_info() is None or not _made_in_worker:
        return None
    (site,) = _made_in_worker
    return arrived_from_worker, (real, site.file, site.line)


def arrived_from_worker(real: torch.Tensor, file: str, line: int) -> torch.Tensor:
    """An ordinary tensor, in the process that has the loader: said there, once for all workers."""
    warn_once(
        "lazy in a worker",
        "a tensor was made lazy in a loader's worker: it is computed there, and arrives as an ordinary tensor",
        "make the batch lazy where the loader is read: for x, y in loader: x, y = koila.lazy(x, y)",
        file,
        line,
    )
    return real
