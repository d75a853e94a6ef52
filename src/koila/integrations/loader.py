"""`koila.loader`: a loader whose batches are lazy.

*Takes* anything that yields batches: a DataLoader, or what Accelerate made of one. *Gives* the same batches, lazy, in
the process that reads them and after the loader has put them on their device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from koila._api import lazy
from koila._budget import read_bytes
from koila.errors import CaptureError
from koila.ir.source import user_site


class Loader:
    """A loader whose batches are lazy; every other attribute is the loader's own."""

    def __init__(self, loader: Iterable[Any], batch: Any, budget: object) -> None:
        self.loader = loader
        """The loader that makes the batches."""
        self.batch = batch
        """Where the batch dimension is, as in `koila.lazy`."""
        self.budget = budget
        """What a run of a batch may allocate, as in `koila.lazy`."""

    def __iter__(self) -> Iterator[Any]:
        for item in self.loader:
            yield lazy(item, batch=self.batch, budget=self.budget)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # Not made yet, as while it is unpickled.
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __repr__(self) -> str:
        return f"koila.loader({self.loader!r}, batch={self.batch!r}, budget={self.budget!r})"


def loader(dataloader: Iterable[Any], *, batch: Any = 0, budget: object = None) -> Loader:
    """Make the batches of a loader lazy: the one line, for a loop that should stay as it is.

    With Accelerate, wrap what `accelerator.prepare` returns: it knows DataLoaders only, and passes by anything else.

    Args:
        dataloader: Yields batches: a DataLoader, a list of batches, what `accelerator.prepare` returned.
        batch: The batch dimension, as in `koila.lazy`.
        budget: What a run of a batch may allocate, as in `koila.lazy`.

    Returns:
        An iterable of lazy batches, with the loader's length and attributes; it can be read again and again.

    Raises:
        CaptureError: It is not a loader.
        BudgetError: The budget is not one.

    >>> import torch
    >>> for x, y in loader([(torch.ones(4, 2), torch.zeros(4))], budget="1MiB"):
    ...     print((x.sum(1) - y).mean().item())
    2.0
    """
    if not hasattr(dataloader, "__iter__"):
        raise CaptureError(
            f"koila.loader takes something that yields batches, got a {type(dataloader).__name__}",
            where=str(user_site()),
            hint="koila.loader(DataLoader(dataset, batch_size=64)); for one batch, koila.lazy(x, y)",
        )
    if budget is not None:
        read_bytes(budget, "budget")
    return Loader(dataloader, batch, budget)
