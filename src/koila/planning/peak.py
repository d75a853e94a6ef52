"""Bytes: which storages are alive at every step of a schedule, and what a plan needs at its peak.

*Takes* schedules and plans. *Gives* their peaks, and what stands there. A storage dies with the last value in it, or
when a result is written over it; a merge that has begun is there while its loop goes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import ceil
from typing import TYPE_CHECKING, Any

from koila._bytes import format_bytes
from koila.planning.schedule import Schedule, once_per_schedule
from koila.planning.step import Destination, Kind, Sink, Step, Work

if TYPE_CHECKING:
    from koila.planning.plan import Phase, Plan


@dataclass(frozen=True, slots=True)
class Peak:
    """The worst moment of a schedule."""

    num_bytes: int
    """Alive at that moment, of what the schedule made."""
    position: int
    """The position of the step that runs then."""
    alive: tuple[int, ...]
    """The storages that are alive."""


_IN_CHUNKS = (Destination.GATHER, Destination.STREAM, Destination.KEEP)
"""What becomes of values that are neither merged nor stored."""


class Lives:
    """From which to which step each storage of a schedule lives; those that are `placed` lie in an arena."""

    def __init__(self, schedule: Schedule, is_first: bool, placed: frozenset[int] = frozenset()) -> None:
        self.schedule, self.storages = schedule, schedule.storages
        sizes = schedule.storages.num_bytes
        self.sizes = [0 if each in placed else size for each, size in enumerate(sizes)] if placed else sizes
        """By storage, the bytes that it adds to the memory."""
        self.begins: dict[int, int] = {}
        """By position, bytes that appear there and stay: merges that begin."""
        self.last = list(schedule.last_use_of_storage)
        self._stream()
        if is_first:
            self._start_merges()
        self.ends: dict[int, list[int]] = {}
        for storage in range(self.storages.num_outside, len(self.last)):
            self.ends.setdefault(self.last[storage], []).append(storage)

    def _stream(self) -> None:
        """What is handed out to the caller, or held as a piece, is there until the chunk is done."""
        for step in self.schedule.steps:
            if step.kind is Kind.HAND_ON and self._sink(step).destination in (Destination.STREAM, Destination.KEEP):
                self._keep(step.operands[0])

    def _start_merges(self) -> None:
        """What is stored or starts a merge stays alive; what is added to a sum that has begun does not."""
        begun: set[int] = set()
        for position, step in enumerate(self.schedule.steps):
            if not step.sinks or self._sink(step).destination in _IN_CHUNKS:
                continue
            fresh = [index for index in step.sinks if index not in begun]
            begun.update(fresh)
            if step.kind is not Kind.HAND_ON:
                self.begins[position] = sum(self.schedule.sinks[index].state_bytes for index in fresh)
            elif fresh and (self._sink(step).destination is Destination.STORE or step.starts_merge):
                self._keep(step.operands[0])
            elif fresh:
                self.begins[position] = self._sink(step).state_bytes

    def _sink(self, step: Step) -> Sink:
        return self.schedule.sinks[step.sinks[0]]

    def _keep(self, value: int) -> None:
        for storage in self.storages.of[value]:
            self.last[storage] = len(self.schedule.steps)

    def walk(self) -> Iterator[tuple[int, dict[int, None]]]:
        """For each step, the bytes alive while it runs, and the storages that they are."""
        sizes, made_by, of = self.sizes, self.storages.made_by, self.storages.of
        overwritten, begins, ends = self.schedule.overwritten, self.begins, self.ends
        alive: dict[int, None] = {}
        now = 0
        for position, step in enumerate(self.schedule.steps):
            if step.value in overwritten:
                (storage,) = of[overwritten[step.value]]
                del alive[storage]
                now -= sizes[storage]
            for storage in made_by[step.value]:
                alive[storage] = None
                now += sizes[storage]
            now += begins.get(position, 0)
            yield now + step.inside_bytes, alive
            for storage in ends.get(position, ()):
                if storage in alive:
                    del alive[storage]
                    now -= sizes[storage]


def peak_of(schedule: Schedule, is_first: bool = False) -> Peak:
    """The worst moment of a schedule; `is_first`: what it hands on stays alive, it starts the merges or is stored."""
    return _first_peak(schedule) if is_first else _later_peak(schedule)


@once_per_schedule
def _first_peak(schedule: Schedule) -> Peak:
    return _worst(Lives(schedule, is_first=True))


@once_per_schedule
def _later_peak(schedule: Schedule) -> Peak:
    return _worst(Lives(schedule, is_first=False))


def _worst(lives: Lives) -> Peak:
    found = Peak(0, 0, ())
    for position, (now, alive) in enumerate(lives.walk()):
        if now > found.num_bytes:
            found = Peak(now, position, tuple(alive))
    return found


def peak_alone(schedule: Schedule) -> Peak:
    """The worst moment that a lever inside the schedule can change: a section stores what it hands on."""
    return peak_of(schedule, schedule.chunk is None)


def totals(schedule: Schedule) -> list[int]:
    """The bytes alive at each step of a schedule."""
    return [now for now, _ in Lives(schedule, schedule.chunk is None).walk()]


def _no_story() -> None:
    """There is none."""


@dataclass(frozen=True, slots=True)
class Projection:
    """The bytes that a run allocates at its peak."""

    peak_bytes: int
    """Transients, merges, kept values, results and gradients."""
    largest: str
    """What stands at the peak."""
    section: int = 0
    """The section of the plan with the peak."""
    resident: tuple[int, ...] = ()
    """For each section, the bytes that are there beside what its schedule makes."""
    peaks: tuple[int, ...] = ()
    """For each section, the most bytes that are there while it runs."""
    kinds: tuple[tuple[str, int], ...] = ()
    """What stands at the peak: (kind, bytes), together `peak_bytes`."""
    recorded: int | None = None
    """The recorded call that made the largest value at the peak; None in a backward pass."""
    story: Callable[[], Any] = field(default=_no_story, repr=False, compare=False)
    """Gives the `Story` of an unsplit run as long as it is kept for other sizes, else None."""


class _Residents:
    """Whole values that are alive between sections; views share their storage."""

    def __init__(self) -> None:
        self.tokens: dict[Hashable, frozenset[Hashable]] = {}
        """By value, the storages that it lies in."""
        self.sizes: dict[Hashable, int] = {}
        self.num_bytes = 0
        """Bytes of all storages that values lie in."""
        self._holders: Counter[Hashable] = Counter()
        """By storage, how many values lie in it."""

    def add(self, key: Hashable, num_bytes: int) -> None:
        self.free([key])
        self.sizes[key] = num_bytes
        self._hold(key, frozenset([key]))

    def _hold(self, key: Hashable, tokens: frozenset[Hashable]) -> None:
        self.tokens[key] = tokens
        for token in tokens:
            self._holders[token] += 1
            if self._holders[token] == 1:
                self.num_bytes += self.sizes[token]

    def add_stored(self, schedule: Schedule, keys: list[Hashable], section: int) -> None:
        """What a section stores; `keys` are those of the values that it reads."""
        storages = schedule.storages
        for step in schedule.steps:
            if step.kind is Kind.HAND_ON:
                tokens: set[Hashable] = set()
                for storage in storages.of[step.operands[0]]:
                    if storage >= storages.num_outside:
                        self.sizes[section, storage] = storages.num_bytes[storage]
                        tokens.add((section, storage))
                    else:
                        tokens |= self.tokens.get(keys[storages.owners[storage][0]], frozenset())
                key = schedule.sinks[step.sinks[0]].key
                self.free([key])
                self._hold(key, frozenset(tokens))

    def free(self, keys: Iterable[Hashable]) -> None:
        for key in keys:
            for token in self.tokens.pop(key, ()):
                self._holders[token] -= 1
                if not self._holders[token]:
                    self.num_bytes -= self.sizes[token]

    def by_key(self) -> Iterator[tuple[Hashable, int]]:
        """Each storage once, with the first value that holds it."""
        seen: set[Hashable] = set()
        for key, tokens in self.tokens.items():
            for token in tokens - seen:
                seen.add(token)
                yield key, self.sizes[token]


_ARENA = "arena"
"""The key of the buffer among the values that are there."""


class Projector:
    """Walks through the sections of a plan and remembers the worst moment."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.here, self.resident = plan, _Residents(), list[int]()
        self.best = Projection(0, "nothing")
        self.peaks = [0] * (2 * len(plan.phases) + 1)
        self.result_kinds = plan.result_kinds
        if plan.arena is not None:
            self.here.add(_ARENA, plan.arena.held_bytes)
            self.result_kinds = {**plan.result_kinds, _ARENA: "arena"}
        self.pieces: dict[Hashable, list[tuple[int, int]]] = {}
        """By value that is held in pieces, for each piece the sample after its last, and its bytes."""
        self.away: dict[Hashable, int] = {}
        """The bytes of values that must be fetched, chunk by chunk, to be read."""

    def run(self) -> Projection:
        for number, phase in enumerate(self.plan.phases):
            self._section(phase.before, 2 * number)
            self._loop(phase, 2 * number + 1)
        self._section(self.plan.after, 2 * len(self.plan.phases))
        return replace(self.best, resident=tuple(self.resident), peaks=tuple(self.peaks))

    def _section(self, schedule: Schedule, section: int) -> None:
        # What the section reads for the last time is alive until then.
        self.resident.append(self.here.num_bytes)
        self.consider(schedule, self.resident[-1], True, section)
        self.here.add_stored(schedule, [self.plan.key_of(whole) for whole in schedule.wholes], section)
        self.here.free(self.plan.frees[section])

    def _loop(self, phase: Phase, section: int) -> None:
        plan, here = self.plan, self.here
        for sink in phase.sinks:
            if sink.destination is Destination.GATHER:
                here.add(sink.key, 0 if sink.key in plan.offloaded else sink.value_bytes)
                if plan.fetches and sink.key in plan.offloaded:
                    self.away[sink.key] = sink.value_bytes
        merged = [sink for sink in phase.sinks if sink.destination is Destination.MERGE]
        states = sum(sink.state_bytes for sink in merged)
        base = here.num_bytes
        pieces = max(map(_handed_out, phase.loops.values()), default=0)
        base += max(map(self._fetched, phase.loops.values()), default=0)
        self.resident.append(base + states + pieces)
        walk = _PieceWalk(phase, {key: self.pieces[key] for key in plan.frees[section] if key in self.pieces})
        self.resident[-1] += max(walk.grown)
        worst = walk.worst()
        for number, (start, stop) in enumerate(phase.chunks):
            if number in worst:
                # After the first chunk the sums are there, and the caller holds the chunk before.
                beside = states + pieces if number else 0
                self.consider(
                    phase.loops[stop - start], base + walk.grown[number] + beside, not number, section,
                    merged if number else (), pieces if number else 0,
                )  # fmt: skip
            walk.after(number, here)
        self.pieces.update(walk.made)
        for sink in merged:
            here.add(sink.key, sink.value_bytes)
        here.free(plan.frees[section])
        for key in plan.frees[section]:
            self.pieces.pop(key, None)

    def _fetched(self, schedule: Schedule) -> int:
        """The chunks that a loop fetches; all of them may be there at the same time."""
        read = {self.plan.key_of(whole) for whole in schedule.wholes} if self.away else set()
        share = (schedule.chunk or 0) / max(1, self.plan.facts.num_samples)
        return sum(ceil(self.away[key] * share) for key in read & self.away.keys())

    def consider(
        self, schedule: Schedule, base: int, is_first: bool, section: int, merging: Iterable[Sink] = (), pieces: int = 0
    ) -> None:
        """One schedule of the plan, `base` bytes beside it; each is looked at in the order in which it first runs."""
        peak = peak_of(schedule, is_first) if self.plan.arena is None else self._rest(schedule, is_first)
        self.peaks[section] = max(self.peaks[section], base + peak.num_bytes)
        if base + peak.num_bytes <= self.best.peak_bytes:
            return
        kinds = self.beside(merging, pieces)
        hidden = schedule.steps[peak.position].inside_bytes if schedule.steps else 0
        kinds["workspace"] += hidden
        kinds["activations"] += peak.num_bytes - hidden
        found = tuple((kind, size) for kind, size in sorted(kinds.items()) if size)
        text, recorded = describe(schedule, peak)
        self.best = Projection(base + peak.num_bytes, text, section, kinds=found, recorded=recorded)

    def _rest(self, schedule: Schedule, is_first: bool) -> Peak:
        """The worst moment of what a schedule makes outside the arena."""
        return _worst(Lives(schedule, is_first, self.plan.placed(schedule)))

    def beside(self, merging: Iterable[Sink], pieces: int) -> Counter[str]:
        """By kind, the bytes that are there beside what a schedule makes."""
        kinds: Counter[str] = Counter({"results": pieces})
        for sink in merging:
            kinds[self.result_kinds.get(self.plan.key_of(sink.key), "merges")] += sink.state_bytes
        for key, size in self.here.by_key():
            kinds[self.result_kinds.get(key, "kept values")] += size
        return kinds


class _PieceWalk:
    """The pieces of one loop: those that it makes, and those that it reads for the last time, chunk by chunk."""

    def __init__(self, phase: Phase, ending: dict[Hashable, list[tuple[int, int]]]) -> None:
        self.phase, self.ending = phase, ending
        self.made: dict[Hashable, list[tuple[int, int]]] = {}
        self.grown = [0]
        """Before each chunk, and after the last, by how much more is held than before the first."""
        left = {key: list(reversed(pieces)) for key, pieces in ending.items()}
        for start, stop in phase.chunks:
            now = self.grown[-1]
            for key, num_bytes in piece_bytes(phase.loops[stop - start]).items():
                self.made.setdefault(key, []).append((stop, num_bytes))
                now += num_bytes
            for pieces in left.values():
                while pieces and pieces[-1][0] <= stop:
                    now -= pieces.pop()[1]
            self.grown.append(now)

    def worst(self) -> set[int]:
        """The first chunk, and of the later ones of each size the one with the most beside it."""
        found: dict[tuple[bool, int], int] = {}
        for number, (start, stop) in enumerate(self.phase.chunks):
            key = (number == 0, stop - start)
            if key not in found or self.grown[number] > self.grown[found[key]]:
                found[key] = number
        return set(found.values())

    def after(self, number: int, here: _Residents) -> None:
        """What is held after a chunk."""
        if not self.made and not self.ending:
            return
        stop = self.phase.chunks[number][1]
        for key, pieces in self.made.items():
            here.add(key, sum(num_bytes for end, num_bytes in pieces if end <= stop))
        for key, pieces in self.ending.items():
            here.add(key, sum(num_bytes for end, num_bytes in pieces if end > stop))


@once_per_schedule
def piece_bytes(schedule: Schedule) -> dict[Hashable, int]:
    """By value that is held in pieces, the bytes of the piece that a chunk adds."""
    found: dict[Hashable, int] = {}
    for step in schedule.steps:
        if step.kind is Kind.HAND_ON and schedule.sinks[step.sinks[0]].destination is Destination.KEEP:
            storages = schedule.storages.of[step.operands[0]]
            found[schedule.sinks[step.sinks[0]].key] = sum(map(schedule.storages.num_bytes.__getitem__, storages))
    return found


def project(plan: Plan) -> Projection:
    """The peak of a plan: at every step of every section."""
    return Projector(plan).run()


def _handed_out(schedule: Schedule) -> int:
    """The bytes of a chunk that the caller holds while the next one is computed."""
    handed = [step for step in schedule.steps if step.kind is Kind.HAND_ON]
    streamed = [s.operands[0] for s in handed if schedule.sinks[s.sinks[0]].destination is Destination.STREAM]
    return sum(schedule.storages.num_bytes[storage] for value in streamed for storage in schedule.storages.of[value])


def describe(schedule: Schedule, peak: Peak) -> tuple[str, int | None]:
    """What stands at a peak: the step, and the largest value alive with the recorded call that it comes from."""
    if not schedule.steps:
        return "nothing", None
    text, recorded = title(schedule, schedule.steps[peak.position])
    sizes = schedule.storages.value_bytes
    largest = max(peak.alive, key=sizes.__getitem__, default=None)
    if largest is None:
        return text, recorded
    value, place = schedule.storages.owners[largest]
    maker = schedule.steps[schedule.position[value]]
    work: Work | None = maker.work
    name, recorded = title(schedule, maker)
    shape = [] if work is None else list(work.shape(place))
    size = format_bytes(sizes[largest])
    return f"{text}; the largest value there is {name} {shape} ({size})", recorded


def title(schedule: Schedule, step: Step) -> tuple[str, int | None]:
    """What a step computes or hands on, and the recorded call that it comes from."""
    if step.kind is Kind.HAND_ON and step.operands[0] in schedule.position:
        step = schedule.steps[schedule.position[step.operands[0]]]
    work: Work | None = step.work
    return (f"step {step.value}", None) if work is None else (work.label, work.recorded)
