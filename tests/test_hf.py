"""The Hugging Face reader against the safetensors package: same bytes; and the same model as the
GGUF."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors
from checkpoints import (
    OLMOE,
    QWEN3,
    decode,
    encode,
    hf_tensors,
    random_weights,
    tiny_vocabulary,
    write_gguf,
    write_hf,
    write_safetensors,
)
from values import assert_values

from headrace.errors import HeadraceError
from headrace.formats import open_checkpoint
from headrace.formats.safetensors import read_safetensors

SPECS = pytest.mark.parametrize("spec", [OLMOE, QWEN3], ids=lambda s: s.arch)


def rounded(weights, dtype):
    return {name: decode(encode(values, dtype), dtype).reshape(values.shape) for name, values in weights.items()}


@SPECS
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("fused_experts", [False, True])
@pytest.mark.parametrize("shards", [1, 3])
def test_values(tmp_path, spec, dtype, fused_experts, shards):
    weights = random_weights(spec)
    write_hf(tmp_path, spec, weights, dtype, fused_experts, shards)
    checkpoint = open_checkpoint(tmp_path)
    assert len(checkpoint.files) == shards
    assert_values(checkpoint, rounded(weights, dtype))


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_extents_are_those_of_safetensors(tmp_path, dtype):
    path = tmp_path / "t.safetensors"
    write_safetensors(path, hf_tensors(OLMOE, random_weights(OLMOE)), dtype)
    data = path.read_bytes()
    ours = read_safetensors(path, 0)
    theirs = dict(safetensors.deserialize(data))
    assert set(ours) == set(theirs)
    for name, info in theirs.items():
        t = ours[name]
        assert data[t.offset : t.offset + t.nbytes] == bytes(info["data"])
        assert list(t.shape) == list(info["shape"])
        assert t.dtype.name == info["dtype"]


@SPECS
def test_same_config_as_from_gguf(tmp_path, spec):
    weights = random_weights(spec)
    write_hf(tmp_path / "hf", spec, weights)
    from_hf = open_checkpoint(tmp_path / "hf").config
    from_gguf = open_checkpoint(write_gguf(tmp_path / "m.gguf", spec, weights)).config
    assert from_hf.eos_token_ids == (tiny_vocabulary()[0].index(_end(spec)),)
    assert from_hf.to_json() | {"eos_token_ids": []} == from_gguf.to_json()


def _end(spec):
    return "<|endoftext|>" if spec is OLMOE else "<|im_end|>"


def test_older_config_keys(tmp_path):
    weights = random_weights(OLMOE)
    write_hf(tmp_path, OLMOE, weights, config={"rope_theta": 5e5, "rope_scaling": None})
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("rope_parameters", "num_key_value_heads", "norm_topk_prob", "hidden_act"):
        del config[key]
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = open_checkpoint(tmp_path).config
    assert found.rope_theta == 5e5
    assert found.num_key_value_heads == OLMOE.num_attention_heads


def test_rope_theta_has_a_default(tmp_path):
    write_hf(tmp_path, OLMOE, random_weights(OLMOE), config={"rope_parameters": None})
    assert open_checkpoint(tmp_path).config.rope_theta == 1e4


def test_generation_config(tmp_path):
    generation = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True}
    generation |= {"eos_token_id": [3, 7], "pad_token_id": 0}
    config = {"eos_token_id": 7, "bos_token_id": 5}
    write_hf(tmp_path, QWEN3, random_weights(QWEN3), config=config, generation=generation)
    found = open_checkpoint(tmp_path).config
    assert found.eos_token_ids == (7, 3)
    assert found.bos_token_id == 5
    expected = {"temperature": 0.6, "top_p": 0.95, "top_k": 20.0, "do_sample": 1.0}
    assert found.generation == expected


def test_ids_outside_the_vocabulary_are_dropped(tmp_path):
    # Random test models keep their class's default ids.
    write_hf(tmp_path, OLMOE, random_weights(OLMOE), config={"eos_token_id": 50279})
    assert open_checkpoint(tmp_path).config.eos_token_ids == ()


def test_tied_embeddings(tmp_path):
    spec = QWEN3.but(tie_word_embeddings=True)
    weights = random_weights(spec)
    write_hf(tmp_path, spec, weights)
    assert_values(open_checkpoint(tmp_path), weights)


def test_a_stored_lm_head_is_used_even_if_the_config_ties(tmp_path):
    weights = random_weights(QWEN3)
    write_hf(tmp_path, QWEN3, weights, config={"tie_word_embeddings": True})
    checkpoint = open_checkpoint(tmp_path)
    assert not checkpoint.config.tie_word_embeddings
    assert_values(checkpoint, weights)


def test_harmless_tensors_are_ignored(tmp_path):
    weights = random_weights(OLMOE)
    write_hf(tmp_path, OLMOE, weights)
    tensors = hf_tensors(OLMOE, weights)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    write_safetensors(tmp_path / "model.safetensors", tensors, "F32")
    assert_values(open_checkpoint(tmp_path), weights)


def test_chat_template(tmp_path):
    weights = random_weights(QWEN3)
    write_hf(tmp_path, QWEN3, weights, vocabulary=True, chat_template="one")
    assert open_checkpoint(tmp_path).tokenizer.chat_template == "one"
    several = [{"name": "tools", "template": "t"}, {"name": "default", "template": "two"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert open_checkpoint(tmp_path).tokenizer.chat_template == "two"
    (tmp_path / "chat_template.jinja").write_text("three")
    source = open_checkpoint(tmp_path).tokenizer
    assert source.chat_template == "three"
    assert source.tokenizer_json == tmp_path / "tokenizer.json"


def test_without_a_tokenizer(tmp_path):
    write_hf(tmp_path, QWEN3, random_weights(QWEN3))
    source = open_checkpoint(tmp_path).tokenizer
    assert source.tokenizer_json is None and source.gguf is None


@pytest.mark.parametrize(
    "config, named",
    [
        ({"model_type": "mixtral"}, "mixtral"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"clip_qkv": 8.0}, "clip_qkv"),
        ({"mlp_only_layers": [1]}, "mlp_only_layers"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step"),
        ({"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "type"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"num_experts_per_tok": 9}, "experts used"),
        ({"num_key_value_heads": 3}, "kv heads"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 2**40}, "num_hidden_layers"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps"),
        ({"eos_token_id": "x"}, "eos_token_id"),
        ({"num_experts": None}, "num_experts"),
    ],
)
def test_what_would_change_results_is_refused_by_name(tmp_path, config, named):
    write_hf(tmp_path, QWEN3, random_weights(QWEN3), config=config)
    with pytest.raises(HeadraceError, match=named) as e:
        open_checkpoint(tmp_path)
    assert "config.json" in str(e.value) and "\n" not in str(e.value)
