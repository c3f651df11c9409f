"""The expert store: a directory that `headrace pack` writes, described byte by byte in
docs/format.md.

manifest.json says what lies where, with checksums; trunk.bin holds everything but routed experts,
embed.bin the rows of the embedding table, experts.bin one record an expert.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from headrace import _core
from headrace.errors import HeadraceError
from headrace.formats.checkpoint import (
    Checkpoint,
    DType,
    EmbeddingTable,
    LayerExperts,
    TensorInfo,
    TokenizerSource,
)
from headrace.formats.header import opened, read_into, read_small
from headrace.formats.placing import trunk_shapes
from headrace.formats.safetensors import parse_json
from headrace.models.config import ModelConfig
from headrace.models.fields import Fields, shown

MANIFEST, TRUNK, EMBED, EXPERTS = "manifest.json", "trunk.bin", "embed.bin", "experts.bin"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
FORMAT, FORMAT_VERSION, LAYOUT = "headrace-store", 1, "tile16"

TILE_ROWS = 16
TENSOR_ALIGNMENT = 64
ROW_ALIGNMENT = 8
PAGE_BYTES = 4096
CRC_BYTES = 4
CHUNK_BYTES = 8 << 20

MAX_MANIFEST_BYTES = 64 << 20
# The checksum covers the bytes of the inner object; the outer bytes are fixed, so no byte is
# uncovered.
_WRAPPED = re.compile(rb'\{"crc32c": "([0-9a-f]{8})", "manifest": (\{.*\})\}\n', re.DOTALL)

Part = tuple[DType, int, int]  # dtype, rows, cols


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def matrix_bytes(dtype: DType, rows: int, cols: int) -> int:
    """Bytes of a matrix in tile16: whole tiles."""
    return round_up(rows, TILE_ROWS) * dtype.row_bytes(cols)


def record_bytes(parts: tuple[Part, ...]) -> int:
    """Bytes of an expert's record: gate, up, down at multiples of 64, padded to a page."""
    return round_up(sum(round_up(matrix_bytes(*p), TENSOR_ALIGNMENT) for p in parts), PAGE_BYTES)


def embedding_stride(dtype: DType, cols: int) -> int:
    return round_up(dtype.row_bytes(cols) + CRC_BYTES, ROW_ALIGNMENT)


def wrap_manifest(body: dict[str, Any]) -> bytes:
    """The bytes of manifest.json."""
    text = json.dumps(body, separators=(",", ":")).encode()
    return b'{"crc32c": "%08x", "manifest": %s}\n' % (_core.crc32c(text, 0), text)


def read_store(path: Path) -> Checkpoint:
    """The checkpoint in a store.

    Manifest and tokenizer are checked against their checksums, files against their sizes. Trunk
    tensors, embedding rows and expert records carry checksums that whoever reads them checks.
    Raises HeadraceError.
    """
    m = _manifest(path / MANIFEST)
    sizes = _check_files(path, m)
    where = m.where
    config = ModelConfig.from_json(m.fields("config").values, f"{where}: config")
    template = m.text("chat_template", None)
    has_tokenizer = TOKENIZER in sizes
    return Checkpoint(
        path=path,
        kind="store",
        name=m.text("name"),
        config=config,
        files=(path / TRUNK, path / EMBED, path / EXPERTS),
        tensors=_tensors(m, config, sizes[TRUNK]),
        embedding=_embedding(m, config, sizes[EMBED]),
        experts=_experts(m, config, sizes[EXPERTS]),
        tokenizer=TokenizerSource(
            tokenizer_json=path / TOKENIZER if has_tokenizer else None,
            chat_template=template if has_tokenizer else None,
        ),
    )


def _manifest(path: Path) -> Fields:
    data = read_small(path, MAX_MANIFEST_BYTES)
    wrapped = _WRAPPED.fullmatch(data)
    if not wrapped:
        raise HeadraceError(
            f"{path}: not the manifest of a store, or damaged: expected its checksum and the object that it covers; "
            "pack the store again"
        )
    expected, found = int(wrapped[1], 16), _core.crc32c(wrapped[2], 0)
    if found != expected:
        raise HeadraceError(
            f"{path}: damaged: expected checksum {expected:08x}, found {found:08x}; pack the store again"
        )
    return _to_current(Fields(parse_json(wrapped[2], str(path)), str(path)))


def _to_current(m: Fields) -> Fields:
    """The manifest in today's format and layout. Converters of older ones go here; there are none
    yet."""
    if m.text("format") != FORMAT:
        raise m.wrong("format", repr(FORMAT))
    version, layout = m.integer("format_version"), m.text("layout")
    if version != FORMAT_VERSION:
        raise HeadraceError(
            f"{m.where}: format version {version} is not supported; this version of headrace reads {FORMAT_VERSION}: "
            "pack the checkpoint again, or use the headrace that packed it"
        )
    if layout != LAYOUT:
        raise HeadraceError(
            f"{m.where}: layout {shown(layout)} is not supported; this version of headrace reads {LAYOUT}: pack the "
            "checkpoint again, or use the headrace that packed it"
        )
    return m


def _check_files(path: Path, m: Fields) -> dict[str, int]:
    """Size by name, after checking that each is there and that size; small files also by
    checksum."""
    files = m.fields("files")
    sizes = {}
    for name in (TRUNK, EMBED, EXPERTS, TOKENIZER, TOKENIZER_CONFIG):
        if name not in files and name.endswith(".json"):
            continue
        entry = files.fields(name)
        sizes[name] = entry.integer("bytes", low=0, high=2**63)
        with opened(path / name) as (fd, size):
            if size != sizes[name]:
                raise HeadraceError(f"{path / name}: expected {sizes[name]} bytes, found {size}; pack the store again")
            if name.endswith(".json"):
                expected = _crc(entry, "crc32c")
                found = crc_of(fd, 0, size, path / name)
                if found != expected:
                    raise HeadraceError(
                        f"{path / name}: damaged: expected checksum {expected:08x}, found {found:08x}; pack the store "
                        "again"
                    )
    return sizes


def crc_of(fd: int, offset: int, nbytes: int, path: Path) -> int:
    """CRC-32C of an extent, read in pieces."""
    buffer = np.empty(min(nbytes, CHUNK_BYTES), np.uint8)
    crc = 0
    for begin in range(0, nbytes, CHUNK_BYTES):
        piece = buffer[: min(CHUNK_BYTES, nbytes - begin)]
        read_into(fd, piece.data, offset + begin, path)
        crc = _core.crc32c(piece, crc)
    return crc


def _crc(fields: Fields, key: str) -> int:
    return fields.integer(key, low=0, high=2**32 - 1)


def _dtype(fields: Fields, key: str) -> DType:
    name = fields.text(key)
    if name not in DType.__members__:
        raise fields.wrong(key, ", ".join(DType.__members__))
    return DType[name]


def _extent(fields: Fields, nbytes: int, alignment: int, file_bytes: int) -> int:
    """The offset of nbytes that must lie in the file, aligned."""
    offset = fields.integer("offset", low=0, high=2**63)
    if offset % alignment or offset + nbytes > file_bytes:
        raise fields.wrong("offset", f"a multiple of {alignment} with {nbytes} bytes inside {file_bytes}")
    return offset


def _objects(m: Fields, key: str) -> list[Fields]:
    items = m.items(key)
    for item in items:
        if type(item) is not dict:
            raise m.wrong(key, "a list of objects")
    return [Fields(item, f"{m.where}: {key}[{i}]") for i, item in enumerate(items)]


def _tensors(m: Fields, config: ModelConfig, file_bytes: int) -> dict[str, TensorInfo]:
    listed = {entry.text("name"): entry for entry in _objects(m, "tensors")}
    tensors = {}
    for name, shape in trunk_shapes(config):
        entry = listed.pop(name, None)
        if entry is None:
            raise HeadraceError(f"{m.where}: tensor {name} is missing")
        if entry.items("shape") != list(shape):
            raise entry.wrong("shape", f"{list(shape)} from the config")
        dtype = _dtype(entry, "dtype")
        if len(shape) == 1:
            layout, nbytes, holds = "rows", 4 * shape[0], dtype == DType.F32
        else:
            layout, nbytes = LAYOUT, matrix_bytes(dtype, *shape)
            holds = not dtype.is_quantized or shape[1] % 32 == 0
        if not holds:
            raise entry.wrong("dtype", f"a type that shape {list(shape)} can have")
        if entry.integer("bytes", high=2**63) != nbytes:
            raise entry.wrong("bytes", str(nbytes))
        offset = _extent(entry, nbytes, TENSOR_ALIGNMENT, file_bytes)
        crc = _crc(entry, "crc32c")
        tensors[name] = TensorInfo(name, dtype, shape, 0, offset, nbytes, layout, crc)
    if listed:
        raise HeadraceError(f"{m.where}: tensor {shown(next(iter(listed)))} has no place in the model")
    return tensors


def _embedding(m: Fields, config: ModelConfig, file_bytes: int) -> EmbeddingTable:
    entry = m.fields("embedding")
    dtype, rows, cols = _dtype(entry, "dtype"), config.vocab_size, config.hidden_size
    if dtype.is_quantized and cols % 32:
        raise entry.wrong("dtype", f"a type that {cols} columns can have")
    stride = embedding_stride(dtype, cols)
    for key, expected in (("rows", rows), ("cols", cols), ("stride_bytes", stride)):
        if entry.integer(key) != expected:
            raise entry.wrong(key, str(expected))
    if rows * stride != file_bytes:
        raise entry.wrong("rows", f"{rows} rows of {stride} bytes to fill {EMBED}'s {file_bytes}")
    return EmbeddingTable(dtype, rows, cols, file=1, offset=0, stride_bytes=stride, has_crc=True)


def _experts(m: Fields, config: ModelConfig, file_bytes: int) -> tuple[LayerExperts, ...]:
    entries = _objects(m, "layers")
    if len(entries) != config.num_hidden_layers:
        raise HeadraceError(f"{m.where}: expected {config.num_hidden_layers} layers, found {len(entries)}")
    inner, hidden, n = config.moe_intermediate_size, config.hidden_size, config.num_experts
    layers = []
    for entry in entries:
        parts = []
        for key, rows, cols in (
            ("gate", inner, hidden),
            ("up", inner, hidden),
            ("down", hidden, inner),
        ):
            dtype = _dtype(entry, key)
            if dtype.is_quantized and cols % 32:
                raise entry.wrong(key, f"a type that {cols} columns can have")
            parts.append((dtype, rows, cols))
        size = record_bytes(tuple(parts))
        if entry.integer("record_bytes", high=2**63) != size:
            raise entry.wrong("record_bytes", str(size))
        offset = _extent(entry, n * size, PAGE_BYTES, file_bytes)
        crc = entry.items("crc32c")
        if len(crc) != n or not all(type(c) is int and 0 <= c < 2**32 for c in crc):
            raise entry.wrong("crc32c", f"{n} checksums")
        layers.append(
            LayerExperts(
                parts=tuple(parts),
                num_experts=n,
                file=np.full(n, 2, np.uint32),
                offset=np.uint64(offset) + np.arange(n, dtype=np.uint64) * np.uint64(size),
                crc32c=np.array(crc, np.uint32),
            )
        )
    return tuple(layers)
