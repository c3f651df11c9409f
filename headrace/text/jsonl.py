"""JSON Lines: one object a line, read line by line in bounded memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.errors import HeadraceError
from headrace.models.fields import shown
from headrace.text.files import MAX_TEXT_BYTES, STDIN


def read_jsonl(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each line is ("FILE: line 3"), and its object; blank lines are passed over. "-" is standard input."""
    name = str(file) if file != STDIN else "standard input"
    try:
        with open(file if file != STDIN else 0, "rb", closefd=file != STDIN) as stream:
            number = 0
            while line := stream.readline(MAX_TEXT_BYTES + 1):
                number += 1
                where = f"{name}: line {number}"
                if len(line) > MAX_TEXT_BYTES:
                    raise HeadraceError(f"{where}: more than {MAX_TEXT_BYTES} bytes; shorten it")
                if line.strip():
                    yield where, _parse(line, where)
    except OSError as error:
        raise HeadraceError(f"{name}: {error.strerror}; give a readable JSONL file") from error


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise HeadraceError(f"{where}: byte {error.start} is not UTF-8; give the text as UTF-8") from None
    except json.JSONDecodeError as error:
        raise HeadraceError(
            f"{where}: expected a JSON object, found an error at column {error.colno}: {error.msg}"
        ) from None
    except (ValueError, RecursionError) as error:  # a number too long, brackets too deep
        raise HeadraceError(f"{where}: expected a JSON object, found: {error}") from None
    if not isinstance(value, dict):
        raise HeadraceError(f"{where}: expected a JSON object, found {shown(value)}")
    return value
