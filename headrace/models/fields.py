"""Fields: values of a JSON object or of GGUF metadata, checked as they are taken."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from headrace.errors import HeadraceError

_REQUIRED: Any = object()


def shown(value: object) -> str:
    """A value from a file for an error message: one short line whatever the file holds."""
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


class Fields:
    """A mapping that came from outside. A null counts as absent; what is missing or wrong raises
    HeadraceError."""

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values = values
        self.where = where

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def _take(self, key: str, default: Any, expected: str) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise HeadraceError(f"{self.where}: {key} is missing: expected {expected}")
        return default

    def wrong(self, key: str, expected: str) -> HeadraceError:
        found = shown(self.values.get(key))
        return HeadraceError(f"{self.where}: {key}: expected {expected}, found {found}")

    def integer(self, key: str, default: Any = _REQUIRED, low: int = 1, high: int = 2**31 - 1) -> Any:
        expected = f"an integer from {low} to {high}"
        value = self._take(key, default, expected)
        if value is not default and (type(value) is not int or not low <= value <= high):
            raise self.wrong(key, expected)
        return value

    def number(self, key: str, default: Any = _REQUIRED) -> Any:
        value = self._take(key, default, "a number")
        if value is default:
            return value
        try:
            number = float(value) if type(value) in (int, float) else math.nan
        except OverflowError:  # an integer beyond any float
            number = math.inf
        if not math.isfinite(number):
            raise self.wrong(key, "a finite number")
        return number

    def positive(self, key: str, default: Any = _REQUIRED) -> Any:
        value = self.number(key, default)
        if value is not default and not 0 < value < 1e30:
            raise self.wrong(key, "a positive number")
        return value

    def boolean(self, key: str, default: Any = _REQUIRED) -> Any:
        value = self._take(key, default, "true or false")
        if value is not default and type(value) is not bool:
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str, default: Any = _REQUIRED) -> Any:
        value = self._take(key, default, "a string")
        if value is not default and type(value) is not str:
            raise self.wrong(key, "a string")
        return value

    def items(self, key: str, default: Any = _REQUIRED) -> Any:
        value = self._take(key, default, "a list")
        if value is not default and type(value) is not list:
            raise self.wrong(key, "a list")
        return value

    def fields(self, key: str, default: Any = _REQUIRED) -> Any:
        value = self._take(key, default, "an object")
        if value is default:
            return value
        if type(value) is not dict:
            raise self.wrong(key, "an object")
        return Fields(value, f"{self.where}: {key}")

    def neutral(self, key: str, values: Iterable[object]) -> None:
        """Refuses a key that would change results and that is not supported, unless its value
        changes nothing."""
        value = self.values.get(key)
        if value is None:
            return
        neutral = list(values)
        if not any(type(value) is type(v) and value == v for v in neutral):
            allowed = " or ".join(shown(v) for v in neutral)
            raise HeadraceError(
                f"{self.where}: {key} = {shown(value)} is not supported; supported: {allowed or 'absent'}"
            )
