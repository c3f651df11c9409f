"""Tiny random Hugging Face checkpoints of each family, the same on every machine and NumPy version.

Weights come from PCG64's raw bits, whose stream NumPy guarantees, not from a distribution, whose stream it does
not. Norms and routers are random too, so that ones and zeros hide nothing.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

PROMPT_TOKENS = 40
STEPS = 20
VOCAB = 96

COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_experts": 8,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
CONFIGS = {
    "olmoe": {
        **COMMON,
        "model_type": "olmoe",
        "architectures": ["OlmoeForCausalLM"],
        "num_key_value_heads": 4,
        "intermediate_size": 32,
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "clip_qkv": None,
    },
    "qwen3_moe": {
        **COMMON,
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 32,
        "moe_intermediate_size": 96,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}


def _uniform(bits: np.random.PCG64, *shape: int) -> np.ndarray:
    """float32 in [-1, 1)."""
    raw = bits.random_raw(int(np.prod(shape))) >> np.uint64(40)
    return (raw.astype(np.float64) / 2**23 - 1).astype(np.float32).reshape(shape)


def tensors(family: str) -> dict[str, np.ndarray]:
    c = CONFIGS[family]
    bits = np.random.PCG64(2026)
    d, heads, kv = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
    head_dim = c.get("head_dim", d // heads)
    width = c.get("moe_intermediate_size", c["intermediate_size"])
    full = family == "olmoe"
    out: dict[str, np.ndarray] = {}

    def matrix(name: str, rows: int, cols: int, std: float = 0.2) -> None:
        out[name] = _uniform(bits, rows, cols) * np.float32(std * 3**0.5)

    def norm(name: str, n: int) -> None:
        out[name] = 1 + np.float32(0.5) * _uniform(bits, n)

    matrix("model.embed_tokens.weight", c["vocab_size"], d, 1.0)
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        norm(p + "input_layernorm.weight", d)
        norm(p + "post_attention_layernorm.weight", d)
        matrix(p + "self_attn.q_proj.weight", heads * head_dim, d)
        matrix(p + "self_attn.k_proj.weight", kv * head_dim, d)
        matrix(p + "self_attn.v_proj.weight", kv * head_dim, d)
        matrix(p + "self_attn.o_proj.weight", d, heads * head_dim)
        norm(p + "self_attn.q_norm.weight", heads * head_dim if full else head_dim)
        norm(p + "self_attn.k_norm.weight", kv * head_dim if full else head_dim)
        matrix(p + "mlp.gate.weight", c["num_experts"], d)
        for e in range(c["num_experts"]):
            matrix(f"{p}mlp.experts.{e}.gate_proj.weight", width, d)
            matrix(f"{p}mlp.experts.{e}.up_proj.weight", width, d)
            matrix(f"{p}mlp.experts.{e}.down_proj.weight", d, width)
    norm("model.norm.weight", d)
    matrix("lm_head.weight", c["vocab_size"], d)
    return out


def write(family: str, directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIGS[family], indent=1))
    save_file(tensors(family), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def prompt() -> list[int]:
    """PROMPT_TOKENS ids, then STEPS more that are fed one by one."""
    raw = np.random.PCG64(7).random_raw(PROMPT_TOKENS + STEPS)
    return [int(r >> np.uint64(33)) % VOCAB for r in raw]
