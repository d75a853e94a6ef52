"""Metrics, counters and events."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, dataclass, fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

import koila  # noqa: F401
from koila import events
from koila.events import ChunkEnd, Event, Fallback, Forced, Metric, PhaseStart, RunEnd, RunStart, counting, listeners

OWN = listeners._listeners
"""koila's own listeners: the reports."""


@pytest.fixture(autouse=True)
def clean_registry() -> Iterator[None]:
    events.reset()
    yield
    events.reset()


# Metrics.


def test_the_accumulator_counts_samples_that_are_no_longer_kept() -> None:
    metric = Metric("sizes", max_samples=3)
    for value in range(10):
        metric.add_sample(value, timestamp=float(value))
    assert metric.accumulator == 45
    assert metric.total_samples == 10
    assert list(metric.samples) == [(7.0, 7), (8.0, 8), (9.0, 9)]


def test_a_sample_without_a_timestamp_is_taken_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 12.5)
    metric = Metric("sizes")
    metric.add_sample(1)
    assert list(metric.samples) == [(12.5, 1)]


def test_percentiles_are_over_the_kept_samples() -> None:
    metric = Metric("sizes", max_samples=100)
    for value in range(1000, 0, -1):
        metric.add_sample(value)
    assert metric.percentiles() == {0.01: 1, 0.05: 5, 0.1: 10, 0.2: 20, 0.5: 50, 0.8: 80, 0.9: 90, 0.95: 95, 0.99: 99}


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=50), st.floats(0, 1))
def test_a_percentile_is_the_smallest_value_with_that_share_below(values: list[float], point: float) -> None:
    metric = Metric("sizes")
    for value in values:
        metric.add_sample(value)
    found = metric.percentiles((point,))[point]
    assert found in values
    assert sum(value <= found for value in values) >= point * len(values) - 1e-6
    assert sum(value < found for value in values) <= point * len(values)


def test_percentiles_of_nothing() -> None:
    assert Metric("sizes").percentiles() == {}


def test_a_percentile_point_is_a_share() -> None:
    with pytest.raises(ValueError, match="a share from 0 to 1, not 50"):
        Metric("sizes").percentiles((50,))


def test_a_metric_keeps_at_least_one_sample() -> None:
    with pytest.raises(ValueError, match="metric 'sizes' must keep at least 1 sample, not 0"):
        Metric("sizes", max_samples=0)


def test_resetting_a_metric() -> None:
    metric = Metric("sizes")
    metric.add_sample(1)
    metric.reset()
    assert (metric.accumulator, metric.total_samples, list(metric.samples)) == (0, 0, [])


def test_no_sample_is_lost_between_threads() -> None:
    _in_threads(lambda: [events.sample("sizes", 1) for _ in range(500)])
    assert events.metrics()["sizes"].accumulator == 2000


def test_the_first_sample_decides_how_values_are_written() -> None:
    events.sample("sizes", 1024, events.metric_bytes)
    events.sample("sizes", 1024)
    metric = events.metrics()["sizes"]
    assert metric.repr_fn(metric.accumulator) == "2.0 KiB"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 ns"),
        (2e-9, "2 ns"),
        (1e-6, "1 us"),
        (0.00012345, "123.5 us"),
        (0.99999, "1 s"),
        (59.9, "59.9 s"),
        (59.99, "1 min 00 s"),
        (119.7, "2 min 00 s"),
        (-90, "-1 min 30 s"),
    ],
)
def test_seconds(value: float, text: str) -> None:
    assert events.metric_seconds(value) == text


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (3.0, "3"), (1e6, "1000000"), (0.5, "0.5"), (2 / 3, "0.6667")])
def test_values(value: float, text: str) -> None:
    assert events.metric_value(value) == text


# Counters.


def test_counting() -> None:
    events.count("capture::recorded")
    events.count("capture::recorded", 4)
    assert events.counters() == {"capture::recorded": 5}
    assert events.sites("capture::recorded") == Counter()


def test_reading_does_not_create() -> None:
    assert events.sites("forced::item") == Counter()
    assert events.counters() == {}
    assert events.metrics() == {}


def test_sites_of_text_and_of_callables_are_one() -> None:
    events.count("forced::item", site="train.py:41")
    events.count("forced::item", 2, site=lambda: "train.py:41")
    events.count("forced::item", site=lambda: "train.py:50")
    assert events.sites("forced::item") == Counter({"train.py:41": 3, "train.py:50": 1})


def test_a_site_is_resolved_only_when_read() -> None:
    asked: list[str] = []

    def site() -> str:
        asked.append("asked")
        return "train.py:41"

    for _ in range(1000):
        events.count("forced::item", site=site)
    assert asked == []
    assert events.sites("forced::item") == Counter({"train.py:41": 1000})
    assert asked == ["asked"]


@dataclass(frozen=True)
class _Place:
    line: int

    def __call__(self) -> str:
        return f"train.py:{self.line}"


def test_callables_of_the_same_place_share_an_entry() -> None:
    for step in range(2000):
        events.count("forced::item", site=_Place(step % 2))
    assert len(counting._sites["forced::item"].amounts) == 2
    assert events.sites("forced::item") == Counter({"train.py:0": 1000, "train.py:1": 1000})


def test_fresh_callables_of_few_places_are_all_attributed() -> None:
    for step in range(2000):
        events.count("forced::item", site=lambda line=step % 4: f"train.py:{line}")
    assert events.sites("forced::item") == Counter({f"train.py:{line}": 500 for line in range(4)})


@pytest.mark.parametrize("make", [str, _Place])
def test_distinct_sites_are_bounded_and_none_is_dropped(make: type[str] | type[_Place]) -> None:
    for line in range(1000):
        events.count("forced::item", site=make(line))
    events.count("forced::item", site=make(0))
    sites = events.sites("forced::item")
    assert len(counting._sites["forced::item"].amounts) == events.MAX_SITES
    assert len(sites) == events.MAX_SITES + 1
    assert sites[events.OTHER_SITES] == 1000 - events.MAX_SITES
    assert sites.total() == events.counters()["forced::item"] == 1001


def test_reset_forgets_everything_counted() -> None:
    events.count("forced::item", site="train.py:41")
    events.sample("sizes", 1)
    events.reset()
    assert (events.counters(), events.metrics(), events.sites("forced::item")) == ({}, {}, Counter())


def test_copies_do_not_write_back() -> None:
    events.count("a")
    events.counters()["a"] = 7
    assert events.counters() == {"a": 1}


# Events.

EVENTS: list[Event] = [
    RunStart("program", num_nodes=3, num_samples=9, chunk_size=4, num_phases=1),
    PhaseStart(0, num_chunks=3),
    ChunkEnd(0, 0, num_samples=4),
    RunEnd(seconds=0.5, num_chunks=3),
    Fallback("sort", reason="no rule", site="train.py:41"),
    Forced("item", site="train.py:41"),
]


def test_listeners_hear_every_event_in_order_until_they_unsubscribe() -> None:
    heard: list[Event] = []
    unsubscribe = events.subscribe(heard.append)
    try:
        for event in EVENTS:
            events.emit(event)
    finally:
        unsubscribe()
    events.emit(EVENTS[0])
    assert heard == EVENTS


def test_subscribing_twice_is_two_subscriptions() -> None:
    heard: list[Event] = []
    first, second = events.subscribe(heard.append), events.subscribe(heard.append)
    first()
    first()
    events.emit(EVENTS[0])
    second()
    events.emit(EVENTS[0])
    assert heard == [EVENTS[0]]


def test_a_listener_may_unsubscribe_while_it_listens() -> None:
    heard: list[Event] = []

    def once(event: Event) -> None:
        heard.append(event)
        unsubscribe()

    unsubscribe = events.subscribe(once)
    events.emit(EVENTS[0])
    events.emit(EVENTS[1])
    assert heard == [EVENTS[0]]


def test_what_a_listener_raises_reaches_the_emitter() -> None:
    def broken(event: Event) -> None:
        raise RuntimeError("broken listener")

    unsubscribe = events.subscribe(broken)
    try:
        with pytest.raises(RuntimeError, match="broken listener"):
            events.emit(EVENTS[0])
    finally:
        unsubscribe()


def test_reset_keeps_listeners() -> None:
    heard: list[Event] = []
    unsubscribe = events.subscribe(heard.append)
    events.reset()
    events.emit(EVENTS[0])
    unsubscribe()
    assert heard == [EVENTS[0]]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_events_are_frozen(event: Event) -> None:
    name = fields(event)[0].name
    with pytest.raises(FrozenInstanceError, match=f"cannot assign to field '{name}'"):
        setattr(event, name, None)


def test_subscriptions_from_many_threads() -> None:
    _in_threads(lambda: [events.subscribe(print)() for _ in range(200)])
    assert listeners._listeners == OWN


def _in_threads(work: object) -> None:
    threads = [threading.Thread(target=work) for _ in range(4)]  # type: ignore[arg-type]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
