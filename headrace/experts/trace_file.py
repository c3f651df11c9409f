"""The trace format: routing of a run in blocks of whole tokens, compressed and checked (docs/traces.md, byte by byte).

Of a live run (RunSettings) it holds the passes too, so that the simulator can do again what the engine did.

A TraceWriter writes FILE.partial and renames it to FILE once the end block stands, so FILE is always whole. What a
killed writer leaves is readable up to its last whole block, for whoever says that a part will do.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from headrace import _core
from headrace.errors import HeadraceError
from headrace.experts.traces import MAX_EXPERTS, MAX_LAYERS, Block, ModelIdentity, Trace
from headrace.formats.checkpoint import Checkpoint
from headrace.formats.header import opened, read_at
from headrace.models.fields import Fields
from headrace.reference import read_tensor

MAGIC = b"HRTRACE\0"
VERSION = 1
HEADER = struct.Struct("<8sIII")  # magic, version, bytes of JSON, CRC-32C of these 16 bytes and the JSON
BLOCK = struct.Struct("<4sIII")  # magic, kind, bytes of payload, CRC-32C of these 12 bytes and the payload
BLOCK_MAGIC = b"HRBK"
KIND_END, KIND_TOKENS, KIND_SIZES, KIND_PASSES = 0, 1, 2, 4
TOKENS = struct.Struct("<IIII")  # tokens, sequence, position of the first, bytes of the compressed routes
END = struct.Struct("<QQ")  # tokens, sequences
PASSES = struct.Struct("<III")  # passes, all their rows that went through the last layer's experts, all their events
COUNTERS = ("hits", "late_hits", "loads", "prefetches", "evictions", "bytes_read", "bytes_unused")

BLOCK_TOKENS = 256
RUN_BLOCK_TOKENS = 32  # a live run's: what a killed one loses at most
MAX_BLOCK_PASSES = 1 << 16
MAX_BLOCK_EVENTS = 1 << 24  # 32-bit words
MAX_RUN_EXPERTS = 1 << 22  # of all layers
MAX_BLOCK_ROUTES = 1 << 22  # tokens * layers * top_k of one block: what reading it takes is bounded
MAX_TOKEN_ROUTES = 1 << 20
MAX_PAYLOAD_BYTES = 64 << 20
MAX_JSON_BYTES = 1 << 20
FLOAT16_MAX = 65504


@dataclass(frozen=True)
class RunSettings:
    """What decided, beside routes and budgets, what a recorded run would load and evict. It began cold.

    policy, hot_routes: as ExpertMemory has them. record_bytes: of an expert, [layers]. read_bytes: what loading it
    reads, uint64 [layers, num_experts].
    """

    policy: str
    hot_routes: int
    record_bytes: tuple[int, ...]
    read_bytes: np.ndarray


@dataclass(frozen=True)
class Pass:
    """One pass of a recorded run: the next num_rows tokens. out_rows: int64, ascending, the rows that went through the
    last layer's experts. arena_bytes: what the arena could hold at its end. counters: the engine's, by name, since it
    was loaded. events: uint32, what happened beside the routes (csrc/experts/read_events.h).
    """

    num_rows: int
    out_rows: np.ndarray
    arena_bytes: int
    counters: dict[str, int]
    events: np.ndarray


def identify(checkpoint: Checkpoint) -> ModelIdentity:
    """fingerprint: SHA-256 (its first 16 hex digits) of the shape and all routers as floats, so that a GGUF and the
    store packed from it are one model and a fine-tuned one is another."""
    c = checkpoint.config
    digest = hashlib.sha256()
    digest.update(
        json.dumps([c.model_type, c.hidden_size, c.num_hidden_layers, c.num_experts, c.num_experts_per_tok]).encode()
    )
    for layer in range(c.num_hidden_layers):
        name = f"blk.{layer}.ffn_gate_inp.weight"
        if name in checkpoint.tensors:
            digest.update(np.ascontiguousarray(read_tensor(checkpoint, name), "<f4").tobytes())
    return ModelIdentity(checkpoint.name, c.model_type, digest.hexdigest()[:16])


def partial_path(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def check_destination(path: Path) -> None:
    """Refuses a trace that exists, one that is being written, and a directory that does not exist."""
    partial = partial_path(path)
    if os.path.lexists(path):
        raise HeadraceError(f"{path}: exists already; remove it or give another name")
    if os.path.lexists(partial):
        raise HeadraceError(
            f"{partial}: exists already: another run writes it, or an interrupted one left it; remove or rename it"
        )
    if not path.absolute().parent.is_dir():
        raise HeadraceError(f"{path.absolute().parent}: no such directory to write the trace in; make it first")


class TraceWriter:
    """Use as a context manager: leaving it normally completes the file; an exception leaves FILE.partial with all whole
    blocks, or nothing if there are none. run: of a live run, whose every add() is a pass."""

    def __init__(
        self,
        path: Path,
        model: ModelIdentity,
        num_layers: int,
        num_experts: int,
        top_k: int,
        run: RunSettings | None = None,
    ):
        check_destination(path)
        self.path, self.partial = path, partial_path(path)
        self.num_tokens = 0  # in whole blocks on disk
        self._shape = (num_layers, top_k)
        self._id_type = _id_type(num_experts)
        self._block_tokens = min(BLOCK_TOKENS, MAX_BLOCK_ROUTES // (num_layers * top_k))
        self._flush_at = min(self._block_tokens, RUN_BLOCK_TOKENS) if run else self._block_tokens
        self._sequence = self._first = 0
        self._passes: list[Pass] = []  # not yet on disk
        self._rows: list[tuple[np.ndarray, ...]] = []  # tokens, ids, weights, scores of rows not yet on disk
        self._num_rows = 0
        values = {"model": asdict(model), "num_layers": num_layers, "num_experts": num_experts, "top_k": top_k}
        if run:
            values["run"] = {"policy": run.policy, "hot_routes": run.hot_routes}
        text = json.dumps(values).encode()
        head = HEADER.pack(MAGIC, VERSION, len(text), 0)[:16]
        try:
            self._fd = os.open(self.partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as e:
            raise HeadraceError(f"{self.partial}: cannot be written: {e.strerror}") from None
        try:
            self._write(head + struct.pack("<I", _crc(head + text)) + text)
            if run:
                sizes = np.array(run.record_bytes, "<u8").tobytes() + run.read_bytes.astype("<u8").tobytes()
                self._write_block(KIND_SIZES, zlib.compress(sizes))
        except BaseException:
            self._abandon()
            raise

    def add(
        self,
        tokens: list[int],
        ids: np.ndarray,
        weights: np.ndarray,
        scores: np.ndarray,
        run_pass: Pass | None = None,
    ) -> None:
        """The sequence's next tokens. ids: integers [layers, n, top_k]; weights, scores: floats of that shape. All are
        copied. run_pass: of a live run, the pass that they were."""
        if run_pass:
            self._passes.append(run_pass)
        values = (np.clip(v, -FLOAT16_MAX, FLOAT16_MAX).astype("<f2") for v in (weights, scores))
        self._rows.append((np.array(tokens, "<u4"), ids.astype(self._id_type), *values))
        self._num_rows += len(tokens)
        while self._num_rows >= self._flush_at:
            self._flush(min(self._num_rows, self._block_tokens))

    def end_sequence(self) -> None:
        """What follows has nothing to do with what went before."""
        self._flush(self._num_rows)
        if self._first:
            self._sequence, self._first = self._sequence + 1, 0

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is not None:
            self._abandon()
            return
        try:
            self.end_sequence()
            self._write_block(KIND_END, END.pack(self.num_tokens, self._sequence))
            os.fsync(self._fd)
            os.rename(self.partial, self.path)
        except OSError as e:
            self._abandon()
            raise HeadraceError(f"{self.path}: cannot be written: {e.strerror}") from None
        except BaseException:
            self._abandon()
            raise
        os.close(self._fd)

    def _abandon(self) -> None:
        os.close(self._fd)
        if not self.num_tokens:
            self.partial.unlink(missing_ok=True)

    def _flush(self, num_rows: int) -> None:
        """Writes the first num_rows of the rows that wait as a block."""
        if not num_rows:
            return
        tokens, ids, weights, scores = (
            np.concatenate(part, axis=0 if i == 0 else 1) for i, part in enumerate(zip(*self._rows, strict=True))
        )
        rest = (tokens[num_rows:], *(part[:, num_rows:] for part in (ids, weights, scores)))
        routes = zlib.compress(tokens[:num_rows].tobytes() + ids[:, :num_rows].tobytes())
        values = zlib.compress(weights[:, :num_rows].tobytes() + scores[:, :num_rows].tobytes())
        if self._passes:  # before their tokens, so that a reader knows them when the tokens come
            self._write_block(KIND_PASSES, _packed_passes(self._passes))
            self._passes = []
        head = TOKENS.pack(num_rows, self._sequence, self._first, len(routes))
        self._write_block(KIND_TOKENS, head + routes + values)
        self._rows, self._num_rows = [rest], self._num_rows - num_rows
        self._first += num_rows
        self.num_tokens += num_rows

    def _write_block(self, kind: int, payload: bytes) -> None:
        head = BLOCK.pack(BLOCK_MAGIC, kind, len(payload), 0)[:12]
        self._write(head + struct.pack("<I", _crc(head + payload)) + payload)

    def _write(self, data: bytes) -> None:
        done = 0
        while done < len(data):
            try:
                done += os.write(self._fd, data[done:])
            except OSError as e:
                raise HeadraceError(
                    f"{self.partial}: cannot be written: {e.strerror}; it holds the first {self.num_tokens} tokens"
                ) from None


class RecordedTrace(Trace):
    """A file of this format. partial: reads an unfinished or damaged one up to its last whole block."""

    def __init__(self, path: Path, partial: bool = False):
        self.path, self._partial = path, partial
        self.num_experts: int
        self.run: RunSettings | None = None  # of a live run
        self._end = self._num_sequences = 0  # where the end block stands and what it says, if there is one
        with opened(path) as (fd, size):
            self._begin, run = self._read_header(fd, size)
            if run is not None:
                self.run = self._read_run(fd, size, run)
            end = size - BLOCK.size - END.size
            if end >= self._begin:
                found = self._block(fd, end, size)
                if found is not None and found[0] == KIND_END and len(found[1]) == END.size:
                    self.num_tokens, self._num_sequences = END.unpack(found[1])
                    self._end = end
        if self.num_tokens is None and not partial:
            raise HeadraceError(
                f"{path}: has no end: its recording was cut off, or the file was; record it again "
                "(`headrace trace --report` and `headrace simulate` read its whole blocks with --partial)"
            )

    def blocks(self, values: bool = True) -> Iterator[Block]:
        return (item for item in self.items(values) if isinstance(item, Block))

    def items(self, values: bool = True) -> Iterator[Block | Pass]:
        """As blocks(); of a live run each pass too, before the block where its tokens begin."""
        at, sequence, first, num_tokens = self._begin, -1, 0, 0  # of the block before: where it stood and ended
        with opened(self.path) as (fd, size):
            limit = size if self.num_tokens is None else self._end
            while at < limit:
                found = self._block(fd, at, limit)
                if found is None:
                    if self._partial:
                        return
                    raise HeadraceError(f"{self.path}: offset {at}: damaged: not a whole block; record it again")
                kind, payload = found
                if kind == KIND_TOKENS:
                    block = self._tokens(payload, at, values)
                    place = (block.sequence, block.first)
                    if place != (sequence + 1, 0) and (place != (sequence, first) or not first):
                        raise self._wrong(at, f"position {block.first} of sequence {block.sequence} is out of order")
                    sequence, first = block.sequence, block.first + len(block.ids)
                    num_tokens += len(block.ids)
                    yield block
                elif kind == KIND_PASSES and self.run is not None:
                    yield from self._unpacked_passes(payload, at, max(self.run.record_bytes))
                at += BLOCK.size + len(payload)
        if self.num_tokens is not None and (num_tokens, sequence + 1) != (self.num_tokens, self._num_sequences):
            raise self._wrong(
                limit,
                f"{num_tokens} tokens in {sequence + 1} sequences, its end says {self.num_tokens} in "
                f"{self._num_sequences}",
            )

    def _read_header(self, fd: int, size: int) -> tuple[int, Fields | None]:
        """Sets the shape; returns the offset of the first block, and what it says of a live run."""
        where = f"{self.path}: header"
        if size < HEADER.size:
            raise HeadraceError(f"{self.path}: truncated: expected a header of {HEADER.size} bytes, found {size}")
        head = read_at(fd, HEADER.size, 0, self.path)
        _, version, json_bytes, crc = HEADER.unpack(head)
        if version != VERSION:
            raise HeadraceError(
                f"{self.path}: trace format version {version}, this headrace reads version {VERSION}; "
                "use the headrace that wrote it, or record it again"
            )
        if json_bytes > min(MAX_JSON_BYTES, size - HEADER.size):
            raise HeadraceError(f"{where}: {json_bytes} bytes of JSON in a file of {size}; record it again")
        text = read_at(fd, json_bytes, HEADER.size, self.path)
        if _crc(head[:16] + text) != crc:
            raise HeadraceError(f"{where}: damaged: its checksum does not hold; record it again")
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            values = None
        if type(values) is not dict:
            raise HeadraceError(f"{where}: expected a JSON object; record it again")
        fields = Fields(values, where)
        model = fields.fields("model")
        self.model = ModelIdentity(model.text("name"), model.text("architecture"), model.text("fingerprint"))
        self.num_experts = fields.integer("num_experts", high=MAX_EXPERTS)
        self.num_layers = fields.integer("num_layers", high=MAX_LAYERS)
        self.top_k = fields.integer("top_k", high=min(self.num_experts, MAX_TOKEN_ROUTES // self.num_layers))
        return HEADER.size + json_bytes, fields.fields("run", None)

    def _read_run(self, fd: int, size: int, run: Fields) -> RunSettings:
        num_experts = self.num_layers * self.num_experts
        found = self._block(fd, self._begin, size)
        if found is None or found[0] != KIND_SIZES or num_experts > MAX_RUN_EXPERTS:
            raise self._wrong(self._begin, "expected the sizes of the run's experts")
        raw = np.frombuffer(self._inflate(found[1], 8 * (self.num_layers + num_experts), self._begin), "<u8")
        if raw.min() < 1 or raw.max() >= 1 << 40:
            raise self._wrong(self._begin, "sizes of experts that are not 1 to 2^40 bytes")
        return RunSettings(
            run.text("policy"),
            run.integer("hot_routes", low=0, high=1 << 62),
            tuple(raw[: self.num_layers].tolist()),
            raw[self.num_layers :].reshape(self.num_layers, self.num_experts),
        )

    def _unpacked_passes(self, payload: bytes, at: int, smallest_arena: int) -> Iterator[Pass]:
        n, num_out, num_events = PASSES.unpack_from(payload) if len(payload) >= PASSES.size else (0, 0, 0)
        if not 1 <= n <= MAX_BLOCK_PASSES or num_out > MAX_BLOCK_ROUTES or num_events > MAX_BLOCK_EVENTS:
            raise self._wrong(at, f"{n} passes with {num_out} rows of logits and {num_events} events")
        numbers = 1 + len(COUNTERS)
        fixed = n * (8 * numbers + 12)
        data = self._inflate(payload[PASSES.size :], fixed + 4 * num_out + 4 * num_events, at)
        wide = np.frombuffer(data, "<u8", n * numbers).reshape(numbers, n).tolist()
        rows, counts, event_counts = np.frombuffer(data, "<u4", 3 * n, 8 * n * numbers).reshape(3, n).astype(np.int64)
        out = np.frombuffer(data, "<u4", num_out, fixed).astype(np.int64)
        events = np.frombuffer(data, "<u4", num_events, fixed + 4 * num_out).astype(np.uint32)
        ends, event_ends = counts.cumsum(), event_counts.cumsum()
        sizes = ends[-1], event_ends[-1]
        if rows.min() < 1 or sizes != (num_out, num_events) or min(wide[0]) < smallest_arena:
            raise self._wrong(at, "passes without rows, or with an arena too small for an expert")
        for i in range(n):
            out_rows = out[ends[i] - counts[i] : ends[i]]
            if len(out_rows) and (out_rows[-1] >= rows[i] or (out_rows[1:] <= out_rows[:-1]).any()):
                raise self._wrong(at, f"rows of logits that do not ascend below {rows[i]}")
            counters = {name: wide[1 + c][i] for c, name in enumerate(COUNTERS)}
            happened = events[event_ends[i] - event_counts[i] : event_ends[i]]
            yield Pass(int(rows[i]), out_rows, wide[0][i], counters, happened)

    def _block(self, fd: int, at: int, limit: int) -> tuple[int, bytes] | None:
        """(kind, payload) of the block at an offset; None if it is not whole."""
        if at + BLOCK.size > limit:
            return None
        head = read_at(fd, BLOCK.size, at, self.path)
        magic, kind, nbytes, crc = BLOCK.unpack(head)
        if magic != BLOCK_MAGIC or nbytes > min(MAX_PAYLOAD_BYTES, limit - at - BLOCK.size):
            return None
        payload = read_at(fd, nbytes, at + BLOCK.size, self.path)
        return (kind, payload) if _crc(head[:12] + payload) == crc else None

    def _tokens(self, payload: bytes, at: int, values: bool) -> Block:
        if len(payload) < TOKENS.size:
            raise self._wrong(at, f"a block of {len(payload)} bytes")
        n, sequence, first, routes_bytes = TOKENS.unpack_from(payload)
        num_routes = n * self.num_layers * self.top_k
        if not 1 <= num_routes <= MAX_BLOCK_ROUTES or routes_bytes > len(payload) - TOKENS.size:
            raise self._wrong(at, f"{n} tokens, {routes_bytes} bytes of routes in a block of {len(payload)}")
        shape, id_type = (self.num_layers, n, self.top_k), np.dtype(_id_type(self.num_experts))
        middle = TOKENS.size + routes_bytes
        routes = self._inflate(payload[TOKENS.size : middle], 4 * n + id_type.itemsize * num_routes, at)
        ids = np.frombuffer(routes, id_type, num_routes, 4 * n).reshape(shape).transpose(1, 0, 2).astype(np.uint16)
        if ids.max() >= self.num_experts or (ids[..., 1:] <= ids[..., :-1]).any():
            raise self._wrong(at, f"expert ids that do not ascend below {self.num_experts}")
        weights = scores = None
        if values:
            floats = np.frombuffer(self._inflate(payload[middle:], 4 * num_routes, at), "<f2").astype(np.float32)
            weights, scores = floats.reshape(2, *shape).transpose(0, 2, 1, 3)
        return Block(ids, weights, scores, np.frombuffer(routes, "<u4", n).astype(np.int64), sequence, first)

    def _inflate(self, data: bytes, nbytes: int, at: int) -> bytes:
        stream = zlib.decompressobj()
        try:
            out = stream.decompress(data, nbytes + 1)
        except zlib.error as e:
            raise self._wrong(at, f"compressed data: {e}") from None
        if len(out) != nbytes or not stream.eof or stream.unused_data:
            raise self._wrong(at, f"compressed data that does not hold {nbytes} bytes")
        return out

    def _wrong(self, at: int, what: str) -> HeadraceError:
        return HeadraceError(f"{self.path}: offset {at}: {what}; record it again")


def _packed_passes(passes: list[Pass]) -> bytes:
    """Column by column: arena and counters u64; rows, numbers of rows of logits and of events u32; then the rows of
    logits and the events u32."""
    wide = [[p.arena_bytes for p in passes]] + [[p.counters[name] for p in passes] for name in COUNTERS]
    out = np.concatenate([p.out_rows for p in passes]).astype("<u4")
    events = np.concatenate([p.events for p in passes]).astype("<u4")
    narrow = [[p.num_rows for p in passes], [len(p.out_rows) for p in passes], [len(p.events) for p in passes]]
    data = np.array(wide, "<u8").tobytes() + np.array(narrow, "<u4").tobytes() + out.tobytes() + events.tobytes()
    return PASSES.pack(len(passes), len(out), len(events)) + zlib.compress(data)


def _id_type(num_experts: int) -> str:
    return "<u1" if num_experts <= 256 else "<u2"


def _crc(data: bytes) -> int:
    return _core.crc32c(data, 0)
