"""`headrace pack` and `headrace verify`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.commands.model import open_model
from headrace.errors import HeadraceError
from headrace.formats.pack import pack_store
from headrace.formats.verify import verify_store
from headrace.sizes import format_size


@contextmanager
def _progress(title: str, show: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, or a callback that does nothing."""
    if not show:
        yield lambda done_bytes, total_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn(title), BarColumn(), DownloadColumn(True), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title)
        yield lambda done_bytes, total_bytes: bar.update(task, completed=done_bytes, total=total_bytes)


def pack(source: str, destination: str, as_json: bool) -> None:
    checkpoint = open_model(source)
    with _progress("packing", sys.stderr.isatty() and not as_json) as progress:
        nbytes = pack_store(checkpoint, Path(destination), progress)
    if as_json:
        print(json.dumps({"store": destination, "bytes": nbytes}))
    else:
        print(f"{destination}: packed {checkpoint.name}, {format_size(nbytes)}")


def verify(store: str, as_json: bool) -> None:
    with _progress("verifying", sys.stderr.isatty() and not as_json) as progress:
        report = verify_store(Path(store), progress)
    if as_json:
        print(json.dumps(report.as_dict()))
    else:
        for problem in report.problems:
            print(problem)
    if report.problems:
        raise HeadraceError(f"{store}: {len(report.problems)} damaged; pack it again. First: {report.problems[0]}")
    if not as_json:
        print(f"{store}: every checksum holds, {format_size(report.bytes_read)} read")
