"""The safetensors container: 8 bytes of header length, a JSON header, then data that it describes
without gaps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace.errors import HeadraceError
from headrace.formats.checkpoint import DType
from headrace.formats.header import opened, read_at, read_small
from headrace.formats.placing import FileTensor
from headrace.models.fields import Fields, shown

# The largest real header has a few MB; the format itself allows 100 MB.
MAX_HEADER_BYTES = 32 << 20
MAX_DIMS = 8

_DTYPES = {"F32": DType.F32, "F16": DType.F16, "BF16": DType.BF16}


def read_safetensors(path: Path, file: int) -> dict[str, FileTensor]:
    """The tensors of one file by their own names; `file` is its index in Checkpoint.files.

    Raises HeadraceError for a header that is not JSON, extents outside the file, overlapping, with
    gaps, or of another size than type and shape say, and for types other than F32, F16 and BF16.
    """
    with opened(path) as (fd, size):
        if size < 8:
            raise HeadraceError(f"{path}: truncated: expected at least 8 bytes, found {size}")
        length = int.from_bytes(read_at(fd, 8, 0, path), "little")
        most = min(MAX_HEADER_BYTES, size - 8)
        if length > most:
            raise HeadraceError(
                f"{path}: header length at offset 0: expected at most {most} for this file, found {length}; truncated, "
                "or not a safetensors file"
            )
        header = parse_json(read_at(fd, length, 8, path), f"{path}: header at offset 8")
    header.pop("__metadata__", None)
    data_offset, data_bytes = 8 + length, size - 8 - length

    tensors: dict[str, FileTensor] = {}
    for name, info in header.items():
        title = f"{path}: tensor {shown(name)}"
        if type(info) is not dict:
            raise HeadraceError(f"{title}: expected an object, found {shown(info)}")
        fields = Fields(info, title)
        dtype = _DTYPES.get(fields.text("dtype"))
        if dtype is None:
            supported = ", ".join(_DTYPES)
            raise HeadraceError(f"{title}: {shown(info['dtype'])} is not supported; supported: {supported}")
        shape, offsets = fields.items("shape"), fields.items("data_offsets")
        if len(shape) > MAX_DIMS or not all(type(d) is int and 0 < d < 2**31 for d in shape):
            raise fields.wrong("shape", f"up to {MAX_DIMS} dimensions from 1 to 2147483647")
        if len(offsets) != 2 or not all(type(o) is int for o in offsets):
            raise fields.wrong("data_offsets", "two integers")
        begin, end = offsets
        if not 0 <= begin <= end <= data_bytes:
            raise HeadraceError(
                f"{title}: truncated: expected data offsets from 0 to {data_bytes}, found {shown(offsets)}; download "
                "the file again"
            )
        nbytes = dtype.row_bytes(1)
        for d in shape:
            nbytes *= d
        if end - begin != nbytes:
            raise HeadraceError(
                f"{title}: expected {nbytes} bytes for {dtype.name} {shown(shape)}, found {end - begin}"
            )
        tensors[name] = FileTensor(title, dtype, tuple(shape), file, data_offset + begin, nbytes)

    end = data_offset
    for t in sorted(tensors.values(), key=lambda t: t.offset):
        if t.offset != end:
            problem = "overlaps another tensor's" if t.offset < end else "leaves a gap before it"
            raise HeadraceError(f"{t.title}: its data at offset {t.offset} {problem}")
        end = t.offset + t.nbytes
    if end != size:
        raise HeadraceError(f"{path}: expected {end} bytes by its header, found {size}")
    return tensors


def read_json(path: Path, limit_bytes: int = MAX_HEADER_BYTES) -> dict[str, Any]:
    """A JSON object from a file of at most limit_bytes."""
    return parse_json(read_small(path, limit_bytes), str(path))


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object; a key that occurs twice is refused."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    raise HeadraceError(f"{where}: key {shown(key)} occurs twice")
                seen.add(key)
        return values

    try:
        value = json.loads(data.decode(), object_pairs_hook=unique)
    except UnicodeDecodeError as e:
        raise HeadraceError(f"{where}: not valid UTF-8 at byte {e.start}") from None
    except json.JSONDecodeError as e:
        raise HeadraceError(f"{where}: not valid JSON: {e.msg} at character {e.pos}") from None
    except (ValueError, RecursionError) as e:  # a number of absurd length, absurd nesting
        raise HeadraceError(f"{where}: not usable JSON: {shown(str(e))}") from None
    if type(value) is not dict:
        raise HeadraceError(f"{where}: expected a JSON object, found {shown(value)}")
    return value
