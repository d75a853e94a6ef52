"""Saying what takes long.

*Takes* a text for something that may take its time. *Gives* a line on the logger if it does.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger("koila")
PATIENCE_SECONDS = 2.0
"""How long something may take in silence."""


class Wait:
    """A line on the logger if something takes longer than `PATIENCE_SECONDS`; said once."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._timer: threading.Timer | None = None

    def resume(self) -> None:
        """Somebody is waiting from now on."""
        if self._timer is None:
            self._timer = threading.Timer(PATIENCE_SECONDS, logger.warning, [f"koila: {self._text}"])
            self._timer.daemon = True
            self._timer.start()

    def suspend(self) -> None:
        """What follows says for itself how long it takes."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


@contextmanager
def waiting(text: str) -> Iterator[Wait]:
    """Say `text` on the `koila` logger (on stderr, unless it is configured otherwise) if the body takes long."""
    wait = Wait(text)
    wait.resume()
    try:
        yield wait
    finally:
        wait.suspend()
