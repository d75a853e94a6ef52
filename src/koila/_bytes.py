"""How koila reads and writes amounts of memory: MB = 10^6, MiB = 2^20.

Takes: an int, or a text such as "512MiB".
Gives: a number of bytes, or a text such as "1.9 GiB".
"""

import re
from decimal import Decimal

from koila.events import metric_bytes

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgtp", start=1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgtp", start=1)},
}
_PATTERN = re.compile(r"\s*(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>[a-z]*)\s*", re.IGNORECASE)
_ACCEPTED = 'accepted: an int of bytes, or a text such as "512MiB", "1.5GB" or "1024" (kB, MB, GB, TB, PB count '
_ACCEPTED += "in 1000s, KiB, MiB, GiB, TiB, PiB in 1024s)"


def format_bytes(num_bytes: int) -> str:
    """Write an amount of memory with one decimal in the binary unit that suits it.

    Args:
        num_bytes: the amount in bytes.

    Returns:
        The text.

    >>> format_bytes(2 * 2**30 - 100 * 2**20)
    '1.9 GiB'
    """
    return metric_bytes(num_bytes)


def parse_bytes(amount: int | str) -> int:
    """Read an amount of memory; a fraction of a byte is cut off.

    Args:
        amount: an int of bytes, or a text with a unit (upper or lower case); a whole number without a unit is bytes.

    Returns:
        The amount in bytes.

    Raises:
        ValueError: if the amount is negative or not understood.

    >>> parse_bytes("512MiB"), parse_bytes("1.5GB"), parse_bytes(1024)
    (536870912, 1500000000, 1024)
    """
    if isinstance(amount, int) and not isinstance(amount, bool):
        return _not_negative(amount)
    match = _PATTERN.fullmatch(amount) if isinstance(amount, str) else None
    if match is None:
        raise _not_understood(amount)
    number, unit = match["number"], match["unit"].lower()
    # "0.8" is meant as a share by somebody who writes it, never as bytes.
    if unit not in _UNITS or (unit == "" and "." in number):
        raise _not_understood(amount)
    return int(Decimal(number) * _UNITS[unit])


def _not_negative(num_bytes: int) -> int:
    if num_bytes < 0:
        raise _not_understood(num_bytes)
    return num_bytes


def _not_understood(amount: object) -> ValueError:
    return ValueError(f"not an amount of memory: {amount!r}; {_ACCEPTED}")
