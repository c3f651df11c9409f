"""Packing, reading and verifying a store: byte-exact layout, atomic writing, bounded memory, and
damage found wherever it is."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoints import OLMOE, QWEN3, encode, random_weights, tensor_type, write_gguf, write_hf
from layout_twin import crc32c, pack, record
from test_gguf import rounded
from values import assert_values

from headrace import _core
from headrace.errors import HeadraceError
from headrace.formats import open_checkpoint
from headrace.formats import pack as pack_module
from headrace.formats.checkpoint import DType
from headrace.formats.pack import pack_store
from headrace.formats.store import wrap_manifest
from headrace.formats.verify import verify_store
from headrace.text.tokenizer import load_tokenizer

SPECS = pytest.mark.parametrize("spec", [OLMOE, QWEN3], ids=lambda s: s.arch)
MIXED = {"ffn_down_exps": "Q8_0", "attn_v": "F16", "attn_k.": "BF16", "token_embd": "Q8_0"}


def silent(done_bytes: int, total_bytes: int) -> None:
    pass


def small_gguf(path: Path, spec=OLMOE, dtype="Q4_0", **options) -> Path:
    return write_gguf(path, spec, random_weights(spec), dtype, vocabulary=True, **options)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return small_gguf(tmp_path_factory.mktemp("source") / "m.gguf", overrides=MIXED)


@pytest.fixture
def store(tmp_path, source) -> Path:
    path = tmp_path / "m.store"
    pack_store(open_checkpoint(source), path, silent)
    return path


def manifest_body(store: Path) -> dict:
    return json.loads((store / "manifest.json").read_text())["manifest"]


# ---- what packing writes


@SPECS
@pytest.mark.parametrize("dtype", [t.name for t in DType])
def test_same_values_as_its_source(tmp_path, spec, dtype):
    weights = random_weights(spec)
    options = {"fuse_qkv": True, "fuse_gate_up": True}
    in_place = open_checkpoint(write_gguf(tmp_path / "m.gguf", spec, weights, dtype, **options))
    pack_store(in_place, tmp_path / "s", silent)
    packed = open_checkpoint(tmp_path / "s")
    assert_values(packed, rounded(weights, dtype))
    assert packed.config == in_place.config
    assert (packed.kind, packed.name) == ("store", in_place.name)
    assert [layer.parts for layer in packed.experts] == [layer.parts for layer in in_place.experts]
    assert verify_store(tmp_path / "s", silent).problems == []


@SPECS
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_same_values_from_hugging_face(tmp_path, spec, dtype):
    spec = spec.but(moe_intermediate_size=41, vocab_size=281, num_experts=5)
    weights = random_weights(spec)
    write_hf(tmp_path / "hf", spec, weights, dtype, shards=2, generation={"temperature": 0.5})
    in_place = open_checkpoint(tmp_path / "hf")
    pack_store(in_place, tmp_path / "s", silent)
    packed = open_checkpoint(tmp_path / "s")
    assert_values(packed, rounded(weights, dtype, {"": dtype}))
    assert packed.config == in_place.config


def test_tied_embeddings(tmp_path):
    spec = QWEN3.but(tie_word_embeddings=True)
    weights = random_weights(spec)
    path = write_gguf(tmp_path / "m.gguf", spec, weights, "Q8_0")
    pack_store(open_checkpoint(path), tmp_path / "s", silent)
    assert_values(open_checkpoint(tmp_path / "s"), rounded(weights, "Q8_0"))


@pytest.mark.parametrize("chunk_bytes", [1, 5000, 1 << 20])
def test_files_are_the_bytes_that_the_format_says(tmp_path, source, monkeypatch, chunk_bytes):
    monkeypatch.setattr(pack_module, "CHUNK_BYTES", chunk_bytes)
    pack_store(open_checkpoint(source), tmp_path / "s", silent)
    weights = random_weights(OLMOE)

    def stored(name):
        kind = tensor_type(name, weights[name].shape, "Q4_0", MIXED)
        return DType[kind], encode(weights[name], kind)

    body = manifest_body(tmp_path / "s")
    trunk = (tmp_path / "s" / "trunk.bin").read_bytes()
    for entry in body["tensors"]:
        dtype, rows = stored(entry["name"])
        expected = (rows if rows.ndim == 1 else pack(dtype, rows)).tobytes()
        at = entry["offset"]
        assert at % 64 == 0
        assert trunk[at : at + entry["bytes"]] == expected
        assert entry["crc32c"] == crc32c(expected)
        assert (entry["dtype"], entry["shape"]) == (dtype.name, list(weights[entry["name"]].shape))

    embed = (tmp_path / "s" / "embed.bin").read_bytes()
    _, rows = stored("token_embd.weight")
    stride = body["embedding"]["stride_bytes"]
    assert len(embed) == stride * len(rows) and stride % 8 == 0
    for i in (0, 1, 17, len(rows) - 1):
        row = rows[i].tobytes()
        expected = row + crc32c(row).to_bytes(4, "little")
        assert embed[i * stride : (i + 1) * stride] == expected.ljust(stride, b"\0")

    experts = (tmp_path / "s" / "experts.bin").read_bytes()
    end = 0
    for i, layer in enumerate(body["layers"]):
        parts = [stored(f"blk.{i}.ffn_{part}_exps.weight") for part in ("gate", "up", "down")]
        assert layer["offset"] == end
        for e in range(OLMOE.num_experts):
            expected = record([(dtype, rows[e]) for dtype, rows in parts]).tobytes()
            assert layer["record_bytes"] == len(expected)
            assert experts[end : end + len(expected)] == expected
            assert layer["crc32c"][e] == crc32c(expected)
            end += len(expected)
    assert end == len(experts)


def test_the_twin_agrees_with_the_core():
    rng = np.random.default_rng(3)
    for dtype in DType:
        for rows, cols in ((1, 32), (15, 64), (16, 96), (33, 32), (50, 160)):
            data = rng.integers(0, 256, (rows, dtype.row_bytes(cols)), np.uint8)
            out = np.zeros(_core.matrix_bytes(int(dtype), rows, cols), np.uint8)
            _core.pack_rows(int(dtype), rows, cols, 0, data.reshape(-1), out)
            np.testing.assert_array_equal(out, pack(dtype, data))
    data = rng.integers(0, 256, 1000, np.uint8).tobytes()
    for n in (0, 1, 7, 8, 9, 63, 64, 65, 999):
        assert _core.crc32c(data[:n], 0) == crc32c(data[:n])
    assert _core.crc32c(data[7:], _core.crc32c(data[:7], 0)) == crc32c(data)
    assert crc32c(b"123456789") == 0xE3069283  # the checksum's published check value


@SPECS
def test_the_tokenizer_is_the_source_s(tmp_path, spec):
    source = open_checkpoint(small_gguf(tmp_path / "m.gguf", spec, chat_template="{{ messages }}"))
    pack_store(source, tmp_path / "s", silent)
    packed = open_checkpoint(tmp_path / "s")
    assert packed.tokenizer.chat_template == "{{ messages }}"
    a, b = (load_tokenizer(c.tokenizer, c.config) for c in (source, packed))
    text = "The end of the other and the Ω<|im_end|> 123\n\n  and"
    assert a.encode(text) == b.encode(text)
    assert a.decode(a.encode(text)) == b.decode(b.encode(text))
    assert (a.eos_token_ids, a.bos_token_id) == (b.eos_token_ids, b.bos_token_id)


def test_a_hugging_face_tokenizer_is_kept_byte_for_byte(tmp_path):
    source = write_hf(tmp_path / "hf", QWEN3, random_weights(QWEN3), vocabulary=True, chat_template="t")
    pack_store(open_checkpoint(source), tmp_path / "s", silent)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "s" / name).read_bytes() == (source / name).read_bytes()
    assert open_checkpoint(tmp_path / "s").tokenizer.chat_template == "t"


def test_progress_and_size(tmp_path, source):
    seen = []
    nbytes = pack_store(open_checkpoint(source), tmp_path / "s", lambda *a: seen.append(a))
    assert nbytes == sum(f.stat().st_size for f in (tmp_path / "s").iterdir())
    done = [d for d, _ in seen]
    assert done == sorted(done) and seen[-1][0] == seen[-1][1]
    assert len({total for _, total in seen}) == 1


def test_memory_stays_bounded(tmp_path):
    sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
    from synth import SHAPES, write_synthetic

    path = tmp_path / "large.gguf"
    write_synthetic(path, SHAPES["small"], "Q8_0", layers=1)
    assert path.stat().st_size > 120e6
    child = """
import re, sys
from pathlib import Path
from headrace.formats import open_checkpoint
from headrace.formats.pack import pack_store
from headrace.formats.verify import verify_store
def peak_kib():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
checkpoint = open_checkpoint(Path(sys.argv[1]))
before = peak_kib()
pack_store(checkpoint, Path(sys.argv[2]), lambda done, total: None)
packed = peak_kib()
verify_store(Path(sys.argv[2]), lambda done, total: None)
print(packed - before, peak_kib() - before)
"""
    arguments = [sys.executable, "-c", child, str(path), str(tmp_path / "s")]
    out = subprocess.run(arguments, check=True, capture_output=True, text=True).stdout
    # Three buffers of 8 MiB and a little for Python.
    for grown_kib in out.split():
        assert int(grown_kib) < 36 * 1024


# ---- packing that fails leaves nothing behind


def assert_nothing_left(directory: Path, before: set[str]) -> None:
    assert set(os.listdir(directory)) == before


def test_an_existing_destination_is_refused(tmp_path, source, store):
    checkpoint = open_checkpoint(source)
    before = {f.name: f.read_bytes() for f in store.iterdir()}
    with pytest.raises(HeadraceError, match="exists already"):
        pack_store(checkpoint, store, silent)
    assert {f.name: f.read_bytes() for f in store.iterdir()} == before
    for make in (lambda p: p.mkdir(), lambda p: p.write_text(""), lambda p: p.symlink_to("/none")):
        path = tmp_path / "other"
        make(path)
        with pytest.raises(HeadraceError, match="exists already"):
            pack_store(checkpoint, path, silent)
        path.rmdir() if path.is_dir() else path.unlink()


def test_a_missing_parent_is_named(tmp_path, source):
    with pytest.raises(HeadraceError, match="no such directory"):
        pack_store(open_checkpoint(source), tmp_path / "no" / "s", silent)


def test_a_store_is_not_packed_again(tmp_path, store):
    with pytest.raises(HeadraceError, match="is a store already"):
        pack_store(open_checkpoint(store), tmp_path / "again", silent)


@pytest.mark.parametrize("exception", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("at", [0.0, 0.4, 0.9, 1.0])
def test_an_interrupted_pack_leaves_nothing(tmp_path, source, exception, at):
    def progress(done: int, total: int) -> None:
        if done >= at * total:
            raise exception

    with pytest.raises(exception):
        pack_store(open_checkpoint(source), tmp_path / "s", progress)
    assert_nothing_left(tmp_path, set())


def test_too_little_space_is_told_before_writing(tmp_path, source, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(pack_module.shutil, "disk_usage", lambda path: usage)
    needed = pack_module._packed_bytes(open_checkpoint(source))
    with pytest.raises(HeadraceError, match=f"needs {needed} bytes, 1000 are free"):
        pack_store(open_checkpoint(source), tmp_path / "s", silent)
    assert_nothing_left(tmp_path, set())


@pytest.mark.parametrize("call", ["write", "fsync", "rename", "mkdir"])
def test_a_full_disk_leaves_nothing(tmp_path, source, monkeypatch, call):
    checkpoint = open_checkpoint(source)
    real = getattr(os, call)
    calls = 0

    def fail(*args):
        nonlocal calls
        calls += 1
        if call == "write" and calls < 20:
            return real(*args)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pack_module.os, call, fail)
    with pytest.raises(HeadraceError, match="No space left on device"):
        pack_store(checkpoint, tmp_path / "s", silent)
    monkeypatch.undo()
    assert_nothing_left(tmp_path, set())


def test_short_writes_are_continued(tmp_path, source, monkeypatch):
    checkpoint = open_checkpoint(source)
    real = os.write
    monkeypatch.setattr(pack_module.os, "write", lambda fd, data: real(fd, data[: len(data) // 2 + 1]))
    pack_store(checkpoint, tmp_path / "s", silent)
    monkeypatch.undo()
    assert verify_store(tmp_path / "s", silent).problems == []


def test_a_limit_of_the_system_leaves_nothing(tmp_path, source):
    child = """
import resource, sys
from pathlib import Path
from headrace.errors import HeadraceError
from headrace.formats import open_checkpoint
from headrace.formats.pack import pack_store
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
try:
    pack_store(open_checkpoint(Path(sys.argv[1])), Path(sys.argv[2]), lambda done, total: None)
except HeadraceError as e:
    print(e)
"""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    arguments = [sys.executable, "-c", child, str(source), str(tmp_path / "s")]
    out = subprocess.run(arguments, check=True, capture_output=True, text=True).stdout
    assert re.search(r"write of trunk.bin at offset \d+: File too large", out), out
    assert_nothing_left(tmp_path, set())


def test_a_source_that_breaks_leaves_nothing(tmp_path):
    path = small_gguf(tmp_path / "m.gguf")
    checkpoint = open_checkpoint(path)
    os.truncate(path, path.stat().st_size - 5000)
    with pytest.raises(HeadraceError, match=r"m\.gguf: truncated"):
        pack_store(checkpoint, tmp_path / "s", silent)
    path.unlink()
    with pytest.raises(HeadraceError, match="no such file"):
        pack_store(checkpoint, tmp_path / "s", silent)
    assert_nothing_left(tmp_path, set())


# ---- damage


def flip(path: Path, at: int, bit: int = 0) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


def test_a_flipped_byte_of_the_manifest_is_found_at_load(store):
    path = store / "manifest.json"
    data = path.read_bytes()
    everywhere = range(0, len(data), 7)
    for at in sorted({*range(60), *everywhere, *range(len(data) - 10, len(data))}):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        with pytest.raises(HeadraceError, match=r"manifest\.json") as e:
            open_checkpoint(store)
        assert "\n" not in str(e.value)


def test_a_cut_manifest_is_found(store):
    path = store / "manifest.json"
    data = path.read_bytes()
    for n in (0, 1, 10, 30, len(data) // 2, len(data) - 2, len(data) - 1):
        path.write_bytes(data[:n])
        with pytest.raises(HeadraceError, match=r"manifest\.json"):
            open_checkpoint(store)
    path.write_bytes(data + b" ")
    with pytest.raises(HeadraceError, match=r"manifest\.json"):
        open_checkpoint(store)


def test_a_flipped_byte_of_the_tokenizer_is_found_at_load(store):
    path = store / "tokenizer.json"
    for at in range(0, path.stat().st_size, 211):
        flip(path, at)
        with pytest.raises(HeadraceError, match=r"tokenizer\.json: damaged"):
            open_checkpoint(store)
        flip(path, at)
    open_checkpoint(store)


def problem_after_flip(store: Path, name: str, at: int) -> str:
    flip(store / name, at, at % 8)
    report = verify_store(store, silent)
    flip(store / name, at, at % 8)
    assert len(report.problems) == 1, (name, at)
    return report.problems[0]


def test_verify_names_what_a_flipped_byte_hit(store):
    body = manifest_body(store)
    rng = np.random.default_rng(5)

    trunk_bytes = (store / "trunk.bin").stat().st_size
    tensors = body["tensors"]
    positions = {t["offset"] for t in tensors} | {t["offset"] + t["bytes"] - 1 for t in tensors}
    positions |= set(rng.integers(0, trunk_bytes, 40).tolist())
    for at in sorted(positions):
        problem = problem_after_flip(store, "trunk.bin", at)
        hit = [t for t in tensors if t["offset"] <= at < t["offset"] + t["bytes"]]
        expected = f"tensor {hit[0]['name']} at offset {hit[0]['offset']}" if hit else "padding"
        assert expected in problem

    stride = body["embedding"]["stride_bytes"]
    for at in rng.integers(0, stride * body["embedding"]["rows"], 40).tolist():
        problem = problem_after_flip(store, "embed.bin", at)
        row = at // stride
        assert f"embedding row {row} at offset {row * stride}:" in problem or "padding" in problem

    for index, layer in enumerate(body["layers"]):
        size = layer["record_bytes"]
        for at in rng.integers(0, size * OLMOE.num_experts, 20).tolist():
            expert, offset = at // size, layer["offset"] + at // size * size
            problem = problem_after_flip(store, "experts.bin", layer["offset"] + at)
            assert f"layer {index}, expert {expert} at offset {offset}:" in problem


def test_verify_of_something_else(tmp_path, source):
    for path in (tmp_path, source):
        with pytest.raises(HeadraceError, match=r"not a store: expected manifest\.json"):
            verify_store(path, silent)
    with pytest.raises(HeadraceError, match="none: no such file or directory"):
        verify_store(tmp_path / "none", silent)


def test_verify_reads_everything_once_and_reports_all_damage(store):
    seen = []
    large = ("trunk.bin", "embed.bin", "experts.bin")
    total = sum((store / name).stat().st_size for name in large)
    report = verify_store(store, lambda *a: seen.append(a))
    assert report.bytes_read == total and seen[-1] == (total, total)
    assert report.expert_records == OLMOE.num_experts * OLMOE.num_hidden_layers
    assert report.embedding_rows == OLMOE.vocab_size
    for name in large:
        flip(store / name, 0)
        flip(store / name, (store / name).stat().st_size - 4097 if name == "experts.bin" else 5000)
    report = verify_store(store, silent)
    assert len(report.problems) == 6
    assert json.loads(json.dumps(report.as_dict()))["ok"] is False


@pytest.mark.parametrize("name", ["trunk.bin", "embed.bin", "experts.bin", "tokenizer.json"])
def test_missing_and_cut_files(store, name):
    path = store / name
    data = path.read_bytes()
    for damaged in (data[:-1], data + b"\0", b""):
        path.write_bytes(damaged)
        with pytest.raises(HeadraceError, match=f"{name}: expected {len(data)} bytes"):
            open_checkpoint(store)
    path.unlink()
    with pytest.raises(HeadraceError, match=f"{name}: no such file"):
        open_checkpoint(store)


def rewrite(store: Path, change) -> None:
    """Changes the manifest and gives it a checksum that holds."""
    body = manifest_body(store)
    change(body)
    (store / "manifest.json").write_bytes(wrap_manifest(body))


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("format_version", 2, "format version 2 is not supported; .* reads 1"),
        ("format_version", 0, "format_version"),
        ("layout", "tile8", "layout 'tile8' is not supported; .* reads tile16"),
        ("format", "other", "format: expected 'headrace-store'"),
    ],
)
def test_another_format_is_refused_by_name(store, key, value, message):
    rewrite(store, lambda body: body.__setitem__(key, value))
    with pytest.raises(HeadraceError, match=message):
        open_checkpoint(store)


def _set(*path, value):
    def change(body):
        for key in path[:-1]:
            body = body[key]
        if value is None:
            del body[path[-1]]
        else:
            body[path[-1]] = value

    return change


@pytest.mark.parametrize(
    "change, message",
    [
        (_set("config", "vocab_size", value=331), "shape: expected"),
        (_set("config", "num_hidden_layers", value=2**31 - 1), "blk.2.attn_norm.weight is missing"),
        (_set("config", "model_type", value="gpt_oss"), "model_type"),
        (_set("tensors", 0, value=None), "is missing"),
        (_set("tensors", 3, "offset", value=2**62), "offset: expected"),
        (_set("tensors", 3, "offset", value=-64), "offset: expected"),
        (_set("tensors", 3, "offset", value=1), "offset: expected"),
        (_set("tensors", 3, "bytes", value=64), "bytes: expected"),
        (_set("tensors", 3, "dtype", value="Q4_K"), "dtype: expected"),
        (_set("tensors", 3, "dtype", value=7), "dtype: expected"),
        (_set("tensors", 3, "crc32c", value=2**32), "crc32c: expected"),
        (_set("tensors", 3, "name", value="extra"), "is missing"),
        (_set("tensors", 3, value=5), "tensors: expected a list of objects"),
        (_set("embedding", "rows", value=2**31 - 1), "rows: expected"),
        (_set("embedding", "stride_bytes", value=8), "stride_bytes: expected"),
        (_set("layers", 1, value=None), "expected 2 layers, found 1"),
        (_set("layers", 1, "offset", value=2**62), "offset: expected"),
        (_set("layers", 1, "record_bytes", value=4096), "record_bytes: expected"),
        (_set("layers", 1, "crc32c", value=[1, 2]), "8 checksums"),
        (_set("layers", 1, "gate", value="F64"), "gate: expected"),
        (_set("files", "experts.bin", value=None), "experts.bin is missing"),
        (_set("files", value=[]), "files: expected an object"),
    ],
)
def test_a_manifest_that_lies_is_refused(store, change, message):
    rewrite(store, change)
    with pytest.raises(HeadraceError, match=message) as e:
        open_checkpoint(store)
    assert "manifest.json" in str(e.value) and "\n" not in str(e.value)
