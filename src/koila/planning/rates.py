"""Rates of a nominal processor: `python -m benchmarks.costs` shows them beside those of the machine at hand.

*Takes* nothing. *Gives* numbers. Only their ratios matter: they decide which of two plans is the faster one. How many
times faster an accelerator is, its row in `koila.planning.devices` says.
"""

from __future__ import annotations

from koila.planning.devices import current_rules

FLOPS = {"convolution": 55e9, "attention": 40e9, "": 75e9}
"""Floating-point operations per second of a dense kernel, by a part of its name."""
BYTES = {
    "batch_norm_backward": 12e9, "batch_norm": 3e9, "softmax": 3e9, "norm": 8e9, "indices_backward": 16e9, "pool": 1e9,
    "var_mean": 8e9, "var": 0.7e9, "std": 0.7e9, "upsample": 1.5e9, "cum": 1e9, "sort": 0.5e9, "topk": 0.4e9,
    "argm": 0.7e9, "slow": 5e9, "plain": 30e9, "": 8e9,
}  # fmt: skip
"""Bytes per second, read and written: of kernels with such a name, of pointwise ones, and of all others."""
FRESH = 1.6e9
"""Bytes per second at which the system hands out pages; a large result is made of new ones every time."""
LARGE = 32 * 2**20
"""From this size on, the allocator gives pages back at once."""
KEPT = 2 * LARGE
"""What the heap keeps from step to step at the most, if nothing else lies behind it; what a step needs beyond it may be
made of new pages once a step. (Page faults of two networks: none at 86 and 101 MiB, 0 to 31 MiB at 152, 85 to 240 at
171, 121 at 305.)"""
SHARING = 4e-6
"""Seconds that threads take to share a kernel out and to wait for one another; one of them does what is smaller."""


def shared_seconds(seconds: float) -> float:
    """The expected time, on the threads that plans are made for, of what one thread computes in so many seconds.

    >>> from koila.planning.devices import planning_for
    >>> with planning_for("cpu", num_threads=4):
    ...     shared_seconds(400e-6), shared_seconds(4e-6)
    (0.000104, 4e-06)
    """
    rules = current_rules()
    alone = seconds * rules.speed_threads
    return min(alone, alone / rules.num_threads + SHARING) if rules.runs_cpu_kernels else seconds


def copy_seconds(num_bytes: int) -> float:
    """The expected time of a step that only copies so many bytes."""
    rules = current_rules()
    return rules.call_seconds + shared_seconds(num_bytes / BYTES[""] / rules.byte_speed)


def fresh_bytes(num_bytes: int) -> int:
    """How many bytes of a result are made of new pages every time: all of it, or nothing."""
    return num_bytes if num_bytes >= LARGE and current_rules().has_pages else 0


def heap_seconds(peak_bytes: int, num_fresh: int) -> float:
    """What the pages of a step cost that needs so many bytes; results that pay for their own are in `num_fresh`."""
    return max(0, peak_bytes - KEPT - num_fresh) / FRESH if current_rules().has_pages else 0.0


def offload_seconds(num_bytes: int) -> float:
    """What it costs to offload so many bytes and to fetch them again."""
    rules = current_rules()
    return 2 * num_bytes / rules.offload_rate + 10 * rules.call_seconds
