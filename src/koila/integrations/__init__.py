"""Conveniences for the ways in which people train; none is required (Rule 7).

*Takes* loaders and trainers of other libraries. *Gives* the same ones with lazy batches. A library is imported by its
own file here only, and when it is asked for: `koila.integrations.hf`, `koila.integrations.lightning`.
"""

from __future__ import annotations

import importlib
from types import ModuleType

NAMES = ("hf", "lightning")
"""The libraries that have a file here."""


def __getattr__(name: str) -> ModuleType:
    if name not in NAMES:
        raise AttributeError(f"koila.integrations has no {name!r}; there are: {', '.join(NAMES)}")
    return importlib.import_module(f"koila.integrations.{name}")
