"""The engine against Transformers' golden logits, and the same checkpoint from every kind of file.

Float32 weights, float32 keys and values; tolerance as in test_golden.py. Between files: the same bits.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from pathlib import Path

import checkpoints
import numpy as np
import pytest
from golden import tiny_random
from oracle import run_int8
from test_golden import FAMILIES, assert_matches, golden_logits

from headrace.engine import Engine, EngineOptions
from headrace.formats import open_checkpoint
from headrace.formats.checkpoint import DType
from headrace.formats.pack import pack_store

IDS, N = tiny_random.prompt(), tiny_random.PROMPT_TOKENS


def engine_logits(path: Path, kv_dtype: DType = DType.F32) -> np.ndarray:
    """The prompt in one pass, then single steps: [60, vocab]."""
    options = EngineOptions(context=len(IDS), kv_dtype=kv_dtype, max_out_rows=N, max_rows=N, num_threads=2)
    with Engine(open_checkpoint(path), options) as engine:
        session = engine.session()
        rows = [session.verify(IDS[:N])] + [session.step(t)[None].copy() for t in IDS[N:]]
    return np.concatenate(rows)


def gguf_weights(family: str) -> dict[str, np.ndarray]:
    """The tiny random checkpoint under GGUF's names, experts stacked."""
    config, tensors = tiny_random.CONFIGS[family], tiny_random.tensors(family)
    names = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate": "ffn_gate_inp",
    }
    out = {
        "token_embd.weight": tensors["model.embed_tokens.weight"],
        "output_norm.weight": tensors["model.norm.weight"],
        "output.weight": tensors["lm_head.weight"],
    }
    for i in range(config["num_hidden_layers"]):
        for hf, gguf in names.items():
            out[f"blk.{i}.{gguf}.weight"] = tensors[f"model.layers.{i}.{hf}.weight"]
        for part in ("gate", "up", "down"):
            experts = [
                tensors[f"model.layers.{i}.mlp.experts.{e}.{part}_proj.weight"] for e in range(config["num_experts"])
            ]
            out[f"blk.{i}.ffn_{part}_exps.weight"] = np.stack(experts)
    return out


def spec_of(family: str) -> checkpoints.Spec:
    c = tiny_random.CONFIGS[family]
    return checkpoints.Spec(
        family,
        num_hidden_layers=c["num_hidden_layers"],
        hidden_size=c["hidden_size"],
        num_attention_heads=c["num_attention_heads"],
        num_key_value_heads=c["num_key_value_heads"],
        head_dim=c.get("head_dim", c["hidden_size"] // c["num_attention_heads"]),
        num_experts=c["num_experts"],
        num_experts_per_tok=c["num_experts_per_tok"],
        moe_intermediate_size=c.get("moe_intermediate_size", c["intermediate_size"]),
        vocab_size=c["vocab_size"],
        rms_norm_eps=c["rms_norm_eps"],
        rope_theta=c["rope_theta"],
        norm_topk_prob=c["norm_topk_prob"],
        max_position_embeddings=c["max_position_embeddings"],
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_gives_the_golden_logits_from_every_kind_of_file(family, tmp_path):
    hf = tiny_random.write(family, tmp_path / "hf")
    gguf = tmp_path / "model.gguf"
    checkpoints.write_gguf(gguf, spec_of(family), gguf_weights(family), dtype="F32")
    paths = [hf, gguf]
    for source in (hf, gguf):
        paths.append(tmp_path / f"{source.name}.store")
        pack_store(open_checkpoint(source), paths[-1], lambda done, total: None)
    logits = [engine_logits(path) for path in paths]
    assert_matches(logits[0], golden_logits(family))
    for other, path in zip(logits[1:], paths[1:], strict=True):
        assert other.tobytes() == logits[0].tobytes(), path.name


SEQUENCES = [IDS[i : i + 5] for i in range(0, len(IDS), 5)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["Q4_0", "Q8_0", "F16", "BF16"])
def test_engine_is_the_oracle_in_int8_mode(family, dtype, tmp_path, monkeypatch):
    gguf = tmp_path / "model.gguf"
    checkpoints.write_gguf(gguf, spec_of(family), gguf_weights(family), dtype=dtype)
    checkpoint = open_checkpoint(gguf)
    expected, clear = run_int8(checkpoint, SEQUENCES, monkeypatch)
    with Engine(checkpoint, EngineOptions(context=5, kv_dtype=DType.F32, max_out_rows=5)) as engine:
        logits = []
        for sequence in SEQUENCES:
            session = engine.session()
            logits.append(session.verify(sequence))
            session.close()
    difference = np.abs(np.concatenate(logits) - expected).max(axis=1) / expected.std()
    assert clear.sum() >= 15
    assert difference[clear].max() < 1e-5
    assert difference.max() < 5e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_float16_keys_and_values_cost_no_more_than_their_rounding(family, tmp_path):
    golden = golden_logits(family)
    logits = engine_logits(tiny_random.write(family, tmp_path / "hf"), DType.F16)
    difference = np.abs(logits - golden).max() / golden.std()
    assert 1e-5 < difference < 1e-2  # they are rounded, and only they


def test_another_librarys_rounding_mode_changes_no_bit(tmp_path):
    libm = ctypes.CDLL(ctypes.util.find_library("m"))
    upward = 0x800  # FE_UPWARD on x86
    checkpoint = open_checkpoint(tiny_random.write("olmoe", tmp_path / "hf"))
    with Engine(checkpoint, EngineOptions(context=N, max_out_rows=N, num_threads=2)) as engine:
        logits = []
        for mode in (0, upward):
            session = engine.session()
            assert libm.fesetround(mode) == 0
            try:
                logits.append(session.verify(IDS[:N]).tobytes())
            finally:
                libm.fesetround(0)
            session.close()
    assert logits[0] == logits[1]
