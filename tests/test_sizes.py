"""Sizes as people write them."""

import random

import pytest

from headrace.errors import HeadraceError
from headrace.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4096B", 4096),
        ("1K", 1024),
        ("1KiB", 1024),
        ("1KB", 1000),
        ("2G", 2 << 30),
        ("2GiB", 2 << 30),
        ("2GB", 2_000_000_000),
        ("1.5GiB", 3 << 29),
        ("1.5G", 3 << 29),
        ("0.1GB", 100_000_000),
        ("0.3K", 307),
        ("1T", 1 << 40),
        ("2g", 2 << 30),
        ("2gib", 2 << 30),
        ("2gb", 2_000_000_000),
        (" 512 MiB ", 512 << 20),
        (str(2**63 - 1), 2**63 - 1),
    ],
)
def test_parse(text, size_bytes):
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "G",
        "GiB",
        "-1",
        "-1G",
        "+1",
        "1e9",
        "inf",
        "nan",
        "1.G",
        ".5G",
        "1,5G",
        "1_000",
        "0x10",
        "2XB",
        "2GiBs",
        "2iB",
        "1G2M",
        "٣G",
        "two",
        "1.5",
        "1.5B",
        "1.2.3G",
        "2 G B",
        "1\n2",
        "9" * 5000,
        f"1.{9:05000}G",
    ],
)
def test_anything_else_is_an_error(text):
    with pytest.raises(HeadraceError, match=r"^size ") as error:
        parse_size(text)
    assert "\n" not in str(error.value)


def test_sizes_beyond_an_address_are_an_error():
    for text in (str(2**63), "9999999999T", "9" * 20):
        with pytest.raises(HeadraceError, match="more than 9223372036854775807 bytes"):
            parse_size(text)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0B"),
        (1023, "1023B"),
        (1024, "1KiB"),
        (1536, "1.5KiB"),
        (2 << 30, "2GiB"),
        ((2 << 30) - 1, "2GiB"),
        (100 << 20, "100MiB"),
        (int(3.14159 * 2**40), "3.14TiB"),
        (5000 << 40, "5000TiB"),
    ],
)
def test_format(size_bytes, text):
    assert format_size(size_bytes) == text


def test_a_formatted_size_parses_to_nearly_the_same():
    rng = random.Random(0)
    for _ in range(1000):
        size_bytes = int(2 ** rng.uniform(0, 50))
        assert parse_size(format_size(size_bytes)) == pytest.approx(size_bytes, rel=0.006, abs=1)
