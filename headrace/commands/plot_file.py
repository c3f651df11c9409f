"""Plots as files, with Matplotlib: refused before any work is done, written whole or not at all."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headrace.errors import HeadraceError, UsageError

KINDS = ("jpg", "pdf", "png", "svg", "webp")


def check_plot(path: Path) -> None:
    """Refuses a plot that could not be made. Does not load Matplotlib, whose memory would count in a budget."""
    if find_spec("matplotlib") is None:
        raise HeadraceError("plots need Matplotlib: pip install matplotlib")
    if path.suffix[1:].lower() not in KINDS:
        raise UsageError("--plot", f"expected a name that ends in one of .{', .'.join(KINDS)}, found '{path}'")
    if not path.absolute().parent.is_dir():
        raise HeadraceError(f"{path.absolute().parent}: no such directory to write the plot in; make it first")
    if path.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise HeadraceError(f"{path}: cannot be written; give another place for the plot")


def save_figure(figure: Any, path: Path) -> None:
    """figure: Matplotlib's."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        figure.savefig(partial, format=path.suffix[1:].lower(), dpi=120)
        os.replace(partial, path)
    except OSError as e:
        raise HeadraceError(f"{path}: cannot be written: {e.strerror}") from None
    finally:
        partial.unlink(missing_ok=True)
