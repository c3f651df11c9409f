"""GGUF version 3, in place: the header is read with pread, tensor data only located."""

from __future__ import annotations

import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import HeadraceError
from headrace.formats.checkpoint import Checkpoint, DType, TokenizerSource
from headrace.formats.header import HeaderReader, opened
from headrace.formats.placing import FileTensor, place
from headrace.models.config import ARCHITECTURES, ModelConfig
from headrace.models.fields import Fields, shown

MAGIC = b"GGUF"

# Far above any real file (150,000 tokens and their merges take 6 MB), far below what would hurt.
MAX_HEADER_BYTES = 64 << 20
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_NAME_BYTES = 1 << 16
MAX_DIMS = 4

_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING, _ARRAY = 8, 9
_ARRAY_DTYPES = {7: "<u1", **{t: "<" + s.format[1] for t, s in _SCALARS.items() if t != 7}}

_TYPE_NAMES = {
    3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K",
    14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL",
    21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64",
    28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
_SUPPORTED_TYPES = ", ".join(t.name for t in DType)

_SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True)
class _RawTensor:
    name: str
    type_id: int
    shape: tuple[int, ...]  # outermost first
    offset: int  # in the file's data section


@dataclass(frozen=True)
class _Header:
    path: Path
    size: int
    metadata: dict[str, Any]
    tensors: list[_RawTensor]
    alignment: int
    data_offset: int


def read_gguf(path: Path) -> Checkpoint:
    """The checkpoint in a GGUF file, or in the split set of which `path` is the first file.

    Raises HeadraceError for a file that is truncated, malformed, of another GGUF version or byte
    order, or that holds an architecture, a weight type or a setting that is not supported.
    """
    first = _read_header(path)
    arch = Fields(first.metadata, str(path)).text("general.architecture")
    if arch not in ARCHITECTURES:
        raise HeadraceError(
            f"{path}: architecture {shown(arch)} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    headers = [first, *_rest_of_split(first)]
    tensors: dict[str, FileTensor] = {}
    for index, header in enumerate(headers):
        for name, tensor in _locate(header, index).items():
            if name in tensors:
                raise HeadraceError(f"{tensor.title}: the name occurs twice in the split set")
            tensors[name] = tensor

    shapes = {name: t.shape for name, t in tensors.items()}
    config = ModelConfig.from_gguf(first.metadata, shapes, str(path))
    placed = place(config, tensors, str(path))
    return Checkpoint(
        path=path,
        kind="gguf",
        name=_name(first),
        config=config,
        files=tuple(h.path for h in headers),
        tensors=placed.tensors,
        embedding=placed.embedding,
        experts=placed.experts,
        tokenizer=_tokenizer(first, config),
    )


def _read_header(path: Path) -> _Header:
    with opened(path) as (fd, size):
        if size == 0:
            raise HeadraceError(f"{path}: the file is empty; expected a GGUF")
        r = HeaderReader(path, fd, size, MAX_HEADER_BYTES)
        magic = r.take(min(4, size), "magic")
        if magic != MAGIC:
            raise HeadraceError(f"{path}: not a GGUF: expected the bytes {MAGIC!r} at offset 0, found {magic!r}")
        version = r.u32("version")
        if version & 0xFFFF == 0 and version:
            raise HeadraceError(f"{path}: big-endian GGUF is not supported; convert it to little-endian")
        if version != 3:
            raise HeadraceError(f"{path}: GGUF version {version} is not supported; expected 3")
        num_tensors, num_keys = r.u64("tensor count"), r.u64("key count")
        # The smallest tensor info takes 32 bytes, the smallest key 13.
        for what, count, most, least in (
            ("tensor", num_tensors, MAX_TENSORS, 32),
            ("key", num_keys, MAX_KEYS, 13),
        ):
            most = min(most, r.remaining // least)
            if count > most:
                raise HeadraceError(
                    f"{path}: {what} count in the header: expected at most {most} in a file of {size} bytes, found "
                    f"{count}; truncated or damaged"
                )

        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            at = r.offset
            key = _name_string(r, "key")
            if key in metadata:
                raise HeadraceError(f"{path}: key {shown(key)} at offset {at} occurs twice")
            metadata[key] = _value(r, key)

        tensors = []
        names: set[str] = set()
        for _ in range(num_tensors):
            at = r.offset
            name = _name_string(r, "tensor name")
            if name in names:
                raise HeadraceError(f"{path}: tensor {shown(name)} at offset {at} occurs twice")
            names.add(name)
            tensors.append(_tensor_info(r, name))
        end = r.offset

    alignment = Fields(metadata, str(path)).integer("general.alignment", 32, 1, 1 << 24)
    if alignment & (alignment - 1):
        raise HeadraceError(f"{path}: general.alignment: expected a power of two, found {alignment}")
    data_offset = -(-end // alignment) * alignment
    return _Header(path, size, metadata, tensors, alignment, data_offset)


def _name_string(r: HeaderReader, what: str) -> str:
    at, n = r.offset, r.u64(what)
    if not 0 < n <= MAX_NAME_BYTES:
        raise HeadraceError(f"{r.path}: {what} at offset {at}: expected a length from 1 to {MAX_NAME_BYTES}, found {n}")
    return r.text(n, what)


def _value(r: HeaderReader, key: str) -> Any:
    """A value of the key that comes next: int, float, bool, str, list of str, or a NumPy array of
    numbers."""
    key = f"key {shown(key)}"
    at, kind = r.offset, r.u32(key)
    if kind == _STRING:
        return r.string(key)
    if kind in _SCALARS:
        return r.unpack(_SCALARS[kind], key)
    if kind != _ARRAY:
        raise HeadraceError(f"{r.path}: {key} at offset {at}: unknown value type {kind}")
    at, item, n = r.offset, r.u32(key), r.u64(key)
    if item != _STRING and item not in _ARRAY_DTYPES:
        raise HeadraceError(f"{r.path}: {key} at offset {at}: arrays of value type {item} are not supported")
    item_bytes = 8 if item == _STRING else np.dtype(_ARRAY_DTYPES[item]).itemsize
    most = min(r.remaining, MAX_HEADER_BYTES) // item_bytes
    if n > most:
        raise HeadraceError(
            f"{r.path}: {key} at offset {at}: expected an array of at most {most} values in a file of {r.size} bytes, "
            f"found {n}; truncated or damaged"
        )
    if item == _STRING:
        return r.strings(n, key)
    return np.frombuffer(r.take(n * item_bytes, key), _ARRAY_DTYPES[item])


def _tensor_info(r: HeaderReader, name: str) -> _RawTensor:
    what = f"tensor {shown(name)}"
    at, n_dims = r.offset, r.u32(what)
    if not 1 <= n_dims <= MAX_DIMS:
        raise HeadraceError(f"{r.path}: {what} at offset {at}: expected 1 to {MAX_DIMS} dimensions, found {n_dims}")
    dims = [r.u64(what) for _ in range(n_dims)]
    for d in dims:
        if not 1 <= d < 2**31:
            raise HeadraceError(
                f"{r.path}: {what} at offset {at}: expected dimensions from 1 to 2147483647, found {dims}"
            )
    type_id, offset = r.u32(what), r.u64(what)
    return _RawTensor(name, type_id, tuple(reversed(dims)), offset)


def _locate(header: _Header, index: int) -> dict[str, FileTensor]:
    """Types and extents of a file's tensors, checked against its size and each other."""
    tensors = {}
    for raw in header.tensors:
        title = f"{header.path}: tensor {shown(raw.name)}"
        if raw.type_id not in DType.__members__.values():
            found = _TYPE_NAMES.get(raw.type_id, f"type {raw.type_id}")
            raise HeadraceError(
                f"{title}: {found} is not supported; supported: {_SUPPORTED_TYPES}; get the model in one of these"
            )
        dtype = DType(raw.type_id)
        cols = raw.shape[-1]
        if dtype.is_quantized and cols % 32:
            raise HeadraceError(f"{title}: expected rows of a multiple of 32 values for {dtype.name}, found {cols}")
        nbytes = dtype.row_bytes(cols)
        for d in raw.shape[:-1]:
            nbytes *= d
        if raw.offset % header.alignment:
            raise HeadraceError(
                f"{title}: expected a data offset that is a multiple of {header.alignment}, found {raw.offset}"
            )
        begin = header.data_offset + raw.offset
        if begin + nbytes > header.size:
            raise HeadraceError(
                f"{title}: truncated: its {nbytes} bytes at offset {begin} end at {begin + nbytes}, the file at "
                f"{header.size}; download it again"
            )
        tensors[raw.name] = FileTensor(title, dtype, raw.shape, index, begin, nbytes)
    end = 0
    for t in sorted(tensors.values(), key=lambda t: t.offset):
        if t.offset < end:
            raise HeadraceError(f"{t.title}: its data at offset {t.offset} overlaps another tensor's")
        end = t.offset + t.nbytes
    return tensors


def _rest_of_split(first: _Header) -> list[_Header]:
    """The other files of the split set; none for a file that stands alone."""
    keys = Fields(first.metadata, str(first.path))
    count = keys.integer("split.count", 1, 0, 65535)
    number = keys.integer("split.no", 0, 0, 65535)
    if count <= 1:
        return []
    name = _SPLIT_NAME.fullmatch(first.path.name)
    if not name or int(name[3]) != count or int(name[2]) != number + 1:
        expected = f"-{number + 1:05}-of-{count:05}.gguf"
        raise HeadraceError(
            f"{first.path}: file {number + 1} of a split set of {count}: expected a name that ends in {expected}"
        )

    def part(i: int) -> Path:
        return first.path.with_name(f"{name[1]}-{i + 1:05}-of-{count:05}.gguf")

    if number != 0:
        raise HeadraceError(
            f"{first.path}: file {number + 1} of a split set of {count}; give the first, {part(0).name}"
        )
    missing = [part(i).name for i in range(count) if not os.path.exists(part(i))]
    if missing:
        raise HeadraceError(
            f"{first.path}: {len(missing)} of {count} files of the split set are missing; expected {missing[0]} in the "
            "same directory"
        )
    rest = [_read_header(part(i)) for i in range(1, count)]
    for i, header in enumerate(rest, 1):
        found = (header.metadata.get("split.no"), header.metadata.get("split.count"))
        if found != (i, count):
            raise HeadraceError(f"{header.path}: expected split.no, split.count = {(i, count)}, found {shown(found)}")
    total = sum(len(h.tensors) for h in (first, *rest))
    expected = keys.integer("split.tensors.count", total, 0)
    if total != expected:
        raise HeadraceError(
            f"{first.path}: split.tensors.count: expected {expected} tensors in the split set, found {total}"
        )
    return rest


def _name(header: _Header) -> str:
    name = header.metadata.get("general.name")
    if isinstance(name, str) and name.strip():
        return name.strip()
    split = _SPLIT_NAME.fullmatch(header.path.name)
    return split[1] if split else header.path.name.removesuffix(".gguf")


def _tokenizer(header: _Header, config: ModelConfig) -> TokenizerSource:
    metadata = header.metadata
    model = metadata.get("tokenizer.ggml.model")
    if model in (None, "none", "no_vocab"):
        return TokenizerSource()
    template = Fields(metadata, str(header.path)).text("tokenizer.chat_template", None)
    tokens = metadata.get("tokenizer.ggml.tokens")
    found = len(tokens) if isinstance(tokens, list) else 0
    if found != config.vocab_size:
        raise HeadraceError(
            f"{header.path}: tokenizer and embedding disagree: token_embd.weight has {config.vocab_size} rows, "
            f"tokenizer.ggml.tokens {found} tokens"
        )
    entries: dict[str, object] = {}
    for key, value in metadata.items():
        if not key.startswith("tokenizer.") or key.startswith("tokenizer.chat_template"):
            continue
        if isinstance(value, np.ndarray):
            if len(value) != found:  # only what runs along the tokens is of use
                continue
            value = value.tolist()
        entries[key] = value
    return TokenizerSource(gguf=entries, chat_template=template, where=str(header.path))
