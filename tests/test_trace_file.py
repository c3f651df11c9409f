"""The trace format: what is written is read back; killed writers; damaged, foreign and hostile files."""

from __future__ import annotations

import json
import signal
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from checkpoints import OLMOE, random_weights, write_gguf
from test_traces import random_ids, write_jsonl

from headrace import _core
from headrace.errors import HeadraceError
from headrace.experts.trace_file import RecordedTrace, TraceWriter, identify
from headrace.experts.traces import Block, ModelIdentity, load_replay, open_trace
from headrace.formats import open_checkpoint
from headrace.formats.pack import pack_store

MODEL = ModelIdentity("model", "olmoe", "0123456789abcdef")
LAYERS, EXPERTS, TOP_K = 3, 300, 4


class Recording:
    """Random routing of some sequences, layer by layer as a pass gives it."""

    def __init__(self, lengths: list[int], num_experts: int = EXPERTS):
        rng = np.random.default_rng(7)
        self.lengths, self.num_experts = lengths, num_experts
        n = sum(lengths)
        self.tokens = rng.integers(0, 50_000, n)
        self.ids = random_ids(n, LAYERS, num_experts, TOP_K).transpose(1, 0, 2).astype(np.int32)
        self.weights = rng.random(self.ids.shape, np.float32)
        self.scores = (rng.standard_normal(self.ids.shape) * 9).astype(np.float32)

    def write(self, path: Path, pass_rows: int = 100) -> Path:
        with TraceWriter(path, MODEL, LAYERS, self.num_experts, TOP_K) as writer:
            self.add_to(writer, pass_rows)
        return path

    def add_to(self, writer: TraceWriter, pass_rows: int = 100) -> None:
        at = 0
        for length in self.lengths:
            for begin in range(at, at + length, pass_rows):
                rows = slice(begin, min(begin + pass_rows, at + length))
                parts = (part[:, rows] for part in (self.ids, self.weights, self.scores))
                writer.add(self.tokens[rows].tolist(), *parts)
            writer.end_sequence()
            at += length

    def check(self, blocks: list[Block], num_tokens: int) -> None:
        """The blocks are the first num_tokens tokens."""
        for name in ("ids", "weights", "scores"):
            found = np.concatenate([getattr(b, name) for b in blocks])
            expected = getattr(self, name)[:, :num_tokens].transpose(1, 0, 2)
            if name != "ids":
                expected = expected.astype(np.float16).astype(np.float32)
            assert np.array_equal(found, expected)
        assert np.array_equal(np.concatenate([b.tokens for b in blocks]), self.tokens[:num_tokens])


def refused(path: Path, **options) -> str:
    with pytest.raises(HeadraceError) as error:
        list(open_trace(path, **options).blocks())
    message = str(error.value)
    assert message.startswith(str(path)) and "\n" not in message and len(message) < 400
    return message


# ---- writing and reading


@pytest.mark.parametrize("num_experts", [8, 256, 257, 65536])
def test_what_is_written_is_read(tmp_path, num_experts):
    recording = Recording([300, 1, 600], num_experts)
    trace = open_trace(recording.write(tmp_path / "t.trace"))
    assert isinstance(trace, RecordedTrace) and trace.model == MODEL
    assert (trace.num_layers, trace.num_experts, trace.top_k) == (LAYERS, num_experts, TOP_K)
    assert trace.num_tokens == 901
    for _ in range(2):
        blocks = list(trace.blocks())
        recording.check(blocks, 901)
        places = [(b.sequence, b.first, len(b.ids)) for b in blocks]
        assert places == [(0, 0, 256), (0, 256, 44), (1, 0, 1), (2, 0, 256), (2, 256, 256), (2, 512, 88)]
        assert blocks[0].ids.dtype == np.uint16 and blocks[0].weights.dtype == np.float32
    bare = list(trace.blocks(values=False))
    assert all(b.weights is None and b.scores is None for b in bare)
    assert np.array_equal(np.concatenate([b.ids for b in bare]), recording.ids.transpose(1, 0, 2))
    assert [p.name for p in tmp_path.iterdir()] == ["t.trace"]


def test_the_file_does_not_depend_on_how_passes_were_cut(tmp_path):
    recording = Recording([700, 90])
    files = [recording.write(tmp_path / f"{rows}.trace", rows).read_bytes() for rows in (1, 7, 256, 700)]
    assert len(set(files)) == 1


def test_values_beyond_float16_are_clamped(tmp_path):
    recording = Recording([3])
    recording.scores[0, 0] = [1e30, -np.inf, np.nan, 1e-30]
    scores = next(open_trace(recording.write(tmp_path / "t.trace")).blocks()).scores[0, 0]
    assert scores[0] == 65504 and scores[1] == -65504 and np.isnan(scores[2]) and scores[3] == 0


def test_the_documented_bytes(tmp_path):
    """docs/traces.md, read with nothing but struct and zlib."""
    recording = Recording([2], num_experts=256)
    data = recording.write(tmp_path / "t.trace").read_bytes()
    magic, version, json_bytes, crc = struct.unpack_from("<8sIII", data)
    assert (magic, version) == (b"HRTRACE\0", 1)
    text = data[20 : 20 + json_bytes]
    assert crc == _core.crc32c(data[:16] + text, 0)
    model = {"name": "model", "architecture": "olmoe", "fingerprint": "0123456789abcdef"}
    assert json.loads(text) == {"model": model, "num_layers": 3, "num_experts": 256, "top_k": 4}
    at = 20 + json_bytes
    magic, kind, nbytes, crc = struct.unpack_from("<4sIII", data, at)
    payload = data[at + 16 : at + 16 + nbytes]
    assert (magic, kind) == (b"HRBK", 1) and crc == _core.crc32c(data[at : at + 12] + payload, 0)
    tokens, sequence, first, routes_bytes = struct.unpack_from("<4I", payload)
    assert (tokens, sequence, first) == (2, 0, 0)
    routes, values = zlib.decompress(payload[16 : 16 + routes_bytes]), zlib.decompress(payload[16 + routes_bytes :])
    assert routes == recording.tokens.astype("<u4").tobytes() + recording.ids.astype("u1").tobytes()
    assert values == recording.weights.astype("<f2").tobytes() + recording.scores.astype("<f2").tobytes()
    at += 16 + nbytes
    assert len(data) == at + 32 and struct.unpack_from("<4sII", data, at) == (b"HRBK", 0, 16)
    assert struct.unpack_from("<QQ", data, at + 16) == (2, 1)


def test_a_block_of_an_unknown_kind_is_passed_over(tmp_path):
    recording = Recording([300])
    data = recording.write(tmp_path / "t.trace").read_bytes()
    extra = block(77, b"what a later headrace keeps beside the routes")
    (tmp_path / "more.trace").write_bytes(data[:-32] + extra + data[-32:])
    recording.check(list(open_trace(tmp_path / "more.trace").blocks()), 300)


def test_both_formats_replay_alike(tmp_path):
    recording = Recording([300, 20])
    ids = recording.ids.transpose(1, 0, 2)
    a = load_replay(open_trace(recording.write(tmp_path / "t.trace")), 500)
    b = load_replay(open_trace(write_jsonl(tmp_path / "t.jsonl", ids)), 500)
    assert np.array_equal(a.rows(0, 700), b.rows(0, 700))


def test_one_model_has_one_fingerprint_in_every_kind_of_file(tmp_path):
    gguf = write_gguf(tmp_path / "a.gguf", OLMOE, random_weights(OLMOE), dtype="Q4_0")
    store = tmp_path / "store"
    pack_store(open_checkpoint(gguf), store, lambda done, total: None)
    other = write_gguf(tmp_path / "b.gguf", OLMOE, random_weights(OLMOE, seed=1), dtype="Q4_0")
    a, packed, b = (identify(open_checkpoint(p)).fingerprint for p in (gguf, store, other))
    assert a == packed != b and len(a) == 16


# ---- unfinished files


def test_a_writer_that_fails_leaves_its_whole_blocks_under_another_name(tmp_path):
    recording, path = Recording([600]), tmp_path / "t.trace"
    with pytest.raises(ZeroDivisionError), TraceWriter(path, MODEL, LAYERS, EXPERTS, TOP_K) as writer:
        recording.add_to(writer)
        writer.add([1], recording.ids[:, :1], recording.weights[:, :1], recording.scores[:, :1])
        raise ZeroDivisionError
    assert [p.name for p in tmp_path.iterdir()] == ["t.trace.partial"]
    assert "--partial" in refused(writer.partial)
    recording.check(list(open_trace(writer.partial, partial=True).blocks()), 600)
    with pytest.raises(HeadraceError, match="partial: exists already"):
        recording.write(path)


def test_a_writer_that_fails_before_its_first_block_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError), TraceWriter(tmp_path / "t", MODEL, LAYERS, EXPERTS, TOP_K) as writer:
        writer.add([1], *(np.ones((LAYERS, 1, TOP_K), np.float32) for _ in range(3)))
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_a_killed_writer_leaves_whole_blocks(tmp_path):
    path, partial = tmp_path / "t.trace", tmp_path / "t.trace.partial"
    code = (
        f"import os, sys; sys.path[:0] = [{str(Path(__file__).parent)!r}]\n"
        "from test_trace_file import *\n"
        "recording = Recording([1000])\n"
        f"with TraceWriter(Path({str(path)!r}), MODEL, LAYERS, EXPERTS, TOP_K) as writer:\n"
        "    writer.end_sequence = lambda: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    recording.add_to(writer, 90)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not path.exists()
    Recording([1000]).check(list(open_trace(partial, partial=True).blocks()), 768)  # the rest had not made a block


def test_every_cut_is_refused_and_read_up_to_the_last_whole_block(tmp_path):
    recording = Recording([5, 4])
    data = recording.write(tmp_path / "t.trace").read_bytes()
    ends = block_ends(data)
    cut = tmp_path / "cut.trace"
    for nbytes in range(len(data)):
        cut.write_bytes(data[:nbytes])
        message = refused(cut)
        if nbytes < ends[0]:
            assert "truncated" in message or "header" in message or "holds no tokens" in message
            continue
        assert "--partial" in message
        blocks = list(open_trace(cut, partial=True).blocks())
        assert sum(len(b.ids) for b in blocks) == (ends[1] <= nbytes) * 5 + (ends[2] <= nbytes) * 4
        if blocks:
            recording.check(blocks, sum(len(b.ids) for b in blocks))


def test_a_full_disk_is_told_and_leaves_what_was_written(tmp_path):
    script = (
        f"import os, sys; sys.path[:0] = [{str(Path(__file__).parent)!r}]\n"
        "from test_trace_file import *\n"
        f"Recording([20_000]).write(Path({str(tmp_path / 't.trace')!r}))"
    )
    done = subprocess.run(
        ["bash", "-c", f'ulimit -f 100; exec {sys.executable} -c "$0"', script], capture_output=True, text=True
    )
    assert done.returncode != 0
    error = done.stderr.strip().splitlines()[-1]
    assert "t.trace.partial: cannot be written" in error and "tokens" in error
    num_tokens = sum(len(b.ids) for b in open_trace(tmp_path / "t.trace.partial", partial=True).blocks())
    assert num_tokens > 0 and f"the first {num_tokens} tokens" in error


def test_destinations_that_will_not_do(tmp_path):
    recording = Recording([3])
    path = recording.write(tmp_path / "t.trace")
    with pytest.raises(HeadraceError, match="t.trace: exists already"):
        recording.write(path)
    with pytest.raises(HeadraceError, match="no such directory"):
        recording.write(tmp_path / "none" / "t.trace")


# ---- damaged, foreign and hostile files


def block(kind: int, payload: bytes) -> bytes:
    head = struct.pack("<4sII", b"HRBK", kind, len(payload))
    return head + struct.pack("<I", _core.crc32c(head + payload, 0)) + payload


def header(**changes) -> bytes:
    fields = {"model": vars(MODEL), "num_layers": LAYERS, "num_experts": EXPERTS, "top_k": TOP_K} | changes
    return raw_header(json.dumps(fields).encode())


def raw_header(text: bytes, version: int = 1) -> bytes:
    head = struct.pack("<8sII", b"HRTRACE\0", version, len(text))
    return head + struct.pack("<I", _core.crc32c(head + text, 0)) + text


def end(tokens: int, sequences: int) -> bytes:
    return block(0, struct.pack("<QQ", tokens, sequences))


def tokens_block(n: int = 1, sequence: int = 0, first: int = 0, ids: list[int] | None = None, **changes) -> bytes:
    """Of LAYERS layers and uint16 ids, all tokens alike."""
    made = min(n, 1000)
    routes = np.zeros(made, "<u4").tobytes() + np.array((ids or [1, 2, 3, 4]) * made * LAYERS, "<u2").tobytes()
    routes = changes.get("routes", routes)
    values = changes.get("values", np.zeros(2 * made * LAYERS * TOP_K, "<f2").tobytes())
    packed = [zlib.compress(part) for part in (routes, values)]
    routes_bytes = changes.get("routes_bytes", len(packed[0]))
    tail = changes.get("tail", b"")
    return block(1, struct.pack("<4I", n, sequence, first, routes_bytes) + packed[0] + packed[1] + tail)


def block_ends(data: bytes) -> list[int]:
    """Offsets: of the header's end, then of each block's."""
    at = 20 + struct.unpack_from("<I", data, 12)[0]
    ends = [at]
    while at < len(data):
        at += 16 + struct.unpack_from("<I", data, at + 8)[0]
        ends.append(at)
    return ends


def test_the_hand_made_file_is_good(tmp_path):
    path = tmp_path / "t"
    path.write_bytes(header() + tokens_block(2) + tokens_block(3, 0, 2) + tokens_block(1, 1) + end(6, 2))
    assert [len(b.ids) for b in open_trace(path).blocks()] == [2, 3, 1]
    path.write_bytes(header() + end(0, 0))
    assert list(open_trace(path).blocks()) == []
    with pytest.raises(HeadraceError, match="holds no tokens"):
        load_replay(open_trace(path), 10)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (raw_header(b"{}", version=2) + end(0, 0), "version 2, this headrace reads version 1"),
        (raw_header(b"{}", version=0), "version 0"),
        (raw_header(b"{}") + end(0, 0), "model is missing"),
        (raw_header(b"[]") + end(0, 0), "expected a JSON object"),
        (raw_header(b"[" * 100_000) + end(0, 0), "expected a JSON object"),
        (header(num_layers=0) + end(0, 0), "num_layers"),
        (header(num_layers=True) + end(0, 0), "num_layers"),
        (header(num_experts=1 << 17) + end(0, 0), "num_experts"),
        (header(top_k=EXPERTS + 1) + end(0, 0), "top_k"),
        (header(num_layers=1025) + end(0, 0), "num_layers"),
        (header(num_layers=1024, num_experts=2000, top_k=1025) + end(0, 0), "top_k"),
        (header(model={"name": 7}) + end(0, 0), "model: name"),
        (header()[:-1] + b"!" + end(0, 0), "header: damaged"),
        (header()[:12] + b"\xff\xff\xff\x7f" + header()[16:], "header"),
        (header() + tokens_block() + end(2, 1), "1 tokens in 1 sequences, its end says 2 in 1"),
        (header() + tokens_block() + end(1, 2), "its end says 1 in 2"),
        (header() + tokens_block() + b"junk" + end(1, 1), "not a whole block"),
        (header() + tokens_block() + end(1, 1) + b"junk", "has no end"),
        (header() + tokens_block(0) + end(0, 0), "0 tokens"),
        (header() + tokens_block(1 << 31) + end(1, 1), "2147483648 tokens"),
        (header() + tokens_block(routes_bytes=1 << 31) + end(1, 1), "bytes of routes"),
        (header() + block(1, b"short") + end(1, 1), "a block of 5 bytes"),
        (header() + tokens_block(1, 1) + end(1, 1), "out of order"),
        (header() + tokens_block(1, 0, 1) + end(1, 1), "out of order"),
        (header() + tokens_block() + tokens_block(1, 0, 2) + end(2, 1), "out of order"),
        (header() + tokens_block() + tokens_block() + end(2, 1), "out of order"),
        (header() + tokens_block() + tokens_block(1, 2) + end(2, 2), "out of order"),
        (header() + tokens_block(ids=[1, 2, 3, EXPERTS]) + end(1, 1), "do not ascend below 300"),
        (header() + tokens_block(ids=[1, 3, 2, 4]) + end(1, 1), "do not ascend"),
        (header() + tokens_block(ids=[1, 2, 2, 4]) + end(1, 1), "do not ascend"),
        (header() + tokens_block(routes=bytes(27)) + end(1, 1), "does not hold 28 bytes"),
        (header() + tokens_block(routes=bytes(1 << 26)) + end(1, 1), "does not hold 28 bytes"),
        (header() + tokens_block(values=bytes(1 << 26)) + end(1, 1), "does not hold 48 bytes"),
        (header() + tokens_block(tail=b"more") + end(1, 1), "does not hold 48 bytes"),
        (header() + tokens_block(routes_bytes=3) + end(1, 1), "compressed data"),
    ],
)
def test_hostile_files_are_refused(tmp_path, data, message):
    path = tmp_path / "bad.trace"
    path.write_bytes(data)
    assert message in refused(path)


def test_every_flipped_bit_is_found(tmp_path):
    recording = Recording([5])
    data = recording.write(tmp_path / "t.trace").read_bytes()
    path = tmp_path / "flipped.trace"
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << at % 8
        path.write_bytes(flipped)
        refused(path)


def test_damage_in_the_middle_ends_a_partial_reading_there(tmp_path):
    recording = Recording([5, 4, 3])
    data = bytearray(recording.write(tmp_path / "t.trace").read_bytes())
    ends = block_ends(data)
    data[ends[2] - 3] ^= 1
    path = tmp_path / "damaged.trace"
    path.write_bytes(data)
    assert f"offset {ends[1]}: damaged" in refused(path)
    recording.check(list(open_trace(path, partial=True).blocks()), 5)
