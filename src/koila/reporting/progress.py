"""Shows how far a run is.

Takes: the events of a run.
Gives: a progress bar if rich is installed, else plain lines; both on stderr. Nothing where nobody watches: stderr is no
terminal, or continuous integration runs.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TextIO

from koila.events import ChunkEnd, Event, PhaseStart, RunEnd, RunStart, metric_seconds, subscribe

if TYPE_CHECKING:
    import rich.progress

__all__ = ["progress"]

_NUM_LINES_PER_PHASE = 10


class _Display(Protocol):
    """What shows the state of a run."""

    def start(self, text: str) -> None:
        """A run begins."""

    def phase(self, text: str, num_chunks: int) -> None:
        """A phase begins."""

    def advance(self, num_done: int) -> None:
        """So many chunks of the phase are done."""

    def end(self, text: str) -> None:
        """The run is done."""


class _Lines:
    """Plain lines: one per tenth of a phase."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._text = ""
        self._num_chunks = 0

    def start(self, text: str) -> None:
        self._write(text)

    def phase(self, text: str, num_chunks: int) -> None:
        self._text = text
        self._num_chunks = num_chunks

    def advance(self, num_done: int) -> None:
        step = max(self._num_chunks // _NUM_LINES_PER_PHASE, 1)
        if num_done % step == 0 or num_done == self._num_chunks:
            self._write(f"{self._text}: chunk {num_done}/{self._num_chunks}")

    def end(self, text: str) -> None:
        self._write(text)

    def _write(self, text: str) -> None:
        print(f"koila: {text}", file=self._stream, flush=True)


class _Listener:
    """Turns events into calls of a display."""

    def __init__(self, display: _Display) -> None:
        self._display = display
        self._num_phases = 0

    def __call__(self, event: Event) -> None:
        match event:
            case RunStart():
                self._num_phases = event.num_phases
                self._display.start(
                    f"{event.program}: {event.num_nodes} nodes, {event.num_samples} samples "
                    f"in chunks of {event.chunk_size}, {event.num_phases} phases"
                )
            case PhaseStart():
                self._display.phase(f"phase {event.index + 1}/{self._num_phases}", event.num_chunks)
            case ChunkEnd():
                self._display.advance(event.index + 1)
            case RunEnd():
                self._display.end(f"done: {event.num_chunks} chunks in {metric_seconds(event.seconds)}")
            case _:
                pass


@contextmanager
def _rich_or_lines(stream: TextIO) -> Iterator[_Display]:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        yield _Lines(stream)
        return
    columns = TextColumn("koila: {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(file=stream), transient=True) as bar:
        yield _RichBar(bar)


class _RichBar:
    """One bar of rich, begun anew for each phase; the lines above it stay."""

    def __init__(self, bar: "rich.progress.Progress") -> None:
        self._bar = bar
        self._task = bar.add_task("waiting", total=None)

    def start(self, text: str) -> None:
        self._bar.console.print(f"koila: {text}", highlight=False, markup=False)

    def phase(self, text: str, num_chunks: int) -> None:
        self._bar.reset(self._task, description=text, total=num_chunks)

    def advance(self, num_done: int) -> None:
        self._bar.update(self._task, completed=num_done)

    def end(self, text: str) -> None:
        self._bar.console.print(f"koila: {text}", highlight=False, markup=False)


def _is_watched(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("CI")


@contextmanager
def progress(always: bool = False) -> Iterator[None]:
    """Show the phases and chunks of every run inside the `with` block on stderr.

    Args:
        always: Show them even if stderr is no terminal, or the environment variable `CI` is set.

    >>> with progress():
    ...     pass
    """
    if not always and not _is_watched(sys.stderr):
        yield
        return
    with _rich_or_lines(sys.stderr) as display:
        unsubscribe = subscribe(_Listener(display))
        try:
            yield
        finally:
            unsubscribe()
