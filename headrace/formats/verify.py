"""Reads a whole store and checks every byte of it against the manifest, in bounded memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headrace import _core
from headrace.errors import HeadraceError
from headrace.formats.checkpoint import Checkpoint
from headrace.formats.header import opened, read_into
from headrace.formats.store import (
    CHUNK_BYTES,
    CRC_BYTES,
    MANIFEST,
    crc_of,
    embedding_stride,
    read_store,
    record_bytes,
)


@dataclass
class VerifyReport:
    """problems: one line each, naming the file, the offset and what lies there."""

    store: Path
    bytes_read: int = 0
    tensors: int = 0
    embedding_rows: int = 0
    expert_records: int = 0
    problems: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "store": str(self.store), "ok": not self.problems}


def verify_store(path: Path, progress: Callable[[int, int], None]) -> VerifyReport:
    """Checks sizes, checksums and padding of a store.

    What is damaged in the large files stands in the report; a store whose manifest, tokenizer or
    files' sizes are wrong cannot be read at all and raises HeadraceError.
    """
    path = Path(path)
    if not os.path.lexists(path / MANIFEST):
        if not os.path.lexists(path):
            raise HeadraceError(f"{path}: no such file or directory")
        raise HeadraceError(f"{path}: not a store: expected {MANIFEST} in it, found none")
    store = read_store(path)
    report = VerifyReport(path)
    total = sum(file.stat().st_size for file in store.files)
    checks = (_check_trunk, _check_embedding, _check_experts)
    for file, check in zip(store.files, checks, strict=True):
        with opened(file) as (fd, size):
            for nbytes in check(store, fd, size, file, report):
                report.bytes_read += nbytes
                progress(report.bytes_read, total)
    return report


def _compare(report: VerifyReport, file: Path, offset: int, what: str, expected: int, found: int) -> None:
    if found != expected:
        report.problems.append(
            f"{file}: {what} at offset {offset}: expected checksum {expected:08x}, found {found:08x}; pack the store "
            "again"
        )


def _check_padding(report: VerifyReport, fd: int, begin: int, end: int, file: Path) -> int:
    """Bytes that nobody reads must be zero, so that verify vouches for the whole file."""
    for at in range(begin, end, CHUNK_BYTES):
        piece = np.empty(min(CHUNK_BYTES, end - at), np.uint8)
        read_into(fd, piece.data, at, file)
        if piece.any():
            where = at + int(np.flatnonzero(piece)[0])
            report.problems.append(f"{file}: padding at offset {where}: expected 0, found another value")
            break
    return end - begin


def _check_trunk(store: Checkpoint, fd: int, size: int, file: Path, report: VerifyReport) -> Iterator[int]:
    end = 0
    for t in sorted(store.tensors.values(), key=lambda t: t.offset):
        if t.offset < end:
            raise HeadraceError(f"{file}: tensor {t.name} at offset {t.offset} overlaps another")
        yield _check_padding(report, fd, end, t.offset, file)
        found = crc_of(fd, t.offset, t.nbytes, file)
        _compare(report, file, t.offset, f"tensor {t.name}", t.crc32c or 0, found)
        report.tensors += 1
        end = t.offset + t.nbytes
        yield t.nbytes
    yield _check_padding(report, fd, end, size, file)


def _check_embedding(store: Checkpoint, fd: int, size: int, file: Path, report: VerifyReport) -> Iterator[int]:
    e = store.embedding
    row_bytes, stride = e.dtype.row_bytes(e.cols), embedding_stride(e.dtype, e.cols)
    step = max(1, CHUNK_BYTES // stride)
    for begin in range(0, e.rows, step):
        records = np.empty((min(step, e.rows - begin), stride), np.uint8)
        read_into(fd, records.reshape(-1).data, begin * stride, file)
        crcs = records[:, row_bytes : row_bytes + CRC_BYTES].copy().view("<u4")[:, 0]
        for i, record in enumerate(records):
            what, found = f"embedding row {begin + i}", _core.crc32c(record[:row_bytes], 0)
            _compare(report, file, (begin + i) * stride, what, int(crcs[i]), found)
        padding = records[:, row_bytes + CRC_BYTES :].any(axis=1)
        for i in np.flatnonzero(padding).tolist():
            at = (begin + i) * stride + row_bytes + CRC_BYTES
            report.problems.append(f"{file}: padding at offset {at}: expected 0, found another value")
        report.embedding_rows += len(records)
        yield records.size


def _check_experts(store: Checkpoint, fd: int, size: int, file: Path, report: VerifyReport) -> Iterator[int]:
    end = 0
    for index, layer in sorted(enumerate(store.experts), key=lambda item: int(item[1].offset[0])):
        nbytes, crcs = record_bytes(layer.parts), np.asarray(layer.crc32c)
        if int(layer.offset[0]) < end:
            raise HeadraceError(f"{file}: the records of layer {index} overlap another's")
        yield _check_padding(report, fd, end, int(layer.offset[0]), file)
        for expert in range(layer.num_experts):
            at = int(layer.offset[expert])
            what, found = f"layer {index}, expert {expert}", crc_of(fd, at, nbytes, file)
            _compare(report, file, at, what, int(crcs[expert]), found)
            report.expert_records += 1
            yield nbytes
        end = int(layer.offset[-1]) + nbytes
    yield _check_padding(report, fd, end, size, file)
