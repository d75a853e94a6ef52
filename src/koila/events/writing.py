"""How metrics are written: plain numbers, bytes, seconds.

*Takes* a number. *Gives* the text that a person reads.
"""

from collections.abc import Callable
from typing import TypeAlias

ReprFn: TypeAlias = Callable[[float], str]


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
