"""Sizes in bytes, as people write them: 2GiB and 2G are binary, 2GB is decimal."""

from __future__ import annotations

import re
from fractions import Fraction

from headrace.errors import HeadraceError

_PREFIXES = "KMGT"
_SIZE = re.compile(rf"([0-9]{{1,20}}(?:\.[0-9]{{1,20}})?) ?(?:([{_PREFIXES}])(i?B)?|B)?", re.IGNORECASE)
_MAX_BYTES = 2**63 - 1


def parse_size(text: str) -> int:
    """The bytes that `text` names: "2GiB", "2G", "2GB", "1.5GiB", "4096". Rounds down.

    Raises HeadraceError for anything else.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise HeadraceError(f"size {text!r}: expected a number and a unit, such as 2GiB, 1.5G, 2000MB or 4096")
    number, prefix, suffix = match.groups()
    if prefix is None and "." in number:
        raise HeadraceError(f"size {text!r}: no such thing as part of a byte; add a unit")
    unit_bytes = 1
    if prefix is not None:
        base = 1000 if (suffix or "").upper() == "B" else 1024
        unit_bytes = base ** (_PREFIXES.index(prefix.upper()) + 1)
    size_bytes = int(Fraction(number) * unit_bytes)
    if size_bytes > _MAX_BYTES:
        raise HeadraceError(f"size {text!r}: more than {_MAX_BYTES} bytes")
    return size_bytes


def format_size(size_bytes: int) -> str:
    """`size_bytes` in the largest binary unit, to two decimals: "1.5GiB"; parse_size reads it."""
    value, units = float(size_bytes), ["TiB", "GiB", "MiB", "KiB", "B"]
    while round(value, 2) >= 1024 and len(units) > 1:
        value /= 1024
        units.pop()
    return f"{value:.2f}".rstrip("0").rstrip(".") + units[-1]
