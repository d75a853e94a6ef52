"""Amounts of memory, read and written."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koila._bytes import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("amount", "num_bytes"),
    [
        (0, 0),
        (1024, 1024),
        ("1024", 1024),
        ("7B", 7),
        ("1kB", 1000),
        ("1KiB", 1024),
        ("512MiB", 512 * 2**20),
        ("512 mib", 512 * 2**20),
        (" 512MB ", 512 * 10**6),
        ("1.5GB", 1_500_000_000),
        ("1.5GiB", 3 * 2**29),
        ("2TiB", 2**41),
        ("1PB", 10**15),
        ("0.1GB", 100_000_000),
        ("1.0001kB", 1000),
    ],
)
def test_parse(amount: int | str, num_bytes: int) -> None:
    assert parse_bytes(amount) == num_bytes


@pytest.mark.parametrize(
    "amount", [-1, True, "", "MiB", "-1MB", "0.8", "1.5", "4G", "4Gi", "1e9", "1_000", "1,5GB", "1 XB"]
)
def test_what_is_not_understood_says_what_is(amount: int | str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"not an amount of memory: {amount!r}; accepted: an int of bytes")):
        parse_bytes(amount)


@pytest.mark.parametrize("amount", [0.8, None, 1e9, [1]])
def test_other_types_are_refused_with_the_same_words(amount: object) -> None:
    with pytest.raises(ValueError, match='accepted: an int of bytes, or a text such as "512MiB"'):
        parse_bytes(amount)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (512 * 2**20, "512.0 MiB"),
        (1_992_864_825, "1.9 GiB"),
        (2**40, "1.0 TiB"),
        (3 * 2**50, "3.0 PiB"),
        (5000 * 2**50, "5000.0 PiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_format(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@given(st.integers(min_value=0, max_value=2**60))
def test_what_is_written_can_be_read(num_bytes: int) -> None:
    assert parse_bytes(format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=0.05)
