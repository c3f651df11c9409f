"""Text from files and standard input."""

from __future__ import annotations

from pathlib import Path

from headrace.errors import HeadraceError

# More than the longest context holds; a stream without an end is refused here.
MAX_TEXT_BYTES = 8 << 20
STDIN = Path("-")


def read_text(file: Path) -> str:
    """The file's text, or standard input's for "-"; UTF-8 of at most MAX_TEXT_BYTES."""
    name = str(file) if file != STDIN else "standard input"
    try:
        with open(file if file != STDIN else 0, "rb", closefd=file != STDIN) as stream:
            data = stream.read(MAX_TEXT_BYTES + 1)
    except OSError as error:
        raise HeadraceError(f"{name}: {error.strerror}; give a readable text file") from error
    if len(data) > MAX_TEXT_BYTES:
        raise HeadraceError(f"{name}: a text of more than {MAX_TEXT_BYTES} bytes; shorten it")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise HeadraceError(f"{name}: offset {error.start}: not UTF-8; give the text as UTF-8") from error
