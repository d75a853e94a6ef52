"""What koila counted and measured: users see this module as `koila.metrics`.

Takes: the counters, sites and metrics that the stages left in `koila.events`, and metrics of the user's own: a
`Metric` is reported from its first sample on.
Gives: them by name, and a readable report of all of them.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from koila import events
from koila.events import Metric

__all__ = [
    "Metric",
    "MetricData",
    "counter_names",
    "counter_sites",
    "counter_value",
    "metric_data",
    "metric_names",
    "report",
    "reset",
]

_QUESTIONS: dict[str, tuple[str, ...]] = {
    "what ran": ("runs",),
    "what ran whole although the budget asked for a cut, and why": ("fallback",),
    "what was computed before a run was asked for, and where": ("forced",),
    "what ran eagerly, where and why": ("eager", "eager_because"),
    "what was traced and planned, and why again": ("traces", "plans", "sizes"),
    "what ran out of memory and was tried again": ("retries",),
    "what was warned about": ("warned",),
}
"""What people ask, in the order in which they ask it, and the counters that answer: by their name or their prefix."""
_NUM_SITES_SHOWN = 5


@dataclass(frozen=True, slots=True)
class MetricData:
    """A metric as it stood at one moment."""

    name: str
    """The name, as `stage::what`."""
    total_samples: int
    """How many samples were added, kept or not."""
    accumulator: float
    """The total over all samples, in the unit of the metric."""
    samples: tuple[tuple[float, float], ...]
    """The latest samples, oldest first: (seconds since the epoch, value)."""
    percentiles: dict[float, float]
    """Share → value, over the latest samples."""


def counter_names() -> list[str]:
    """Give the names of all counters, sorted."""
    return sorted(events.counters())


def counter_value(name: str) -> int:
    """Give the value of a counter; one that was never raised is 0.

    >>> reset()
    >>> counter_value("forced::item")
    0
    """
    return events.counters().get(name, 0)


def counter_sites(name: str) -> Counter[str]:
    """Give the places in the user's program at which a counter was raised, with how often.

    >>> reset()
    >>> events.count("forced::item", site="train.py:41")
    >>> counter_sites("forced::item")
    Counter({'train.py:41': 1})
    """
    return events.sites(name)


def metric_names() -> list[str]:
    """Give the names of all metrics, sorted."""
    return sorted(events.metrics())


def metric_data(name: str) -> MetricData:
    """Give a metric as it stands.

    Args:
        name: one of `metric_names()`.

    Returns:
        A copy that later samples do not change.

    Raises:
        KeyError: if there is no such metric.

    >>> reset()
    >>> events.sample("run::seconds", 2.0, events.metric_seconds)
    >>> metric_data("run::seconds").accumulator
    2.0
    """
    metric = events.metrics().get(name)
    if metric is None:
        raise KeyError(f"no metric {name!r}; there are: {', '.join(metric_names()) or 'none'}")
    return _data(metric)


def report() -> str:
    """Write what was counted and measured: first what people ask, with their lines, then everything else.

    Returns:
        The text. A heading without an answer is left out; other counters are grouped by what stands before `::`.

    >>> reset()
    >>> events.count("runs::whole")
    >>> events.count("forced::item", site="train.py:41")
    >>> print(report())
    what ran
      whole: 1
    what was computed before a run was asked for, and where
      item: 1
        train.py:41: 1
    """
    lines = [*_answer_lines(), *_counter_lines(), *_metric_lines()]
    return "\n".join(lines) if lines else "nothing was counted"


def reset() -> None:
    """Forget all counters, sites and metrics."""
    events.reset()


def _data(metric: events.Metric) -> MetricData:
    samples = tuple(metric.samples)
    return MetricData(metric.name, metric.total_samples, metric.accumulator, samples, metric.percentiles())


def _prefix(name: str) -> str:
    prefix, separator, _ = name.partition("::")
    return prefix if separator else ""


def _answer_lines() -> Iterator[str]:
    counters = events.counters()
    for question, prefixes in _QUESTIONS.items():
        names = [name for prefix in prefixes for name in sorted(counters) if _asked(name) == prefix]
        if names:
            yield question
        for name in names:
            yield f"  {_short(name)}: {counters[name]}"
            yield from _site_lines(name)


def _asked(name: str) -> str:
    """What a counter is asked by: its prefix, or its name if it has none."""
    return _prefix(name) or name


def _short(name: str) -> str:
    """A counter below its question; reasons for eager calls say that they are reasons."""
    prefix = _prefix(name)
    return f"because: {name.removeprefix('eager_because::')}" if prefix == "eager_because" else _without(prefix, name)


def _without(prefix: str, name: str) -> str:
    return name.removeprefix(prefix + "::")


def _counter_lines() -> Iterator[str]:
    answered = {prefix for prefixes in _QUESTIONS.values() for prefix in prefixes}
    counters = {name: value for name, value in events.counters().items() if _asked(name) not in answered}
    if counters:
        yield "counters"
    # Counters without a prefix have none to sort by: they come first.
    for prefix, names in groupby(sorted(counters, key=lambda name: (_prefix(name), name)), key=_prefix):
        yield f"  {prefix or '(no prefix)'}"
        for name in names:
            yield f"    {name.removeprefix(prefix + '::')}: {counters[name]}"


def _site_lines(name: str) -> Iterator[str]:
    ranked = events.sites(name).most_common()
    for text, amount in ranked[:_NUM_SITES_SHOWN]:
        yield f"    {text}: {amount}"
    rest = ranked[_NUM_SITES_SHOWN:]
    if rest:
        yield f"    {len(rest)} more: {sum(amount for _, amount in rest)}"


def _metric_lines() -> Iterator[str]:
    metrics = events.metrics()
    if metrics:
        yield "metrics"
    for name in sorted(metrics):
        metric = metrics[name]
        data = _data(metric)
        yield f"  {name}: total {metric.repr_fn(data.accumulator)} over {data.total_samples} samples"
        if data.percentiles:
            yield "    " + ", ".join(f"{p:.0%} {metric.repr_fn(value)}" for p, value in data.percentiles.items())
