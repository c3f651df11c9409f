"""The GGUF reader against the gguf package: same values, whatever the types, the fusing and the
splitting."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from checkpoints import (
    OLMOE,
    QWEN3,
    decode,
    encode,
    fused,
    random_weights,
    tensor_type,
    tiny_vocabulary,
    write_gguf,
)
from values import assert_values, trunk_values

from headrace.formats import open_checkpoint
from headrace.formats.checkpoint import DType

SPECS = pytest.mark.parametrize("spec", [OLMOE, QWEN3], ids=lambda s: s.arch)


def rounded(weights, dtype, overrides=None):
    """What remains of float32 weights once stored as write_gguf stores them."""
    result = {}
    for name, values in weights.items():
        kind = tensor_type(name, values.shape, dtype, overrides or {})
        result[name] = decode(encode(values, kind), kind).reshape(values.shape)
    return result


@SPECS
@pytest.mark.parametrize("dtype", [t.name for t in DType])
def test_values_are_those_that_gguf_decodes(tmp_path, spec, dtype):
    weights = random_weights(spec)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", spec, weights, dtype))
    assert_values(checkpoint, rounded(weights, dtype))
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    for t in reader.tensors:
        if t.name in checkpoint.tensors:
            expected = gguf.quants.dequantize(t.data, t.tensor_type)
            np.testing.assert_array_equal(trunk_values(checkpoint, t.name), expected)
            assert checkpoint.tensors[t.name].offset == t.data_offset
            assert checkpoint.tensors[t.name].nbytes == t.n_bytes
    assert {checkpoint.experts[1].parts[i][0].name for i in range(3)} == {dtype}


@SPECS
def test_types_may_differ_from_tensor_to_tensor(tmp_path, spec):
    weights = random_weights(spec)
    overrides = {
        "blk.1.ffn_down_exps": "Q8_0",
        "ffn_up_exps": "BF16",
        "attn_k.": "F16",
        "output.weight": "Q8_0",
        "token_embd": "F16",
        "ffn_gate_inp": "BF16",
        "attn_norm": "F16",
    }
    path = write_gguf(tmp_path / "m.gguf", spec, weights, "Q4_0", overrides)
    checkpoint = open_checkpoint(path)
    assert_values(checkpoint, rounded(weights, "Q4_0", overrides))
    types = [[part[0].name for part in layer.parts] for layer in checkpoint.experts]
    assert types == [["Q4_0", "BF16", "Q4_0"], ["Q4_0", "BF16", "Q8_0"]]
    assert checkpoint.embedding.dtype == DType.F16


@SPECS
@pytest.mark.parametrize("qkv, gate_up", [(True, False), (False, True), (True, True)])
def test_fused_tensors_are_cut(tmp_path, spec, qkv, gate_up):
    weights = random_weights(spec)
    path = write_gguf(tmp_path / "m.gguf", spec, weights, "Q8_0", fuse_qkv=qkv, fuse_gate_up=gate_up)
    assert len(gguf.GGUFReader(path).tensors) == len(fused(spec, weights, qkv, gate_up))
    assert_values(open_checkpoint(path), rounded(weights, "Q8_0"))


def test_experts_one_by_one(tmp_path):
    weights = random_weights(OLMOE)
    single = {k: v for k, v in weights.items() if "_exps" not in k}
    for name, values in weights.items():
        if "_exps" in name:
            for e in range(OLMOE.num_experts):
                single[name.replace("_exps", f".{e}")] = values[e]
    path = write_gguf(tmp_path / "m.gguf", OLMOE, single, "Q4_0")
    assert_values(open_checkpoint(path), rounded(weights, "Q4_0"))


@SPECS
def test_extents_without_a_common_divisor(tmp_path, spec):
    spec = spec.but(
        hidden_size=68,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=34,
        moe_intermediate_size=41,
        num_experts=5,
        vocab_size=281,
    )
    weights = random_weights(spec)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", spec, weights, "F16"))
    assert_values(checkpoint, rounded(weights, "F16"))


def test_tied_embeddings_serve_as_output(tmp_path):
    spec = QWEN3.but(tie_word_embeddings=True)
    weights = random_weights(spec)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", spec, weights, "Q8_0"))
    assert checkpoint.config.tie_word_embeddings
    assert_values(checkpoint, rounded(weights, "Q8_0"))
    assert checkpoint.tensors["output.weight"].offset == checkpoint.embedding.offset


@pytest.mark.parametrize("per_file", [1, 7])
def test_split_sets(tmp_path, per_file):
    weights = random_weights(QWEN3)
    path = write_gguf(tmp_path / "m.gguf", QWEN3, weights, "Q4_0", vocabulary=True, split_max_tensors=per_file)
    checkpoint = open_checkpoint(path)
    assert len(checkpoint.files) == -(-len(weights) // per_file)
    assert_values(checkpoint, rounded(weights, "Q4_0"))
    assert checkpoint.tokenizer.gguf is not None


@pytest.mark.parametrize("alignment", [1, 8, 64, 4096])
def test_alignment_of_the_data(tmp_path, alignment, monkeypatch):
    # The package's writer pads to its default only.
    monkeypatch.setattr(gguf.GGUFWriter, "ggml_pad", staticmethod(lambda x, n: -(-x // alignment) * alignment))
    weights = random_weights(OLMOE)
    metadata = {"general.alignment": alignment}
    path = write_gguf(tmp_path / "m.gguf", OLMOE, weights, "Q4_0", metadata=metadata)
    assert_values(open_checkpoint(path), rounded(weights, "Q4_0"))


@SPECS
def test_config_comes_from_metadata(tmp_path, spec):
    config = open_checkpoint(write_gguf(tmp_path / "m.gguf", spec, random_weights(spec))).config
    for name in spec.__dataclass_fields__:
        expected = getattr(spec, name)
        if isinstance(expected, float):
            expected = float(np.float32(expected))
        assert getattr(config, name) == expected, name


@SPECS
def test_missing_keys_are_derived(tmp_path, spec):
    spec = spec.but(num_key_value_heads=4, head_dim=16, rope_theta=1e4)
    absent = (
        "attention.head_count_kv attention.key_length attention.value_length rope.freq_base "
        "expert_feed_forward_length attention.layer_norm_rms_epsilon"
    )
    metadata = {f"{spec.arch}.{key}": None for key in absent.split()}
    metadata["general.name"] = None
    path = write_gguf(tmp_path / "some-model.gguf", spec, random_weights(spec), metadata=metadata)
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    assert (config.head_dim, config.num_key_value_heads) == (16, 4)
    assert config.moe_intermediate_size == spec.moe_intermediate_size
    assert config.rope_theta == 1e4
    assert config.rms_norm_eps == float(np.float32(spec.rms_norm_eps))
    assert checkpoint.name == "some-model"


def test_neutral_settings_are_accepted(tmp_path):
    metadata = {
        "olmoe.rope.scaling.type": "none",
        "olmoe.attention.sliding_window": 0,
        "olmoe.expert_gating_func": 1,
        "olmoe.expert_weights_scale": 1.0,
        "olmoe.expert_weights_norm": True,
        "olmoe.rope.dimension_count": 16,
    }
    path = write_gguf(tmp_path / "m.gguf", OLMOE, random_weights(OLMOE), metadata=metadata)
    assert open_checkpoint(path).config.norm_topk_prob is True


@SPECS
def test_tokenizer_metadata(tmp_path, spec):
    path = write_gguf(tmp_path / "m.gguf", spec, random_weights(spec), vocabulary=True, chat_template="{{ x }}")
    checkpoint = open_checkpoint(path)
    tokens, merges, _ = tiny_vocabulary()
    source = checkpoint.tokenizer.gguf
    assert source["tokenizer.ggml.tokens"][: len(tokens)] == tokens
    assert len(source["tokenizer.ggml.tokens"]) == spec.vocab_size
    assert source["tokenizer.ggml.merges"] == merges
    assert type(source["tokenizer.ggml.token_type"]) is list
    assert checkpoint.tokenizer.chat_template == "{{ x }}"
    assert "tokenizer.chat_template" not in source
    # The eos that the file names first, and the other end token of these families.
    ends = {tokens.index("<|endoftext|>"), tokens.index("<|im_end|>")}
    assert set(checkpoint.config.eos_token_ids) == ends
    assert checkpoint.config.eos_token_ids[0] == source["tokenizer.ggml.eos_token_id"]
    assert checkpoint.config.bos_token_id is None


def test_without_a_vocabulary_there_is_no_tokenizer(tmp_path):
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", OLMOE, random_weights(OLMOE)))
    assert checkpoint.tokenizer.gguf is None
    assert checkpoint.tokenizer.tokenizer_json is None


def test_sampling_defaults(tmp_path):
    metadata = {"general.sampling.temp": 0.5, "general.sampling.top_k": 20}
    path = write_gguf(tmp_path / "m.gguf", OLMOE, random_weights(OLMOE), metadata=metadata)
    expected = {"temperature": 0.5, "top_k": 20.0, "do_sample": 1.0}
    assert open_checkpoint(path).config.generation == expected
