"""The memory of a run, step by step: what people look at where the planner looks at the peak only.

*Takes* a plan, or the story of an unsplit run. *Gives* `Stretch`es: each section, the first chunk of each phase and one
of the following, with the bytes by kind while every step runs. The most bytes of all moments are those of `project`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

from koila.planning.peak import Lives, Projector, title
from koila.planning.plan import Plan
from koila.planning.schedule import Schedule
from koila.planning.step import Sink, Work
from koila.planning.stories import Story
from koila.planning.tracker import Life


@dataclass(frozen=True, slots=True)
class Tensor:
    """A value that stands in memory."""

    operator: str
    """What made it."""
    shape: tuple[int, ...]
    num_bytes: int
    recorded: int | None
    """The recorded call that it comes from; None in a backward pass."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The memory while one step runs."""

    operator: str
    """What runs."""
    recorded: int | None
    """The recorded call that it comes from; None in a backward pass."""
    kinds: tuple[tuple[str, int], ...]
    """What is alive: (kind, bytes)."""
    largest: Tensor | None
    """The largest value that the stretch has made and that is alive."""

    @property
    def num_bytes(self) -> int:
        """All that is alive."""
        return sum(size for _, size in self.kinds)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps that run one after the other."""

    title: str
    times: int
    """How often it runs: chunks of one size look alike, from the second on."""
    moments: tuple[Moment, ...]


def plan_timeline(plan: Plan) -> tuple[Stretch, ...]:
    """The stretches of a run by a plan, in order."""
    walk = _Walk(plan)
    walk.run()
    walk.found.sort(key=lambda each: each[0])
    return tuple(stretch for _, stretch in walk.found if stretch.moments)


class _Walk(Projector):
    """Goes through a plan as the projector does, and notes every step."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.found: list[tuple[tuple[int, bool, int], Stretch]] = []
        """Each stretch with what it is sorted by."""

    def consider(
        self, schedule: Schedule, base: int, is_first: bool, section: int, merging: Iterable[Sink] = (), pieces: int = 0
    ) -> None:
        times = 1 if is_first else self._num_later(schedule, section)
        lives = Lives(schedule, is_first, self.plan.placed(schedule))
        moments = tuple(_moments(lives, self.beside(merging, pieces), self._kind))
        stretch = Stretch(self._title(schedule, is_first, section, times), times, moments)
        self.found.append(((section, not is_first, -(schedule.chunk or 0)), stretch))

    def _kind(self, sink: Sink) -> str:
        return self.result_kinds.get(self.plan.key_of(sink.key), "merges")

    def _num_later(self, schedule: Schedule, section: int) -> int:
        return sum(stop - start == schedule.chunk for start, stop in self.plan.phases[section // 2].chunks[1:])

    def _title(self, schedule: Schedule, is_first: bool, section: int, times: int) -> str:
        num_phases = len(self.plan.phases)
        if schedule.chunk is None:
            return f"before phase {section // 2 + 1}" if section < 2 * num_phases else "at the end"
        name = f"phase {section // 2 + 1} of {num_phases}"
        if is_first:
            return f"{name}, first chunk"
        return f"{name}, {times} more chunk{'s' if times > 1 else ''} of {schedule.chunk}"


class _Largest:
    """The largest of the values that are alive."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []
        self._alive: set[int] = set()

    def add(self, number: int, num_bytes: int) -> None:
        self._alive.add(number)
        heappush(self._heap, (-num_bytes, number))

    def remove(self, number: int) -> None:
        self._alive.discard(number)

    def find(self) -> int | None:
        while self._heap and self._heap[0][1] not in self._alive:
            heappop(self._heap)
        return self._heap[0][1] if self._heap else None


def _moments(lives: Lives, beside: Counter[str], kind_of: Callable[[Sink], str]) -> Iterator[Moment]:
    schedule, largest, before = lives.schedule, _Largest(), set[int]()
    sizes, begun = schedule.storages.value_bytes, Counter[str]()
    for position, (now, alive) in enumerate(lives.walk()):
        step = schedule.steps[position]
        present = alive.keys()
        for storage in present - before:
            largest.add(storage, sizes[storage])
        for storage in before - present:
            largest.remove(storage)
        before = set(present)
        if position in lives.begins:
            begun[kind_of(schedule.sinks[step.sinks[0]])] += lives.begins[position]
        kinds = beside + begun
        kinds["workspace"] += step.inside_bytes
        kinds["activations"] += now - begun.total() - step.inside_bytes
        name, recorded = title(schedule, step)
        yield Moment(name, recorded, _sorted(kinds), _tensor(schedule, largest.find()))


def _tensor(schedule: Schedule, storage: int | None) -> Tensor | None:
    if storage is None:
        return None
    value, place = schedule.storages.owners[storage]
    maker = schedule.steps[schedule.position[value]]
    work: Work | None = maker.work
    name, recorded = title(schedule, maker)
    shape = () if work is None else tuple(work.shape(place))
    return Tensor(name, shape, schedule.storages.value_bytes[storage], recorded)


def _sorted(kinds: Counter[str]) -> tuple[tuple[str, int], ...]:
    return tuple((kind, size) for kind, size in sorted(kinds.items()) if size)


def story_timeline(story: Story) -> tuple[Stretch, ...]:
    """The stretches of an unsplit run: forward, and backward if there is one."""
    births: dict[int, list[int]] = {}
    deaths: dict[int, list[int]] = {}
    for number, life in enumerate(story.lives):
        births.setdefault(life.born, []).append(number)
        if life.died is not None:
            deaths.setdefault(life.died, []).append(number)
    largest, kinds, now, place = _Largest(), Counter[str](), 0, _place(story.lives[0]) if story.lives else None
    forward, backward = list[Moment](), list[Moment]()
    for position, (change, operator) in enumerate(zip(story.trail, story.operators, strict=True)):
        now += change
        for number in births.get(position, ()):
            life = story.lives[number]
            place = _place(life)
            largest.add(number, life.birth.num_bytes)
            kinds[_kind(life)] += life.birth.num_bytes
        for number in deaths.get(position, ()):
            largest.remove(number)
            kinds[_kind(story.lives[number])] -= story.lives[number].birth.num_bytes
        if change > 0:
            at = Counter(kinds)
            at["workspace"] += now - sum(kinds.values())
            found = largest.find()
            moment = Moment(operator, place, _sorted(at), None if found is None else _born(story.lives[found]))
            (backward if place is None else forward).append(moment)
    stretches = Stretch("forward", 1, tuple(forward)), Stretch("backward", 1, tuple(backward))
    return tuple(stretch for stretch in stretches if stretch.moments)


def _place(life: Life) -> int | None:
    return life.place if isinstance(life.place, int) else None


def _kind(life: Life) -> str:
    return "activations" if _place(life) is not None else "gradients"


def _born(life: Life) -> Tensor:
    return Tensor(life.birth.operator, life.birth.shape, life.birth.num_bytes, _place(life))
