"""Metrics: named series of values, after the ones of PyTorch's lazy core.

*Takes* samples of the stages, and of users. *Gives* totals, the latest samples and their percentiles.
"""

import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

from koila.events.writing import ReprFn, metric_seconds, metric_value

PERCENTILES = (0.01, 0.05, 0.1, 0.2, 0.5, 0.8, 0.9, 0.95, 0.99)


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
    metric = _metrics.get(name)
    if metric is None:
        sample(name, seconds, metric_seconds)
    else:
        metric._add(seconds, time.time())


def spent_seconds() -> Mapping[str, float]:
    """What the calling thread has spent under each name since it began, and goes on to spend; nothing resets it."""
    return _spent.seconds


def metrics() -> dict[str, Metric]:
    """Give a copy of the registry of metrics: name → the live metric."""
    return dict(_metrics)


def forget_metrics() -> None:
    """Forget all samples, and which metrics there are."""
    for metric in list(_metrics.values()):
        metric.reset()
    _metrics.clear()
