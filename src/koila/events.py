"""Events, counters and metrics: every stage emits them, reporting listens (Rule 6).

Takes: names with amounts or values, and events, from every stage.
Gives: the running counters with their sites, the metrics, and the events to whoever subscribed.

A leaf: it imports the standard library only. Metrics follow the ones of PyTorch's lazy core. Counters take no lock,
because `count` is called for every recorded function: two threads that count the same name at the same instant may
lose one of the two.
"""

import logging
import math
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

MAX_SITES = 256
"""How many distinct sites a counter keeps; what comes after them is counted under `OTHER_SITES`."""
OTHER_SITES = "(other sites)"
PERCENTILES = (0.01, 0.05, 0.1, 0.2, 0.5, 0.8, 0.9, 0.95, 0.99)

ReprFn: TypeAlias = Callable[[float], str]
Site: TypeAlias = str | Callable[[], str]


# How values are written.


def metric_value(value: float) -> str:
    """Write a plain number.

    >>> metric_value(3.0), metric_value(0.123456)
    ('3', '0.1235')
    """
    return str(int(value)) if float(value).is_integer() else f"{value:.4g}"


def metric_bytes(value: float) -> str:
    """Write bytes in binary units.

    >>> metric_bytes(512), metric_bytes(1.5 * 2**20)
    ('512 B', '1.5 MiB')
    """
    if abs(value) < 1024:
        return f"{value:.0f} B"
    scaled = value / 1024
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        # What would be rounded up to 1024.0 belongs to the next unit.
        if abs(scaled) < 1023.95:
            return f"{scaled:.1f} {unit}"
        scaled /= 1024
    return f"{scaled:.1f} PiB"


def metric_seconds(value: float) -> str:
    """Write seconds, with the unit that suits them.

    >>> metric_seconds(0.0123), metric_seconds(2.5), metric_seconds(125)
    ('12.3 ms', '2.5 s', '2 min 05 s')
    """
    if abs(value) >= 59.95:
        minutes, seconds = divmod(round(abs(value)), 60)
        return f"{'-' if value < 0 else ''}{minutes} min {seconds:02d} s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(value) >= 0.99995 * scale:
            return f"{value / scale:.4g} {unit}"
    return f"{value / 1e-9:.4g} ns"


# Metrics.


class Metric:
    """A named series of values: a running total over all of them, the latest of them one by one.

    A metric is reported from its first sample on, a user's own as well as koila's. Samples of a second metric of the
    same name are added to the reported one, too.

    Args:
        name: the name, as `stage::what`.
        repr_fn: how a value is written in a report.
        max_samples: how many of the latest samples are kept.

    >>> metric = Metric("run::seconds", repr_fn=metric_seconds, max_samples=2)
    >>> for seconds in (1.0, 2.0, 3.0):
    ...     metric.add_sample(seconds, timestamp=0.0)
    >>> metric.accumulator, metric.total_samples, list(metric.samples)
    (6.0, 3, [(0.0, 2.0), (0.0, 3.0)])
    """

    def __init__(self, name: str, repr_fn: ReprFn = metric_value, max_samples: int = 1024) -> None:
        if max_samples < 1:
            raise ValueError(f"metric {name!r} must keep at least 1 sample, not {max_samples}")
        self.name = name
        self.repr_fn = repr_fn
        self.max_samples = max_samples
        self.samples: deque[tuple[float, float]] = deque(maxlen=max_samples)
        self.accumulator = 0.0
        self.total_samples = 0
        self._lock = threading.RLock()  # Ctrl-C right before it is released must not stop its own thread for good.

    def add_sample(self, value: float, timestamp: float | None = None) -> None:
        """Add one value, at `timestamp` in seconds since the epoch (default: now)."""
        moment = time.time() if timestamp is None else timestamp
        reported = _metrics.setdefault(self.name, self)
        if reported is not self:
            reported._add(value, moment)
        self._add(value, moment)

    def _add(self, value: float, moment: float) -> None:
        with self._lock:
            self.samples.append((moment, value))
            self.accumulator += value
            self.total_samples += 1

    def percentiles(self, points: Sequence[float] = PERCENTILES) -> dict[float, float]:
        """Give for each point the smallest kept value that at least this share of the kept values does not exceed.

        Args:
            points: shares from 0 to 1.

        Returns:
            Point → value; empty when there are no samples.

        Raises:
            ValueError: if a point is not a share.

        >>> metric = Metric("sizes")
        >>> for size in range(1, 101):
        ...     metric.add_sample(size)
        >>> metric.percentiles((0.5, 0.99))
        {0.5: 50, 0.99: 99}
        """
        for point in points:
            if not 0.0 <= point <= 1.0:
                raise ValueError(f"a percentile point is a share from 0 to 1, not {point}")
        with self._lock:
            values = sorted(value for _, value in self.samples)
        return {point: values[_rank(point, len(values))] for point in points} if values else {}

    def reset(self) -> None:
        """Forget all samples."""
        with self._lock:
            self.samples.clear()
            self.accumulator = 0.0
            self.total_samples = 0


def _rank(point: float, num_values: int) -> int:
    # 0.07 * 100 is a little more than 7: without rounding, the rank would be one too high.
    return max(math.ceil(round(point * num_values, 9)) - 1, 0)


_metrics: dict[str, Metric] = {}


def sample(name: str, value: float, repr_fn: ReprFn = metric_value) -> None:
    """Add a value to the metric of that name; the first call for a name decides its `repr_fn`."""
    metric = _metrics.get(name)
    (Metric(name, repr_fn) if metric is None else metric).add_sample(value)


class _Spent(threading.local):
    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)


_spent = _Spent()


def spend(name: str, seconds: float) -> None:
    """Add seconds to the metric of that name, and to what the calling thread has spent under it."""
    _spent.seconds[name] += seconds
    sample(name, seconds, metric_seconds)


def spent_seconds(name: str) -> float:
    """What the calling thread has spent under a name since it began; nothing resets it."""
    return _spent.seconds[name]


def metrics() -> dict[str, Metric]:
    """Give a copy of the registry of metrics: name → the live metric."""
    return dict(_metrics)


# Counters.


class _Sites:
    """The places at which one counter was raised: at most `MAX_SITES` of them, as text or as what makes the text."""

    __slots__ = ("amounts", "num_callables", "num_other")

    def __init__(self) -> None:
        self.amounts: dict[Site, int] = {}
        self.num_callables = 0
        self.num_other = 0

    def add(self, site: Site, amount: int) -> None:
        amounts = self.amounts
        known = amounts.get(site)
        if known is not None:
            amounts[site] = known + amount
        elif len(amounts) < MAX_SITES:
            amounts[site] = amount
            self.num_callables += not isinstance(site, str)
        else:
            self._add_when_full(site, amount)

    def _add_when_full(self, site: Site, amount: int) -> None:
        # Different callables may stand for one place: as text they share an entry and make room.
        if self.num_callables:
            self.amounts = dict[Site, int](self._by_text().items())
            self.num_callables = 0
        text = _site_text(site)
        if text in self.amounts or len(self.amounts) < MAX_SITES:
            self.amounts[text] = self.amounts.get(text, 0) + amount
        else:
            self.num_other += amount

    def _by_text(self) -> Counter[str]:
        texts: Counter[str] = Counter()
        for site, amount in list(self.amounts.items()):
            texts[_site_text(site)] += amount
        return texts

    def resolve(self) -> Counter[str]:
        texts = self._by_text()
        if self.num_other:
            texts[OTHER_SITES] += self.num_other
        return texts


def _site_text(site: Site) -> str:
    return site if isinstance(site, str) else site()


_counts: defaultdict[str, int] = defaultdict(int)
_sites: dict[str, _Sites] = {}


def count(name: str, amount: int = 1, site: Site | None = None) -> None:
    """Raise a counter.

    Args:
        name: the counter, as `prefix::what`.
        amount: by how much.
        site: the place in the user's program, as text, or as a hashable callable that is asked for the text only when
            sites are read (or when a counter has `MAX_SITES` of them). Callables that compare equal for the same place
            share one entry.

    >>> reset()
    >>> count("forced::item", site="train.py:41")
    >>> count("forced::item", site=lambda: "train.py:41")
    >>> counters()["forced::item"], sites("forced::item")
    (2, Counter({'train.py:41': 2}))
    """
    _counts[name] += amount
    if site is not None:
        _add_site(name, site, amount)


def count_all(amounts: Mapping[str, int]) -> None:
    """Raise several counters, without sites.

    >>> reset()
    >>> count_all({"runs": 1, "executed::relu": 2})
    >>> counters()
    {'runs': 1, 'executed::relu': 2}
    """
    for name, amount in amounts.items():
        _counts[name] += amount


def _add_site(name: str, site: Site, amount: int) -> None:
    known = _sites.get(name)
    if known is None:
        known = _sites.setdefault(name, _Sites())
    known.add(site, amount)


def forced(why: str, site: Site) -> None:
    """Count and tell that a value had to be computed before a run was asked for (Rule 6).

    Args:
        why: what asked for the value: item, print, nonzero.
        site: the place in the user's program, as for `count`; its text is made only if somebody listens.

    >>> reset()
    >>> forced("item", "train.py:41")
    >>> counters()
    {'forced::item': 1}
    """
    count(f"forced::{why}", site=site)
    if is_heard(Forced):
        emit(Forced(why, _site_text(site)))


def counters() -> dict[str, int]:
    """Give a copy of all counters: name → value."""
    return dict(_counts)


def sites(name: str) -> Counter[str]:
    """Give the places at which a counter was raised: text → amount; empty when none were given."""
    known = _sites.get(name)
    return known.resolve() if known is not None else Counter()


def reset() -> None:
    """Forget all counters, sites and samples; listeners stay subscribed."""
    _counts.clear()
    _sites.clear()
    for metric in list(_metrics.values()):
        metric.reset()
    _metrics.clear()


# Saying what takes long.


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


# Events.


@dataclass(frozen=True, slots=True)
class RunStart:
    """A plan begins to run."""

    program: str
    """What is run: the name or the hash of the program."""
    num_nodes: int
    """The nodes of the program."""
    num_samples: int
    """The size of the whole batch, in samples."""
    chunk_size: int
    """The size of a chunk, in samples."""
    num_phases: int
    """The phases of the plan."""


@dataclass(frozen=True, slots=True)
class PhaseStart:
    """A phase of the running plan begins."""

    index: int
    """Which phase, from 0."""
    num_chunks: int
    """The chunks of this phase."""


@dataclass(frozen=True, slots=True)
class ChunkEnd:
    """A chunk of the running phase is done."""

    phase: int
    """Which phase, from 0."""
    index: int
    """Which chunk of the phase, from 0."""
    num_samples: int
    """The size of this chunk, in samples."""


@dataclass(frozen=True, slots=True)
class RunEnd:
    """The run is done and committed."""

    seconds: float
    """How long the run took, in seconds."""
    num_chunks: int
    """The chunks of all phases."""


@dataclass(frozen=True, slots=True)
class StepEnd:
    """Something that was asked for is there: a value that was read, or a backward pass."""

    decision: Any
    """The `Decision` by which it ran; None if nothing had to be run but PyTorch's own backward."""
    seconds: float
    """How long it took in all, in seconds."""
    trace_seconds: float
    """How much of that was tracing."""
    plan_seconds: float
    """How much of that was planning."""
    phase_seconds: tuple[float, ...]
    """The time of each phase of a split run."""
    measured_bytes: int | None
    """What was allocated at the peak, inside `koila.measure()`."""
    retries: int
    """How often memory ran out."""
    fallbacks: tuple[str, ...]
    """What could not be done as asked, and why."""
    num_calls: int
    """The recorded calls that were run."""
    continues: bool
    """Whether it is the second half of the step before: a backward pass after the value was read."""
    follows: bool
    """Whether it starts from what the step before computed, without a backward pass: an accuracy after a loss."""
    scopes: tuple[Any, ...] = ()
    """Who wanted it measured."""


@dataclass(frozen=True, slots=True)
class Fallback:
    """Something was done in a weaker way than asked for (Rule 6)."""

    what: str
    """What was weakened: an operator, a plan, a delegate."""
    reason: str
    """Why."""
    site: str | None = None
    """The user's file:line."""


@dataclass(frozen=True, slots=True)
class Forced:
    """A lazy value had to be computed before a run was asked for (Rule 6)."""

    why: str
    """What asked for the value: item, print, nonzero."""
    site: str | None = None
    """The user's file:line."""


Event: TypeAlias = RunStart | PhaseStart | ChunkEnd | RunEnd | StepEnd | Fallback | Forced
Listener: TypeAlias = Callable[[Event], None]

_lock = threading.Lock()
_subscriptions: dict[object, tuple[Listener, tuple[type, ...]]] = {}
_listeners: tuple[tuple[Listener, tuple[type, ...]], ...] = ()
"""Each with the kinds of events that it wants; an empty tuple for all of them."""
_heard: frozenset[type] | None = frozenset()
"""The kinds of events that anybody wants; None for all of them."""


def subscribe(listener: Listener, *kinds: type) -> Callable[[], None]:
    """Have `listener` called with every event, in the thread that emits it, until the result is called.

    Args:
        listener: called with each event; what it raises goes to the emitter.
        kinds: the classes of events that it wants; all of them if none is named.

    Returns:
        A function that ends this subscription; a second call of it does nothing.

    >>> seen = []
    >>> unsubscribe = subscribe(seen.append)
    >>> emit(Forced("item", "train.py:41"))
    >>> unsubscribe()
    >>> seen
    [Forced(why='item', site='train.py:41')]
    """
    token = object()
    with _lock:
        _subscriptions[token] = listener, kinds
        _publish()

    def unsubscribe() -> None:
        with _lock:
            _subscriptions.pop(token, None)
            _publish()

    return unsubscribe


def _publish() -> None:
    # A new tuple each time: `emit` walks over the one it found, without a lock.
    global _listeners, _heard
    _listeners = tuple(_subscriptions.values())
    wanted = [kinds for _, kinds in _listeners]
    _heard = None if () in wanted else frozenset(kind for kinds in wanted for kind in kinds)


def emit(event: Event) -> None:
    """Hand an event to every listener, in the order of subscription."""
    for listener, kinds in _listeners:
        if not kinds or type(event) in kinds:
            listener(event)


def is_heard(kind: type) -> bool:
    """Whether anybody wants events of a class."""
    return _heard is None or kind in _heard
