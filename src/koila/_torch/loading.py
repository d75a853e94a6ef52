"""Loaders: the one place through which every batch of a DataLoader passes.

Takes: torch.utils.data. Gives: the class whose `__next__` hands a batch to the loop that asked for it.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import dataloader

LOADER_ITERATOR: type[Any] = dataloader._BaseDataLoaderIter
"""The iterators of all DataLoaders, with and without workers, inherit `__next__` from it; it runs in the process that
reads the loader. A wrapper around `DataLoader.__iter__` would hide the iterator's class, by which Lightning ends the
workers. Look at: torch/utils/data/dataloader.py."""
