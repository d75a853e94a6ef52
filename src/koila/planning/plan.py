"""The plan: what runs in each phase on each chunk, step by step.

*Takes* a `Layout` and a chunk size. *Gives* a frozen `Plan` of schedules.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from koila._bytes import format_bytes
from koila.analysis.split import Facts, Item
from koila.planning.catalogue import lies_in_operand
from koila.planning.cost import schedule_fresh_bytes, schedule_seconds
from koila.planning.devices import current_rules
from koila.planning.patterns import patterns_of
from koila.planning.phases import Layout, Stage, key_of
from koila.planning.placement import Arena
from koila.planning.rates import offload_seconds
from koila.planning.schedule import Schedule
from koila.planning.step import Kind, Sink

Known = dict[Hashable, Schedule]
"""By items, sinks and chunk size, the schedule that was made of them."""


@dataclass(frozen=True, eq=False)
class Phase:
    """One loop over the chunks."""

    stage: Stage
    before: Schedule
    """What runs before the loop."""
    loops: dict[int, Schedule]
    """What runs for each chunk, by the chunk's size."""
    chunks: tuple[tuple[int, int], ...] = ()
    """(first sample, sample after the last) of each chunk."""

    @property
    def targets(self) -> tuple[Item, ...]:
        """Items whose chunks are merged or gathered."""
        return self.stage.targets

    @property
    def kept(self) -> tuple[Item, ...]:
        """Items whose chunks are kept whole for later phases."""
        return self.stage.kept

    @property
    def sinks(self) -> tuple[Sink, ...]:
        """What becomes of the targets and the kept items."""
        return next(iter(self.loops.values())).sinks

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """What runs before the loop, and in it."""
        return (self.before, *self.loops.values())


@dataclass(frozen=True, eq=False)
class Plan:
    """How a program runs in chunks."""

    layout: Layout
    chunk_size: int
    """Samples per chunk, in the phases with the smallest chunks; the last chunk may have fewer."""
    phases: tuple[Phase, ...]
    after: Schedule
    """What runs after the last loop."""
    offloaded: frozenset[Item] = frozenset()
    """Kept items whose buffers lie in a file, or on the host."""
    fetches: bool = False
    """Whether a chunk of these is copied to the device when it is read: it is not the host."""
    streamed: bool = False
    """Whether the only result, if it is Sliced, is handed out chunk by chunk and never held whole."""
    arena: Arena | None = None
    """The buffer that results lie in which nobody else holds; None: each has memory of its own."""

    def placed(self, schedule: Schedule) -> frozenset[int]:
        """The storages of a schedule that lie in the arena."""
        return frozenset() if self.arena is None else self.arena.placements[schedule].storages

    @property
    def facts(self) -> Facts:
        """What the analysis knows about the program."""
        return self.layout.facts

    @property
    def frees(self) -> list[list[Item]]:
        """For each section, the values that nobody reads after it."""
        return self.layout.frees

    @property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        """The chunks of the phase with the most of them."""
        most = max((phase.chunks for phase in self.phases), key=len, default=())
        return most or chunks(self.facts.num_samples, self.chunk_size)

    @property
    def sizes_text(self) -> str:
        """The chunk size, or the smallest and the largest of those that phases have."""
        largest = max((phase.chunks[0][1] for phase in self.phases if phase.chunks), default=self.chunk_size)
        return f"{self.chunk_size}" if largest <= self.chunk_size else f"{self.chunk_size} to {largest}"

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """Everything that runs, in order, the loop of each chunk size once."""
        return (*(schedule for phase in self.phases for schedule in phase.schedules), self.after)

    @property
    def by_section(self) -> Iterator[tuple[int, Schedule]]:
        """The schedules with the numbers of their sections; see `Layout.sections`."""
        for number, phase in enumerate(self.phases):
            yield 2 * number, phase.before
            yield from ((2 * number + 1, loop) for loop in phase.loops.values())
        yield 2 * len(self.phases), self.after

    @cached_property
    def seconds(self) -> float:
        """The expected time, but for the pages of the heap."""
        return sum(map(schedule_seconds, self._run)) + sum(map(self._file_seconds, self.offloaded))

    @cached_property
    def fresh_bytes(self) -> int:
        """The bytes of results that are made of new pages every time."""
        return sum(map(schedule_fresh_bytes, self._run))

    @property
    def _run(self) -> Iterator[Schedule]:
        """Everything that runs, as often as it does."""
        yield self.after
        for phase in self.phases:
            yield phase.before
            yield from (phase.loops[stop - start] for start, stop in phase.chunks)

    def _file_seconds(self, item: Item) -> float:
        num_bytes = self.layout.catalogue.state_bytes(item)
        return offload_seconds(num_bytes) * sum(item in phase.kept for phase in self.phases)

    @cached_property
    def result_kinds(self) -> dict[Any, str]:
        """By key, whether a value is one of the results or one of the gradients."""
        found, first = dict[Any, str](), self.facts.joint.num_outputs
        for number, item in enumerate(self.facts.results):
            if item is not None:
                found[key_of(item)] = "results" if number < first else "gradients"
        return found

    def key_of(self, item: Any) -> Item:
        """Under which item a run holds a value."""
        return key_of(item)

    @cached_property
    def recomputed(self) -> Counter[str]:
        """Operators that a chunk runs again: in a later phase, or in the same one."""
        found: Counter[str] = Counter()
        seen: set[Item] = set()
        for number, phase in enumerate(self.phases):
            kept = self.layout.kept_before(2 * number)
            for item in phase.stage.items:
                if item.kind == "chunk" and item not in kept and not lies_in_operand(item.node.target):
                    found.update([str(item.node.target)] if item in seen else [])
                    seen.add(item)
        once = [schedule for phase in self.phases for schedule in phase.schedules[:2]]
        for step in (step for schedule in (*once, self.after) for step in schedule.steps if step.is_repeat):
            found.update([] if lies_in_operand(step.work.target) else [step.work.label])
        return found

    @cached_property
    def regions(self) -> tuple[str, ...]:
        """The parts that are cut along another axis."""
        return tuple(text for schedule in self.schedules for text in _regions(schedule))

    def to_dict(self) -> dict[str, Any]:
        """Every decision as plain data: equal for equal plans, and ready for JSON."""
        names = lambda items: [item.node.name for item in items]  # noqa: E731
        return {
            "num_samples": self.facts.num_samples,
            "chunk_size": self.chunk_size,
            "gathered": [name for name, _ in self.facts.gathers],
            "offloaded": sorted(names(self.offloaded)),
            "streamed": self.streamed,
            "phases": [
                {
                    "merged": names(phase.targets),
                    "kept": names(phase.kept),
                    "chunks": len(phase.chunks),
                    "before": phase.before.decisions(),
                    "loops": {str(size): loop.decisions() for size, loop in sorted(phase.loops.items())},
                }
                for phase in self.phases
            ],
            "after": self.after.decisions(),
            "arena": None if self.arena is None else self.arena.to_dict(),
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash((self.chunk_size, self.facts.num_samples, len(self.phases)))

    def _repr_html_(self) -> str:
        """What a notebook shows: the text as it stands."""
        return f"<pre>{html.escape(str(self))}</pre>"

    def __str__(self) -> str:
        lines = [f"{len(self.chunks)} chunks of {self.sizes_text} of {self.facts.num_samples} samples"]
        if not self.phases:
            lines = [f"all {self.facts.num_samples} samples at once: {len(self.after.steps)} steps"]
        for number, phase in enumerate(self.phases):
            lines += [f"  phase {number + 1}: {_describe(phase)}", *(f"    {text}" for text in _regions(_loop(phase)))]
        gathered = ", ".join(f"{name} (for {user})" for name, user in self.facts.gathers)
        lines.append(f"  gathered: {gathered or 'nothing'}")
        if self.offloaded:
            lines.append(f"  in a file: {', '.join(sorted(item.node.name for item in self.offloaded))}")
        if self.arena is not None:
            lines.append(f"  in one buffer of {format_bytes(self.arena.num_bytes)}: {self.arena.num_values} results")
        return "\n".join(lines)


def _loop(phase: Phase) -> Schedule:
    """The loop of the first chunk size."""
    return next(iter(phase.loops.values()))


def _describe(phase: Phase) -> str:
    loop = _loop(phase)
    repeats, written = sum(step.is_repeat for step in loop.steps), len(loop.overwritten)
    text = f"{len(loop.steps)} steps per chunk, {len(phase.targets)} merged or gathered"
    text += f", {written} written over an operand" if written else ""
    text += f", {len(phase.kept)} kept" if phase.kept else ""
    return text + (f", {repeats} computed again" if repeats else "")


def _regions(schedule: Schedule) -> list[str]:
    return [step.work.label for step in schedule.steps if step.kind is Kind.SUB_PLAN]


def chunks(num_samples: int, chunk_size: int) -> tuple[tuple[int, int], ...]:
    """(first sample, sample after the last) of each chunk.

    >>> chunks(5, 2)
    ((0, 2), (2, 4), (4, 5))
    """
    return tuple((start, min(start + chunk_size, num_samples)) for start in range(0, num_samples, chunk_size))


def stream_source(layout: Layout) -> Item | None:
    """The item whose chunks can be handed out one by one: the only result, if the last phase gathers it."""
    results = [item for item in layout.facts.results if item is not None]
    if len(results) != 1 or results[0].kind != "gather" or not layout.stages:
        return None
    source = results[0].operands[0]
    return source if source in layout.stages[-1].targets else None


def make_plan(
    layout: Layout, chunk_size: int | Sequence[int], streamed: bool = False, known: Known | None = None,
    offloaded: frozenset[Item] = frozenset(),
) -> Plan:  # fmt: skip
    """A plan for a chunk size, rounded up to what the granule allows; each schedule as the program has it.

    Args:
        layout: Which items each phase computes.
        chunk_size: Samples per chunk, for all phases or for each of them.
        streamed: Whether the only result is handed out chunk by chunk.
        known: Schedules of other plans of the same program; those made here are added.
        offloaded: Kept items that lie in files, or on the host.
    """
    catalogue, granule = layout.catalogue, layout.facts.granule
    given = [chunk_size] * len(layout.stages) if isinstance(chunk_size, int) else list(chunk_size)
    sizes = [-(-size // granule) * granule for size in given]
    source = stream_source(layout) if streamed else None
    known = {} if known is None else known
    patterns = patterns_of(catalogue)

    def built(
        items: tuple[Item, ...], sinks: list[Sink], chunk: int | None, kept: frozenset[Item] = frozenset(),
        joined: frozenset[Item] = frozenset(),
    ) -> Schedule:  # fmt: skip
        read = kept.intersection(items)
        key = (items, tuple(sinks), read, chunk, joined & read)
        if key not in known:
            known[key] = patterns.schedule(items, sinks, read, chunk, joined & read)
        return known[key]

    def section(number: int) -> Schedule:
        sinks = [catalogue.sink(item) for item in layout.stored(number)]
        return built(layout.sections[number], sinks, None)

    pieces: dict[Item, int] = {}
    """By item that is held in pieces, how many samples they have."""

    def phase(number: int, stage: Stage, size: int) -> Phase:
        kept = [item for item in stage.kept if item not in stage.targets]
        in_pieces = {item for item in kept if item not in offloaded and _has_pieces(layout, item, number, sizes)}
        joined = frozenset(item for item in stage.held if pieces.get(item, size) < size)
        sinks = [catalogue.sink(item, source) for item in stage.targets]
        sinks += [catalogue.piece_sink(item) if item in in_pieces else catalogue.sink(item) for item in kept]
        parts = chunks(layout.facts.num_samples, size)
        lengths = {stop - start for start, stop in parts}
        loops = {length: built(stage.items, sinks, length, stage.held, joined) for length in lengths}
        for item in kept:
            pieces[item] = size if item in in_pieces else layout.facts.num_samples
        return Phase(stage, section(2 * number), loops, parts)

    pairs = enumerate(zip(layout.stages, sizes, strict=True))
    phases = tuple(phase(number, stage, size) for number, (stage, size) in pairs)
    size = min(sizes) if sizes else chunk_size if isinstance(chunk_size, int) else layout.facts.num_samples
    fetches = bool(offloaded) and current_rules().type != "cpu"
    return Plan(layout, size, phases, section(len(layout.sections) - 1), offloaded, fetches, source is not None)


def _has_pieces(layout: Layout, item: Item, number: int, sizes: Sequence[int]) -> bool:
    """Whether an item that a phase keeps is held in pieces: chunks of those who read it are parts or rows of them."""
    if not layout.catalogue.has_pieces(item) or any(item in stage.targets for stage in layout.stages):
        return False
    for reader, stage in enumerate(layout.stages[number + 1 :], number + 1):
        if item not in stage.held:
            break
        small, large = sorted((sizes[number], sizes[reader]))
        if large % small and large < layout.facts.num_samples:
            return False
    return True
