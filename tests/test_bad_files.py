"""Hostile, truncated and mistaken files: always one line that names the file, never another
exception, never memory or time without bound."""

from __future__ import annotations

import json
import os
import resource
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from checkpoints import (
    OLMOE,
    QWEN3,
    hf_tensors,
    random_weights,
    write_gguf,
    write_hf,
    write_safetensors,
)

from headrace.errors import HeadraceError
from headrace.formats import open_checkpoint
from headrace.formats.checkpoint import Checkpoint
from headrace.formats.pack import pack_store
from headrace.formats.store import wrap_manifest
from headrace.text.tokenizer import load_tokenizer

TINY = OLMOE.but(num_hidden_layers=1, num_experts=3, num_experts_per_tok=2, vocab_size=280)


def fails(path: Path, message: str) -> None:
    with pytest.raises(HeadraceError, match=message) as e:
        open_checkpoint(path)
    text = str(e.value)
    assert "\n" not in text and len(text) < 500
    assert path.name in text


# ---- a GGUF header by hand


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + value


def tensor(name: str, dims: list[int], kind: int = 0, offset: int = 0, n_dims: int | None = None):
    n = len(dims) if n_dims is None else n_dims
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", n, *dims, kind, offset)


def header(
    keys: list[bytes] = (),
    tensors: list[bytes] = (),
    version: int = 3,
    num_tensors: int | None = None,
    num_keys: int | None = None,
) -> bytes:
    n = len(tensors) if num_tensors is None else num_tensors
    m = len(keys) if num_keys is None else num_keys
    return b"GGUF" + struct.pack("<IQQ", version, n, m) + b"".join([*keys, *tensors])


ARCH = key("general.architecture", 8, string("olmoe"))


@pytest.mark.parametrize(
    "data, message",
    [
        (b"", "the file is empty"),
        (b"G", "not a GGUF"),
        (b"GGUF", "truncated: version"),
        (b"\x80\x04ab" + bytes(100), "not a GGUF: expected the bytes b'GGUF'"),
        (b"ggjt" + bytes(100), "not a GGUF"),
        (header(version=1), "GGUF version 1 is not supported; expected 3"),
        (header(version=2), "GGUF version 2 is not supported"),
        (header(version=4), "GGUF version 4 is not supported"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (header([ARCH], num_tensors=2**63), "tensor count .* found 9223372036854775808"),
        (header([ARCH], num_tensors=1), "truncated: tensor name at offset 69"),
        (header([ARCH], num_keys=2**64 - 1), "key count"),
        (header([ARCH], num_keys=2), "truncated: key"),
        (header([ARCH, ARCH]), "key 'general.architecture' at offset 69 occurs twice"),
        (header([key("a", 8, struct.pack("<Q", 2**63))]), "truncated: key 'a' at offset 45 needs"),
        (header([key("a", 8, struct.pack("<Q", 1000) + b"x")]), "truncated: key 'a'"),
        (header([key("", 4, bytes(4)), ARCH]), "key at offset 24: expected a length"),
        (header([struct.pack("<Q", 2**40) + bytes(64)]), "key at offset 24: expected a length"),
        (header([key(b"\xff\xfe", 4, bytes(4))]), "not valid UTF-8"),
        (header([key("a", 8, string(b"\xff\xfe"))]), "key 'a' at offset .* not valid UTF-8"),
        (header([key("a", 13, bytes(32))]), "key 'a' at offset .*: unknown value type 13"),
        (header([key("a", 9, struct.pack("<IQ", 9, 1) + bytes(99))]), "arrays of value type 9"),
        (header([key("a", 9, struct.pack("<IQ", 4, 2**61))]), "array of at most 0 values"),
        (header([key("a", 9, struct.pack("<IQ", 8, 2**61) + bytes(80))]), "array of at most 10"),
        (header([key("a", 9, struct.pack("<IQ", 0, 2**64 - 1))]), "array of at most 0 values"),
        (header([key("a\nb", 99, bytes(32))]), r"key 'a\\nb' at offset"),
        (header([key("general.architecture", 4, bytes(4))]), "architecture: expected a string"),
        (header([key("a", 4, bytes(4))]), "general.architecture is missing"),
        (header([key("general.architecture", 8, string("llama"))]), "'llama' is not supported; "),
        (header([key("general.architecture", 8, string("x" * 5000))]), "xxx... is not supported"),
        (header([ARCH, key("general.alignment", 4, struct.pack("<I", 3))]), "a power of two"),
        (header([ARCH, key("general.alignment", 4, bytes(4))]), "general.alignment: expected"),
        (header([ARCH, key("general.alignment", 8, string("32"))]), "general.alignment: expected"),
        (header([ARCH], [tensor("t", [])]) + bytes(32), "'t' at offset .*: expected 1 to 4"),
        (header([ARCH], [tensor("t", [1] * 5)]), "'t' at offset .*: expected 1 to 4 dimensions"),
        (header([ARCH], [tensor("t", [1], n_dims=2**31)]), "'t' at offset .*: expected 1 to 4"),
        (header([ARCH], [tensor("t", [0, 4])]), "expected dimensions from 1"),
        (header([ARCH], [tensor("t", [2**63, 2**63])]), "expected dimensions from 1"),
        (header([ARCH], [tensor("t", [2**31 - 1] * 4)]), "tensor 't': truncated"),
        (header([ARCH], [tensor("t", [2], offset=2**64 - 32)]), "tensor 't': truncated"),
        (header([ARCH], [tensor("t", [2], offset=1)]) + bytes(99), "a multiple of 32, found 1"),
        (header([ARCH], [tensor("t", [32], 12)]) + bytes(999), "Q4_K is not supported; supp"),
        (header([ARCH], [tensor("t", [32], 77)]) + bytes(999), "type 77 is not supported"),
        (header([ARCH], [tensor("t", [33], 2)]) + bytes(999), "multiple of 32 values for Q4_0"),
        (header([ARCH], [tensor("t", [2]), tensor("t", [2])]) + bytes(99), "'t' at .* twice"),
        (header([ARCH], [tensor("t", [9]), tensor("u", [2])]) + bytes(99), "overlaps another"),
        (header([ARCH]), "embedding_length is missing"),
        (header(num_tensors=10**6) + bytes(40 << 10), "tensor count"),
    ],
)  # fmt: skip
def test_malformed_gguf(tmp_path, data, message):
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    fails(path, message)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "m.gguf"
    return write_gguf(path, TINY, random_weights(TINY), "Q4_0", vocabulary=True).read_bytes()


@pytest.fixture(scope="module")
def data_offset(whole, tmp_path_factory) -> int:
    path = tmp_path_factory.mktemp("offset") / "m.gguf"
    path.write_bytes(whole)
    return min(t.data_offset for t in gguf.GGUFReader(path).tensors)


def test_truncation_anywhere_in_the_header(tmp_path, whole, data_offset):
    path = tmp_path / "cut.gguf"
    for n in range(1, data_offset, 7):
        path.write_bytes(whole[:n])
        fails(path, "truncated|not a GGUF")


def test_truncation_of_tensor_data(tmp_path, whole, data_offset):
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole)
    ends = [t.data_offset + t.n_bytes for t in gguf.GGUFReader(path).tensors]
    for n in [data_offset, *(e - 1 for e in ends), *(e for e in ends if e < max(ends))]:
        path.write_bytes(whole[:n])
        fails(path, "tensor '.*': truncated: its .* download it again")
    path.write_bytes(whole[: max(ends)])  # only padding is missing
    open_checkpoint(path)


@pytest.mark.parametrize("name", sorted(TINY.shapes()))
def test_a_missing_tensor_is_named(tmp_path, name):
    weights = random_weights(TINY)
    del weights[name]
    path = tmp_path / "m.gguf"
    if name == "output.weight":  # absent means tied
        assert open_checkpoint(write_gguf(path, TINY, weights)).config.tie_word_embeddings
        return
    fails(write_gguf(path, TINY, weights), f"tensor {name} is missing|vocabulary size")


@pytest.mark.parametrize("name", sorted(TINY.shapes()))
def test_a_tensor_of_another_shape_is_named(tmp_path, name):
    weights = random_weights(TINY)
    weights[name] = np.concatenate([weights[name], weights[name][:1]])
    metadata = {"olmoe.vocab_size": TINY.vocab_size}
    path = write_gguf(tmp_path / "m.gguf", TINY, weights, metadata=metadata)
    fails(path, f"tensor '{name}': expected shape .* found")


@pytest.mark.parametrize(
    "name",
    [
        "blk.0.attn_q.bias",
        "blk.0.ffn_gate_exps.scale",
        "blk.0.ffn_gate_shexp.weight",
        "blk.1.attn_norm.weight",
        "rope_freqs.weight",
        "something.else",
    ],
)
def test_a_tensor_without_a_place_is_refused(tmp_path, name):
    weights = random_weights(TINY) | {name: np.ones(8, np.float32)}
    path = write_gguf(tmp_path / "m.gguf", TINY, weights)
    fails(path, f"tensor '{name}': this tensor has no place in the model")


def test_fused_and_separate_together_are_refused(tmp_path):
    weights = random_weights(TINY)
    weights["blk.0.attn_qkv.weight"] = np.ones((192, 64), np.float32)
    fails(write_gguf(tmp_path / "m.gguf", TINY, weights), "exists beside it")


@pytest.mark.parametrize(
    "metadata, message",
    [
        ({"olmoe.block_count": 2}, "blk.1.attn_norm.weight is missing"),
        ({"olmoe.block_count": 2**31 - 1}, "blk.1.attn_norm.weight is missing"),
        ({"olmoe.block_count": 0}, "block_count: expected"),
        ({"olmoe.block_count": "1"}, "block_count: expected"),
        ({"olmoe.block_count": None}, "block_count is missing"),
        ({"olmoe.context_length": None}, "context_length is missing"),
        ({"olmoe.embedding_length": 128}, "expected shape"),
        ({"olmoe.attention.head_count": 3}, "kv heads|even head_dim"),
        ({"olmoe.attention.head_count": [4, 4]}, "head_count: expected an integer"),
        ({"olmoe.expert_count": 4}, "expected shape"),
        ({"olmoe.expert_count": 2**31 - 1}, "at most 65536 experts"),
        ({"olmoe.expert_used_count": 4}, "experts used at most 3"),
        ({"olmoe.vocab_size": 281}, "'token_embd.weight': expected shape"),
        ({"olmoe.attention.layer_norm_rms_epsilon": float("nan")}, "epsilon: expected a finite"),
        ({"olmoe.attention.key_length": 15}, "even head_dim"),
        ({"olmoe.attention.value_length": 8}, "value_length = 8 is not supported; supported: 16"),
        ({"olmoe.rope.dimension_count": 8}, "dimension_count = 8 is not supported"),
        ({"olmoe.rope.scaling.type": "yarn"}, "type = 'yarn' is not supported"),
        ({"olmoe.rope.scaling.factor": 4.0}, "factor = 4.0 is not supported"),
        ({"olmoe.attention.sliding_window": 128}, "sliding_window = 128 is not supported"),
        ({"olmoe.attention.clamp_kqv": 8.0}, "clamp_kqv = 8.0 is not supported"),
        ({"olmoe.expert_gating_func": 2}, "gating_func = 2 is not supported"),
        ({"olmoe.expert_weights_scale": 2.5}, "weights_scale = 2.5 is not supported"),
        ({"olmoe.expert_shared_count": 1}, "shared_count = 1 is not supported"),
        ({"olmoe.leading_dense_block_count": 1}, "dense_block_count = 1 is not supported"),
        ({"general.architecture": "qwen3next"}, "'qwen3next' is not supported; .* olmoe, qwen3moe"),
        ({"general.sampling.temp": "hot"}, "temp: expected a finite number"),
    ],
)
def test_settings_that_cannot_be_honoured(tmp_path, metadata, message):
    path = write_gguf(tmp_path / "m.gguf", TINY, random_weights(TINY), metadata=metadata)
    fails(path, message)


def test_tokenizer_and_embedding_that_disagree(tmp_path):
    metadata = {"tokenizer.ggml.tokens": ["a", "b", "c"]}
    path = tmp_path / "m.gguf"
    write_gguf(path, TINY, random_weights(TINY), vocabulary=True, metadata=metadata)
    fails(path, "disagree: token_embd.weight has 280 rows, tokenizer.ggml.tokens 3 tokens")


def test_quantized_vectors_are_refused(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path, TINY, random_weights(TINY), overrides={"output_norm": "Q8_0"})
    fails(path, "'output_norm.weight': expected F32, F16 or BF16, found Q8_0")


def test_unsupported_types_are_named_with_their_tensor(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path, TINY, random_weights(TINY), overrides={"ffn_up": "Q5_0"})
    fails(path, "'blk.0.ffn_up_exps.weight': Q5_0 is not supported; supported: F32, F16, Q4_0, Q8_0")


def test_a_header_without_bound_is_refused(tmp_path):
    # 70 MB of strings: within the file, but no vocabulary has that.
    value = b"".join(string(b"x" * (1 << 20)) for _ in range(70))
    path = tmp_path / "m.gguf"
    path.write_bytes(header([ARCH, key("a", 9, struct.pack("<IQ", 8, 70) + value)]) + bytes(64))
    fails(path, "the header is larger than")


# ---- split sets


@pytest.fixture
def split(tmp_path) -> Path:
    return write_gguf(tmp_path / "m.gguf", TINY, random_weights(TINY), split_max_tensors=6)


def rewrite_key(path: Path, name: str, fmt: str, value: int) -> None:
    data = bytearray(path.read_bytes())
    at = data.index(string(name)) + len(string(name)) + 4
    struct.pack_into(fmt, data, at, value)
    path.write_bytes(data)


def test_another_file_than_the_first(split):
    other = split.with_name(split.name.replace("00001-of", "00002-of"))
    fails(other, f"architecture is missing|give the first, {split.name}")
    # Most writers repeat the metadata in every file.
    data = split.read_bytes()
    other.write_bytes(data)
    rewrite_key(other, "split.no", "<H", 1)
    fails(other, f"file 2 of a split set of 3; give the first, {split.name}")


def test_a_missing_part(split):
    other = split.with_name(split.name.replace("00001-of", "00003-of"))
    other.unlink()
    fails(split, f"1 of 3 files of the split set are missing; expected {other.name}")


def test_parts_that_do_not_belong_together(split):
    second = split.with_name(split.name.replace("00001-of", "00002-of"))
    third = split.with_name(split.name.replace("00001-of", "00003-of"))
    data = second.read_bytes()
    second.write_bytes(third.read_bytes())
    with pytest.raises(HeadraceError, match=r"expected split\.no, split\.count"):
        open_checkpoint(split)
    second.write_bytes(data[:100])
    with pytest.raises(HeadraceError, match=rf"{second.name}: .*truncated"):
        open_checkpoint(split)


def test_split_counts(split):
    rewrite_key(split, "split.tensors.count", "<i", 99)
    fails(split, "expected 99 tensors in the split set, found 15")
    rewrite_key(split, "split.count", "<H", 4)
    fails(split, "expected a name that ends in -00001-of-00004.gguf")
    renamed = split.rename(split.with_name("model.gguf"))
    fails(renamed, "expected a name that ends in")


# ---- what a path can be


def test_paths(tmp_path):
    fails(tmp_path / "none.gguf", "no such file; give a GGUF file")
    fails(tmp_path, "expected manifest.json .* or config.json .*, found neither")
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    fails(tmp_path, "it holds GGUF files: give one of them, for example .*b.gguf")
    for name in ("model.safetensors", "pytorch_model.bin", "config.json", "manifest.json"):
        (tmp_path / name).write_bytes(b"{}  ")
        with pytest.raises(HeadraceError, match=f"{name}: .*give its directory, {tmp_path}"):
            open_checkpoint(tmp_path / name)
    with pytest.raises(HeadraceError, match="cannot open"):
        open_checkpoint(tmp_path / "b.gguf" / "x")
    with pytest.raises(HeadraceError, match="cannot open"):
        open_checkpoint(Path("a\0b"))
    os.mkfifo(tmp_path / "fifo")
    fails(tmp_path / "fifo", "expected a regular file")
    fails(Path("/dev/zero"), "expected a regular file")


def test_permission_denied(tmp_path, monkeypatch):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")

    def refuse(*args, **kwargs):  # root may read everything
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    fails(path, "cannot open: Permission denied")
    monkeypatch.undo()
    monkeypatch.setattr(os, "listdir", refuse)
    fails(tmp_path, "cannot open: Permission denied")


def test_a_read_error_is_told(tmp_path, whole, monkeypatch):
    path = tmp_path / "m.gguf"
    path.write_bytes(whole)

    def fail(*args):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    fails(path, "read at offset 0: Input/output error")


# ---- safetensors and Hugging Face directories


def safetensors(head: object, data: bytes = b"") -> bytes:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "data, message",
    [
        (b"", "truncated: expected at least 8 bytes, found 0"),
        (b"\x10\0\0", "truncated: expected at least 8 bytes"),
        (bytes(8), "not valid JSON"),
        (b"\xff" * 8 + b"{}", "header length at offset 0: expected at most 2"),
        (safetensors({})[:-1], "header length at offset 0"),
        (safetensors(b"{"), "not valid JSON"),
        (safetensors(b"\xff\xfe"), "not valid UTF-8"),
        (safetensors([]), "expected a JSON object"),
        (safetensors(b"[" * 100000), "not usable JSON|not valid JSON"),
        (safetensors(b'{"t":' * 100000), "not usable JSON|not valid JSON"),
        (safetensors(b'{"t": ' + b"9" * 5000 + b"}"), "not usable JSON"),
        (safetensors(b'{"t": 1, "t": 2}'), "key 't' occurs twice"),
        (safetensors({"t": 1}), "tensor 't': expected an object"),
        (safetensors({"t": {}}), "tensor 't': dtype is missing"),
        (safetensors({"t": entry([1], 0, 4, "I8")}, bytes(4)), "'I8' is not supported; supp"),
        (safetensors({"t": entry([1], 0, 4, "F8_E4M3")}, bytes(4)), "'F8_E4M3' is not supported"),
        (safetensors({"t": entry([1], 0, 4, ["F32"])}, bytes(4)), "dtype: expected a string"),
        (safetensors({"t": entry("1", 0, 4)}, bytes(4)), "shape: expected a list"),
        (safetensors({"t": entry([1.0], 0, 4)}, bytes(4)), "shape: expected up to 8 dimensions"),
        (safetensors({"t": entry([-1], 0, 4)}, bytes(4)), "shape: expected up to 8 dimensions"),
        (safetensors({"t": entry([0], 0, 0)}), "shape: expected up to 8 dimensions"),
        (safetensors({"t": entry([2**63], 0, 4)}, bytes(4)), "shape: expected up to 8 dimensions"),
        (safetensors({"t": entry([1] * 9, 0, 4)}, bytes(4)), "shape: expected up to 8 dimensions"),
        (safetensors({"t": entry([2**30] * 4, 0, 4)}, bytes(4)), "expected .* bytes for F32"),
        (safetensors({"t": entry([2], 0, 4)}, bytes(4)), "expected 8 bytes for F32 .*, found 4"),
        (safetensors({"t": entry([1], 0, 4)}, bytes(3)), "truncated: expected data offsets from 0"),
        (safetensors({"t": entry([1], 4, 0)}, bytes(4)), "truncated: expected data offsets"),
        (safetensors({"t": entry([1], -4, 0)}, bytes(4)), "truncated: expected data offsets"),
        (safetensors({"t": entry([1], 0, 2**64)}, bytes(4)), "truncated: expected data offsets"),
        (safetensors({"t": entry([1], 0.0, 4)}, bytes(4)), "data_offsets: expected two integers"),
        (safetensors({"t": entry([1], 4, 8)}, bytes(8)), "leaves a gap before it"),
        (safetensors({"t": entry([2], 0, 8), "u": entry([1], 4, 8)}, bytes(8)), "overlaps another"),
        (safetensors({"t": entry([1], 0, 4)}, bytes(8)), "by its header, found"),
        (safetensors({"a\nb": entry([1], 0, 4)}, bytes(4)), r"tensor 'a.nb': this tensor has no"),
    ],
)
def test_malformed_safetensors(tmp_path, data, message):
    write_hf(tmp_path, TINY, random_weights(TINY))
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(HeadraceError, match=message) as e:
        open_checkpoint(tmp_path)
    assert "\n" not in str(e.value) and str(tmp_path) in str(e.value)


def test_truncation_of_safetensors(tmp_path):
    write_hf(tmp_path, TINY, random_weights(TINY))
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    for n in (7, 8, 9, 500, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:n])
        with pytest.raises(HeadraceError, match=r"model\.safetensors.*(truncated|header length)"):
            open_checkpoint(tmp_path)


@pytest.mark.parametrize("fused", [False, True])
def test_missing_and_misshapen_hf_tensors(tmp_path, fused):
    weights = random_weights(TINY)
    write_hf(tmp_path, TINY, weights)
    tensors = hf_tensors(TINY, weights, fused)
    path = tmp_path / "model.safetensors"
    for name in tensors:
        less = {k: v for k, v in tensors.items() if k != name}
        write_safetensors(path, less, "F32")
        with pytest.raises(HeadraceError, match="is missing"):
            open_checkpoint(tmp_path)
        other = {**tensors, name: np.concatenate([tensors[name], tensors[name][:1]])}
        write_safetensors(path, other, "F32")
        with pytest.raises(HeadraceError, match=f"'{name}': expected shape"):
            open_checkpoint(tmp_path)
    write_safetensors(path, {**tensors, "model.layers.0.self_attn.q_proj.bias": np.ones(4)}, "F32")
    with pytest.raises(HeadraceError, match=r"q_proj\.bias': this tensor has no place"):
        open_checkpoint(tmp_path)


def test_experts_of_different_types(tmp_path):
    weights = random_weights(TINY)
    write_hf(tmp_path, TINY, weights, shards=2)
    tensors = hf_tensors(TINY, weights)
    odd = {k: tensors.pop(k) for k in ["model.layers.0.mlp.experts.1.up_proj.weight"]}
    write_safetensors(tmp_path / "a.safetensors", tensors, "F32")
    write_safetensors(tmp_path / "b.safetensors", odd, "BF16")
    weight_map = dict.fromkeys(tensors, "a.safetensors") | dict.fromkeys(odd, "b.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(HeadraceError, match="expected F32 like the layer's other experts, found BF"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda m: None, "weight_map: expected an object"),
        (lambda m: m | {"extra": next(iter(m.values()))}, "tensor 'extra' is missing"),
        (lambda m: dict(list(m.items())[1:]), "places it in None"),
        (lambda m: m | {"lm_head.weight": "../../etc/passwd"}, "expected a shard's file name"),
        (lambda m: m | {"lm_head.weight": "/etc/passwd"}, "expected a shard's file name"),
        (lambda m: m | {"lm_head.weight": ".."}, "expected a shard's file name"),
        (lambda m: m | {"lm_head.weight": "a\0b"}, "expected a shard's file name"),
        (lambda m: m | {"lm_head.weight": "none.safetensors"}, "none.safetensors: missing"),
        (lambda m: m | {"lm_head.weight": 5}, "lm_head.weight: expected a string"),
    ],
)
def test_a_wrong_index(tmp_path, change, message):
    write_hf(tmp_path, TINY, random_weights(TINY), shards=2)
    index = tmp_path / "model.safetensors.index.json"
    weight_map = change(json.loads(index.read_text())["weight_map"])
    index.write_text(json.dumps({"weight_map": weight_map if weight_map is not None else []}))
    with pytest.raises(HeadraceError, match=message) as e:
        open_checkpoint(tmp_path)
    assert "\n" not in str(e.value)


def test_hf_directories_without_usable_weights(tmp_path):
    write_hf(tmp_path, TINY, random_weights(TINY))
    (tmp_path / "model.safetensors").unlink()
    fails(tmp_path, "expected model.safetensors or .*, found neither")
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    fails(tmp_path, "PyTorch .bin weights are not supported; save the checkpoint as safetensors")


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff", b'{"a": 1, "a": 2}', b"[" * 99999])
def test_a_malformed_config(tmp_path, text):
    write_hf(tmp_path, TINY, random_weights(TINY))
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(HeadraceError, match=r"config\.json"):
        open_checkpoint(tmp_path)


# ---- fuzz


@pytest.mark.parametrize(
    "file, change, message",
    [
        ("config.json", {"rms_norm_eps": 10**400}, "rms_norm_eps: expected a finite number"),
        ("config.json", {"rope_theta": 1e-30, "rope_parameters": None}, "rope_theta of at least 1, found 1"),
        ("config.json", {"rope_theta": 1e-320, "rope_parameters": None}, "rope_theta of at least 1, found 0"),
        ("generation_config.json", {"temperature": 10**400}, "temperature: expected a finite number"),
        ("generation_config.json", {"temperature": -1}, "a sampling default temperature of at least 0, found -1"),
        ("generation_config.json", {"top_p": 0}, "a sampling default top_p above 0 and at most 1, found 0"),
        ("generation_config.json", {"top_k": 2.5}, "a sampling default top_k that is a whole number, found 2.5"),
    ],
)
def test_numbers_beyond_reason(tmp_path, file, change, message):
    path = write_hf(tmp_path / "hf", TINY, random_weights(TINY), generation={"do_sample": True})
    (path / file).write_text(json.dumps(json.loads((path / file).read_text()) | change))
    with pytest.raises(HeadraceError, match=message) as error:
        open_checkpoint(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("value", [3, 0.5, "x", True])
def test_token_types_that_are_no_list(tmp_path, value):
    path = write_gguf(
        tmp_path / "m.gguf",
        TINY,
        random_weights(TINY),
        vocabulary=True,
        metadata={"tokenizer.ggml.token_type": value},
    )
    checkpoint = open_checkpoint(path)
    with pytest.raises(HeadraceError, match="m.gguf: tokenizer.ggml.token_type: expected 280 types"):
        load_tokenizer(checkpoint.tokenizer, checkpoint.config)


def peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def mutated(data: bytes, end: int, rng: np.random.Generator) -> bytes:
    """Random damage to the first `end` bytes: flips, overwrites with extreme numbers, cuts,
    insertions."""
    out = bytearray(data)
    for _ in range(rng.integers(1, 4)):
        at = int(rng.integers(0, end))
        match rng.integers(0, 5):
            case 0:
                out[at % len(out)] ^= 1 << int(rng.integers(0, 8))
            case 1:
                out[at : at + 1] = rng.bytes(1)
            case 2:
                extreme = int(rng.choice([0, 1, 2**31 - 1, 2**31, 2**32 - 1]))
                out[at : at + 4] = extreme.to_bytes(4, "little")
            case 3:
                extreme = [2**63 - 1, 2**63, 2**64 - 1, 2**40, 0][int(rng.integers(0, 5))]
                out[at : at + 8] = extreme.to_bytes(8, "little")
            case 4:
                del out[at : at + int(rng.integers(1, 9))]
    return bytes(out[: rng.integers(1, end)] if rng.integers(0, 8) == 0 else out)


def survives(path: Path) -> bool:
    """True if it opens; anything but a checkpoint or one line of error fails the test."""
    try:
        assert isinstance(open_checkpoint(path), Checkpoint)
    except HeadraceError as e:
        assert "\n" not in str(e)
        return False
    return True


def test_fuzzed_gguf(tmp_path, whole, data_offset):
    rng = np.random.default_rng(1)
    path = tmp_path / "fuzz.gguf"
    before, opened = peak_kib(), 0
    for _ in range(1500):
        path.write_bytes(mutated(whole, data_offset, rng))
        opened += survives(path)
    assert 0 < opened < 1500
    assert peak_kib() - before < 100 << 10


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_fuzzed_hf(tmp_path, name):
    rng = np.random.default_rng(2)
    write_hf(tmp_path, QWEN3, random_weights(QWEN3), fused_experts=True, generation={"top_k": 5})
    path = tmp_path / name
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little") if name == "model.safetensors" else len(data)
    before, opened = peak_kib(), 0
    for _ in range(600):
        path.write_bytes(mutated(data, end, rng))
        opened += survives(tmp_path)
    assert opened < 600
    assert peak_kib() - before < 100 << 10


def test_fuzzed_manifest_with_a_checksum_that_holds(tmp_path):
    rng = np.random.default_rng(3)
    source = write_gguf(tmp_path / "m.gguf", TINY, random_weights(TINY), "Q4_0")
    pack_store(open_checkpoint(source), tmp_path / "s", lambda done, total: None)
    path = tmp_path / "s" / "manifest.json"
    body = json.loads(path.read_text())["manifest"]
    places = list(_places(body))
    values = [None, 0, -1, 1, 2**31, 2**63, 1.5, "", "F32", [], {}, True, [0] * 9]
    opened = 0
    for _ in range(600):
        damaged = json.loads(json.dumps(body))
        *way, last = places[rng.integers(0, len(places))]
        at = damaged
        for step in way:
            at = at[step]
        at[last] = values[rng.integers(0, len(values))]
        path.write_bytes(wrap_manifest(damaged))
        opened += survives(tmp_path / "s")
    assert 0 < opened < 300  # checksums, names and sampling settings may change


def _places(value: object, way: tuple = ()):
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for step, inner in items:
        yield (*way, step)
        if isinstance(inner, (dict, list)):
            yield from _places(inner, (*way, step))
