"""Packs a checkpoint into a store. Weights keep the quantized values they had: only bits move.

Memory stays bounded whatever the checkpoint's size: two buffers of CHUNK_BYTES (or of 16 rows, if
those are larger) besides the checkpoint's description and its tokenizer.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from headrace import _core
from headrace.errors import HeadraceError
from headrace.formats.checkpoint import Checkpoint, DType, LayerExperts, TensorInfo
from headrace.formats.header import opened, read_into
from headrace.formats.store import (
    CHUNK_BYTES,
    CRC_BYTES,
    EMBED,
    EXPERTS,
    FORMAT,
    FORMAT_VERSION,
    LAYOUT,
    MANIFEST,
    PAGE_BYTES,
    TENSOR_ALIGNMENT,
    TILE_ROWS,
    TOKENIZER,
    TOKENIZER_CONFIG,
    TRUNK,
    embedding_stride,
    matrix_bytes,
    record_bytes,
    round_up,
    wrap_manifest,
)
from headrace.text.tokenizer import tokenizer_json_from_gguf

Progress = Callable[[int, int], None]  # (done_bytes, total_bytes)

# Pages are written out and dropped along the way: the end need not wait for the disk, nor Ctrl-C for a long sync or
# for a file full of cached pages to be removed. Nothing reads them soon: experts are read past the cache.
_SYNC_BYTES = 16 << 20


def pack_store(checkpoint: Checkpoint, destination: Path, progress: Progress) -> int:
    """Writes a store at `destination`, which must not exist yet, and returns its size in bytes.

    It is written beside `destination` under another name and renamed at the end: an interrupted or
    failed pack leaves nothing behind. Raises HeadraceError, also where the disk is or becomes full.
    """
    destination = Path(destination)
    if checkpoint.kind == "store":
        raise HeadraceError(f"{checkpoint.path}: is a store already; copy its directory instead")
    parent = destination.absolute().parent
    if os.path.lexists(destination):
        raise HeadraceError(f"{destination}: exists already; remove it or give another name")
    if not parent.is_dir():
        raise HeadraceError(f"{parent}: no such directory to write the store in; make it first")
    total = _packed_bytes(checkpoint)
    free = shutil.disk_usage(parent).free
    if free < total:
        raise HeadraceError(f"{parent}: not enough space: the store needs {total} bytes, {free} are free")

    partial = parent / f".{destination.name}.{secrets.token_hex(4)}.partial"
    try:
        os.mkdir(partial)
        nbytes = _write_store(checkpoint, partial, lambda done: progress(done, total))
        os.rename(partial, destination)
        _sync_directory(parent)
        return nbytes
    except OSError as e:
        raise HeadraceError(f"{destination}: cannot be written: {e.strerror}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _packed_bytes(checkpoint: Checkpoint) -> int:
    """The size of the three large files."""
    trunk = sum(round_up(_tensor_bytes(t), TENSOR_ALIGNMENT) for t in checkpoint.tensors.values())
    e = checkpoint.embedding
    experts = sum(layer.num_experts * record_bytes(layer.parts) for layer in checkpoint.experts)
    return trunk + e.rows * embedding_stride(e.dtype, e.cols) + experts


def _tensor_bytes(t: TensorInfo) -> int:
    return matrix_bytes(t.dtype, *t.shape) if len(t.shape) == 2 else 4 * t.shape[0]


def _write_store(checkpoint: Checkpoint, path: Path, progress: Callable[[int], None]) -> int:
    source = _Source(checkpoint)
    files: dict[str, dict[str, int]] = {}
    done = 0

    def written(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(done)

    # First, since a vocabulary that is not supported should be told before minutes of writing.
    for name, pieces in _tokenizer_files(checkpoint):
        with _Output(path / name, lambda nbytes: None) as out:
            for piece in pieces:
                out.write(piece)
            files[name] = {"bytes": out.offset, "crc32c": out.crc}
    with source:
        with _Output(path / TRUNK, written) as out:
            tensors = [_write_tensor(source, t, out) for t in checkpoint.tensors.values()]
            files[TRUNK] = {"bytes": out.offset}
        with _Output(path / EMBED, written) as out:
            embedding = _write_embedding(source, out)
            files[EMBED] = {"bytes": out.offset}
        with _Output(path / EXPERTS, written) as out:
            layers = [_write_layer(source, layer, out) for layer in checkpoint.experts]
            files[EXPERTS] = {"bytes": out.offset}

    body: dict[str, Any] = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "layout": LAYOUT,
        "name": checkpoint.name,
        "source": checkpoint.kind,
        "config": checkpoint.config.to_json(),
        "files": files,
        "tensors": tensors,
        "embedding": embedding,
        "layers": layers,
        "chat_template": checkpoint.tokenizer.chat_template,
    }
    with _Output(path / MANIFEST, lambda nbytes: None) as out:
        out.write(wrap_manifest(body))
        manifest_bytes = out.offset
    _sync_directory(path)
    return sum(f["bytes"] for f in files.values()) + manifest_bytes


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class _Source:
    """The checkpoint's files, and the two buffers through which their rows pass."""

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint
        self._stack = ExitStack()
        self._fds: list[int] = []
        self._rows = np.empty(CHUNK_BYTES, np.uint8)
        self._tiles = np.empty(CHUNK_BYTES, np.uint8)

    def __enter__(self) -> _Source:
        with ExitStack() as stack:
            self._fds = [stack.enter_context(opened(f))[0] for f in self.checkpoint.files]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def rows(self, file: int, offset: int, row_bytes: int, count: int) -> Iterator[np.ndarray]:
        """Consecutive rows [n, row_bytes], n a multiple of 16 but at the end; valid until the
        next."""
        step = max(TILE_ROWS, CHUNK_BYTES // row_bytes // TILE_ROWS * TILE_ROWS)
        if step * row_bytes > len(self._rows):
            self._rows = np.empty(step * row_bytes, np.uint8)
        for begin in range(0, count, step):
            n = min(step, count - begin)
            piece = self._rows[: n * row_bytes]
            at = offset + begin * row_bytes
            read_into(self._fds[file], piece.data, at, self.checkpoint.files[file])
            yield piece.reshape(n, row_bytes)

    def tiles(self, file: int, offset: int, dtype: DType, rows: int, cols: int) -> Iterator[np.ndarray]:
        """A matrix in tile16, in pieces of whole tiles; each valid until the next."""
        for piece in self.rows(file, offset, dtype.row_bytes(cols), rows):
            n = len(piece)
            nbytes = matrix_bytes(dtype, n, cols)
            if nbytes > len(self._tiles):
                self._tiles = np.empty(nbytes, np.uint8)
            tiles = self._tiles[:nbytes]
            # Whole tiles follow each other in row order, so a piece packs like a matrix of its own.
            _core.pack_rows(int(dtype), n, cols, 0, piece.reshape(-1), tiles)
            yield tiles


class _Output:
    """A file being written: its length, and the checksum since begin()."""

    def __init__(self, path: Path, written: Callable[[int], None]):
        self.path = path
        self.offset = 0
        self.crc = 0
        self._written = written
        self._unsynced = 0
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        try:
            if kind is None:
                self._call(os.fsync, self._fd)
        finally:
            os.close(self._fd)

    def begin(self) -> int:
        """Starts a new checksum; returns the offset."""
        self.crc = 0
        return self.offset

    def write(self, data: bytes | np.ndarray) -> None:
        data = np.frombuffer(data, np.uint8)
        self.crc = _core.crc32c(data, self.crc)
        done = 0
        while done < len(data):
            done += self._call(os.write, self._fd, data[done:])
        self.offset += done
        self._unsynced += done
        if self._unsynced >= _SYNC_BYTES:
            self._call(os.fdatasync, self._fd)
            os.posix_fadvise(self._fd, 0, self.offset, os.POSIX_FADV_DONTNEED)
            self._unsynced = 0
        self._written(done)

    def pad(self, begin: int, multiple: int) -> None:
        """Zeros until the length since `begin` is a multiple."""
        missing = -(self.offset - begin) % multiple
        if missing:
            self.write(bytes(missing))

    def _call(self, function: Callable[..., Any], *args: object) -> Any:
        try:
            return function(*args)
        except OSError as e:
            where = f"write of {self.path.name} at offset {self.offset}"
            raise OSError(e.errno, f"{where}: {e.strerror}; the store was not made") from None


def _write_tensor(source: _Source, t: TensorInfo, out: _Output) -> dict[str, Any]:
    offset = out.begin()
    if len(t.shape) == 1:
        dtype = DType.F32
        for row in source.rows(t.file, t.offset, t.nbytes, 1):
            out.write(_as_f32(t.dtype, row[0]))
    else:
        dtype = t.dtype
        for tiles in source.tiles(t.file, t.offset, dtype, *t.shape):
            out.write(tiles)
    entry = {
        "name": t.name,
        "dtype": dtype.name,
        "shape": list(t.shape),
        "offset": offset,
        "bytes": out.offset - offset,
        "crc32c": out.crc,
    }
    out.pad(0, TENSOR_ALIGNMENT)
    return entry


def _as_f32(dtype: DType, data: np.ndarray) -> np.ndarray:
    """Stored values of a vector as float32, exactly."""
    if dtype == DType.F32:
        return data
    if dtype == DType.F16:
        return data.view("<f2").astype("<f4")
    return (data.view("<u2").astype("<u4") << 16).view("<f4")


def _write_embedding(source: _Source, out: _Output) -> dict[str, Any]:
    e = source.checkpoint.embedding
    row_bytes, stride = e.dtype.row_bytes(e.cols), embedding_stride(e.dtype, e.cols)
    for rows in source.rows(e.file, e.offset, row_bytes, e.rows):
        records = np.zeros((len(rows), stride), np.uint8)
        records[:, :row_bytes] = rows
        crc = np.array([_core.crc32c(row, 0) for row in rows], "<u4")
        records[:, row_bytes : row_bytes + CRC_BYTES] = crc.view(np.uint8).reshape(-1, CRC_BYTES)
        out.write(records)
    return {"dtype": e.dtype.name, "rows": e.rows, "cols": e.cols, "stride_bytes": stride}


def _write_layer(source: _Source, layer: LayerExperts, out: _Output) -> dict[str, Any]:
    offset = out.offset
    crc = []
    for expert in range(layer.num_experts):
        begin = out.begin()
        for i, part in enumerate(layer.parts):
            at = int(layer.offset[expert, i])
            for tiles in source.tiles(int(layer.file[expert, i]), at, *part):
                out.write(tiles)
            out.pad(begin, TENSOR_ALIGNMENT)
        out.pad(begin, PAGE_BYTES)
        crc.append(out.crc)
    names = zip(("gate", "up", "down"), layer.parts, strict=True)
    return {
        **{name: part[0].name for name, part in names},
        "offset": offset,
        "record_bytes": record_bytes(layer.parts),
        "crc32c": crc,
    }


def _tokenizer_files(checkpoint: Checkpoint) -> Iterator[tuple[str, Iterator[bytes]]]:
    """(name, content in pieces). A GGUF's vocabulary becomes the tokenizer.json that it loads
    through."""
    tokenizer = checkpoint.tokenizer
    if tokenizer.gguf is not None:
        text = tokenizer_json_from_gguf(tokenizer.gguf, tokenizer.where).encode()
        yield TOKENIZER, iter([text])
    elif tokenizer.tokenizer_json is not None:
        yield TOKENIZER, _pieces(tokenizer.tokenizer_json)
        settings = tokenizer.tokenizer_json.with_name(TOKENIZER_CONFIG)
        if settings.exists():
            yield TOKENIZER_CONFIG, _pieces(settings)


def _pieces(path: Path) -> Iterator[bytes]:
    with opened(path) as (fd, size):
        for begin in range(0, size, CHUNK_BYTES):
            piece = bytearray(min(CHUNK_BYTES, size - begin))
            read_into(fd, memoryview(piece), begin, path)
            yield bytes(piece)
