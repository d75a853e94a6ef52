"""What capture needs from elsewhere, joined once at import.

*Takes* the classes of tensors from `capture.lazy` and `capture.eager`, and the engine from `koila._api`. *Gives* them
to the files of capture that cannot import them.
"""

from __future__ import annotations

from typing import Any

from koila.interfaces import Realizer


class Bridge:
    """The class of lazy tensors, the class of eager ones, and the realizer."""

    lazy_type: type[Any]
    eager_type: type[Any]
    realizer: Realizer
