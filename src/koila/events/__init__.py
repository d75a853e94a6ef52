"""Events, counters and metrics: every stage emits them, reporting listens (Rule 6).

*Takes* names with amounts or values, and events, from every stage. *Gives* the running counters with their sites, the
metrics, and the events to whoever subscribed.

A leaf: it imports the standard library only.
"""

from koila.events.counting import (
    MAX_SITES,
    OTHER_SITES,
    Site,
    Tally,
    count,
    count_all,
    counters,
    forget_counters,
    site_text,
    sites,
)
from koila.events.kinds import ChunkEnd, Event, Fallback, Forced, PhaseStart, RunEnd, RunStart, StepEnd
from koila.events.listeners import Listener, emit, is_heard, subscribe
from koila.events.metric import PERCENTILES, Metric, forget_metrics, metrics, sample, spend, spent_seconds
from koila.events.patience import Wait, waiting
from koila.events.writing import ReprFn, metric_bytes, metric_seconds, metric_value

__all__ = [
    "MAX_SITES",
    "OTHER_SITES",
    "PERCENTILES",
    "ChunkEnd",
    "Event",
    "Fallback",
    "Forced",
    "Listener",
    "Metric",
    "PhaseStart",
    "ReprFn",
    "RunEnd",
    "RunStart",
    "Site",
    "StepEnd",
    "Tally",
    "Wait",
    "count",
    "count_all",
    "counters",
    "emit",
    "forced",
    "is_heard",
    "metric_bytes",
    "metric_seconds",
    "metric_value",
    "metrics",
    "reset",
    "sample",
    "sites",
    "spend",
    "spent_seconds",
    "subscribe",
    "waiting",
]


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
        emit(Forced(why, site_text(site)))


def reset() -> None:
    """Forget all counters, sites and samples; listeners stay subscribed."""
    forget_counters()
    forget_metrics()
