"""How reports write counts and figures."""

from __future__ import annotations


def count_of(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}{'es' if noun.endswith('s') else 's'}"


def significant(value: float | None) -> str:
    """Three digits that say something, however small the value is; a dash for None, which is "nothing measured"."""
    if value is None:
        return "-"
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"


def percent(share: float) -> str:
    """A share that someone chose, such as a residency: 15%, 12.5%, 0.01%."""
    return f"{100 * share:.4g}%"
