"""Small random checkpoints of both families, written as GGUF or as a Hugging Face directory.

    weights = random_weights(OLMOE)
    write_gguf(path, OLMOE, weights, dtype="Q4_0")
    write_hf(directory, OLMOE, weights, dtype="BF16")

Weights are float32 arrays under GGUF's names, experts stacked [num_experts, rows, cols]. Norms and
routers are random too, so that ones and zeros hide nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Weights = dict[str, np.ndarray]


@dataclass(frozen=True)
class Spec:
    """The shape of a checkpoint, in Hugging Face's words. Quantized types need multiples of 32."""

    model_type: str
    num_hidden_layers: int = 2
    hidden_size: int = 64
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    head_dim: int = 16
    num_experts: int = 8
    num_experts_per_tok: int = 3
    moe_intermediate_size: int = 32
    vocab_size: int = 330
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1e4
    norm_topk_prob: bool = False
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 512

    def but(self, **changes: Any) -> Spec:
        return replace(self, **changes)

    @property
    def arch(self) -> str:
        return {"olmoe": "olmoe", "qwen3_moe": "qwen3moe"}[self.model_type]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """GGUF name -> shape, outermost first."""
        d, inner, n = self.hidden_size, self.moe_intermediate_size, self.num_experts
        q = self.num_attention_heads * self.head_dim
        kv = self.num_key_value_heads * self.head_dim
        per_head = self.model_type == "qwen3_moe"
        shapes = {"token_embd.weight": (self.vocab_size, d), "output_norm.weight": (d,)}
        if not self.tie_word_embeddings:
            shapes["output.weight"] = (self.vocab_size, d)
        for i in range(self.num_hidden_layers):
            layer = {
                "attn_norm": (d,),
                "attn_q": (q, d),
                "attn_k": (kv, d),
                "attn_v": (kv, d),
                "attn_output": (d, q),
                "attn_q_norm": (self.head_dim if per_head else q,),
                "attn_k_norm": (self.head_dim if per_head else kv,),
                "ffn_norm": (d,),
                "ffn_gate_inp": (n, d),
                "ffn_gate_exps": (n, inner, d),
                "ffn_up_exps": (n, inner, d),
                "ffn_down_exps": (n, d, inner),
            }
            shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in layer.items()}
        return shapes


OLMOE = Spec("olmoe")
# head_dim differs from hidden_size / heads, and kv heads are shared, as in the real one.
QWEN3 = Spec(
    "qwen3_moe",
    num_key_value_heads=2,
    head_dim=32,
    num_experts_per_tok=2,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    norm_topk_prob=True,
)


def random_weights(spec: Spec, seed: int = 0, std: float = 0.2) -> Weights:
    """std 0.2 keeps routers away from ties."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in spec.shapes().items():
        values = rng.standard_normal(shape, np.float32) * np.float32(std)
        weights[name] = values + np.float32(1) if name.endswith("norm.weight") else values
    return weights


# ---- GGUF


def encode(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 [..., cols] -> uint8 [..., bytes of a row]."""
    qtype = gguf.GGMLQuantizationType[dtype]
    values = np.ascontiguousarray(values, np.float32)
    if dtype in ("F32", "F16"):
        return values.astype(np.float32 if dtype == "F32" else np.float16).view(np.uint8)
    return np.ascontiguousarray(gguf.quants.quantize(values, qtype)).view(np.uint8)


def decode(data: np.ndarray, dtype: str) -> np.ndarray:
    """The inverse, as gguf defines it: uint8 [..., bytes of a row] -> float32 [..., cols]."""
    if dtype == "F16":
        return np.ascontiguousarray(data).view(np.float16).astype(np.float32)
    return gguf.quants.dequantize(data, gguf.GGMLQuantizationType[dtype])


def tensor_type(name: str, shape: tuple[int, ...], dtype: str, overrides: Mapping[str, str]) -> str:
    for part, other in overrides.items():
        if part in name:
            return other
    return "F32" if len(shape) == 1 or "ffn_gate_inp" in name else dtype


def write_gguf(
    path: Path,
    spec: Spec,
    weights: Weights,
    dtype: str = "F32",
    overrides: Mapping[str, str] | None = None,
    fuse_qkv: bool = False,
    fuse_gate_up: bool = False,
    vocabulary: bool = False,
    chat_template: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    split_max_tensors: int = 0,
) -> Path:
    """dtype: F32, F16, BF16, Q4_0 or Q8_0, for matrices; vectors and routers are F32. overrides:
    part of a tensor's name -> its type, first match wins. metadata: keys added or replaced, None
    removes one. split_max_tensors: a split set; returns its first file."""
    keys = gguf_metadata(spec, vocabulary, chat_template)
    for key, value in (metadata or {}).items():
        keys.pop(key, None)
        if value is not None:
            keys[key] = value
    tensors = fused(spec, weights, fuse_qkv, fuse_gate_up)
    writer = gguf.GGUFWriter(
        path,
        keys.pop("general.architecture", spec.arch),
        split_max_tensors=split_max_tensors,
    )
    for key, value in keys.items():
        add_key(writer, key, value)
    for name, values in tensors.items():
        kind = tensor_type(name, values.shape, dtype, overrides or {})
        qtype = gguf.GGMLQuantizationType[kind]
        data = encode(values, kind)
        if kind in ("F32", "F16"):
            data = data.view(np.float32 if kind == "F32" else np.float16)
        writer.add_tensor(name, data, raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if not path.exists():  # the writer names split files itself
        return min(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))
    return path


def add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """bool, int (u32), float (f32), str, and lists of int (i32), float or str."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def gguf_metadata(spec: Spec, vocabulary: bool = False, chat_template: str | None = None) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "general.name": f"tiny {spec.arch}",
        "block_count": spec.num_hidden_layers,
        "context_length": spec.max_position_embeddings,
        "embedding_length": spec.hidden_size,
        "feed_forward_length": spec.moe_intermediate_size,
        "attention.head_count": spec.num_attention_heads,
        "attention.head_count_kv": spec.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": spec.rms_norm_eps,
        "rope.freq_base": spec.rope_theta,
        "expert_count": spec.num_experts,
        "expert_used_count": spec.num_experts_per_tok,
    }
    if spec.model_type == "qwen3_moe":  # real OLMoE files lack these
        keys["attention.key_length"] = keys["attention.value_length"] = spec.head_dim
        keys["expert_feed_forward_length"] = spec.moe_intermediate_size
        keys["feed_forward_length"] = 4 * spec.moe_intermediate_size
    keys = {k if k.startswith("general.") else f"{spec.arch}.{k}": v for k, v in keys.items()}
    if not vocabulary:
        return keys | {"tokenizer.ggml.model": "none"}
    tokens, merges, special = tiny_vocabulary()
    padding = [f"[PAD{i}]" for i in range(len(tokens), spec.vocab_size)]
    control, unused = int(gguf.TokenType.CONTROL), int(gguf.TokenType.UNUSED)
    normal = int(gguf.TokenType.NORMAL)
    keys |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": {"olmoe": "olmo", "qwen3moe": "qwen2"}[spec.arch],
        "tokenizer.ggml.tokens": tokens + padding,
        "tokenizer.ggml.token_type": [control if t in special else normal for t in tokens] + [unused] * len(padding),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": tokens.index(end_token(spec)),
        "tokenizer.ggml.add_bos_token": False,
    }
    if chat_template is not None:
        keys["tokenizer.chat_template"] = chat_template
    return keys


def fused(spec: Spec, weights: Weights, qkv: bool, gate_up: bool) -> Weights:
    """With q, k, v in one tensor, and gate and up in one, where asked for."""
    result = dict(weights)
    for i in range(spec.num_hidden_layers):
        b = f"blk.{i}."
        if qkv:
            parts = [result.pop(f"{b}attn_{x}.weight") for x in "qkv"]
            result[b + "attn_qkv.weight"] = np.concatenate(parts)
        if gate_up:
            parts = [result.pop(f"{b}ffn_{x}_exps.weight") for x in ("gate", "up")]
            result[b + "ffn_gate_up_exps.weight"] = np.concatenate(parts, axis=1)
    return result


# ---- Hugging Face


def write_hf(
    path: Path,
    spec: Spec,
    weights: Weights,
    dtype: str = "F32",
    fused_experts: bool = False,
    shards: int = 1,
    vocabulary: bool = False,
    chat_template: str | None = None,
    config: Mapping[str, Any] | None = None,
    generation: Mapping[str, Any] | None = None,
) -> Path:
    """dtype: F32, F16 or BF16, for every tensor. config: keys added or replaced. generation: the
    content of generation_config.json, if there is to be one."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = hf_tensors(spec, weights, fused_experts)
    if shards == 1:
        write_safetensors(path / "model.safetensors", tensors, dtype)
    else:
        weight_map = {}
        names = list(tensors)
        for i in range(shards):
            file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
            part = {name: tensors[name] for name in names[i::shards]}
            write_safetensors(path / file, part, dtype)
            weight_map |= dict.fromkeys(part, file)
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text(json.dumps(hf_config(spec) | dict(config or {})))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    if vocabulary:
        (path / "tokenizer.json").write_text(json.dumps(tiny_tokenizer_json(spec)))
    if chat_template is not None:
        (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": chat_template}))
    return path


def hf_config(spec: Spec) -> dict[str, Any]:
    """As Transformers 5 writes it."""
    names = (
        "model_type num_hidden_layers hidden_size num_attention_heads num_key_value_heads "
        "num_experts "
        "num_experts_per_tok vocab_size rms_norm_eps norm_topk_prob tie_word_embeddings "
        "max_position_embeddings"
    )
    config = {name: getattr(spec, name) for name in names.split()}
    config |= {
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        "eos_token_id": tiny_vocabulary()[0].index(end_token(spec)),
    }
    if spec.model_type == "olmoe":
        return config | {"intermediate_size": spec.moe_intermediate_size, "clip_qkv": None}
    return config | {
        "moe_intermediate_size": spec.moe_intermediate_size,
        "intermediate_size": 4 * spec.moe_intermediate_size,
        "head_dim": spec.head_dim,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        "use_sliding_window": False,
        "sliding_window": None,
    }


_HF_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
}


def hf_tensors(spec: Spec, weights: Weights, fused_experts: bool = False) -> Weights:
    """Under Hugging Face's names, experts one by one or fused as Transformers 5 holds them."""
    tensors = {
        "model.embed_tokens.weight": weights["token_embd.weight"],
        "model.norm.weight": weights["output_norm.weight"],
    }
    if not spec.tie_word_embeddings:
        tensors["lm_head.weight"] = weights["output.weight"]
    for i in range(spec.num_hidden_layers):
        layer = f"model.layers.{i}."
        for ours, theirs in _HF_NAMES.items():
            tensors[f"{layer}{theirs}.weight"] = weights[f"blk.{i}.{ours}.weight"]
        gate, up, down = (weights[f"blk.{i}.ffn_{x}_exps.weight"] for x in ("gate", "up", "down"))
        if fused_experts:
            tensors[layer + "mlp.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
            tensors[layer + "mlp.experts.down_proj"] = down
            continue
        for e in range(spec.num_experts):
            for part, values in (("gate", gate), ("up", up), ("down", down)):
                tensors[f"{layer}mlp.experts.{e}.{part}_proj.weight"] = values[e]
    return tensors


def write_safetensors(path: Path, tensors: Weights, dtype: str) -> None:
    """By hand, since safetensors' own writer has no NumPy type for BF16. Padded to 8 bytes, as it
    does."""
    header, data, offset = {"__metadata__": {"format": "pt"}}, [], 0
    for name, values in tensors.items():
        data.append(encode(values, dtype).tobytes())
        end = offset + len(data[-1])
        shape = list(values.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data))


# ---- a byte-level BPE vocabulary


def byte_characters() -> list[str]:
    """GPT-2's printable stand-in for each of the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


def tiny_vocabulary() -> tuple[list[str], list[str], list[str]]:
    """(tokens, merges, special tokens): 256 bytes, a few merges, three special tokens."""
    space = byte_characters()[ord(" ")]
    merges = ["t h", "th e", f"{space} the", "i n", "e r", "a n", "an d", f"{space} and", "o u"]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = byte_characters() + [m.replace(" ", "") for m in merges] + special
    return tokens, merges, special


def end_token(spec: Spec) -> str:
    return "<|endoftext|>" if spec.model_type == "olmoe" else "<|im_end|>"


_QWEN2_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tiny_tokenizer_json(spec: Spec) -> dict[str, Any]:
    """The same vocabulary as a Hugging Face tokenizer.json."""
    tokens, merges, special = tiny_vocabulary()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    if spec.model_type == "olmoe":
        pre_tokenizer = byte_level | {"use_regex": True}
    else:
        split = {
            "type": "Split",
            "pattern": {"Regex": _QWEN2_REGEX},
            "behavior": "Isolated",
            "invert": False,
        }
        pre_tokenizer = {
            "type": "Sequence",
            "pretokenizers": [split, byte_level | {"use_regex": False}],
        }
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    added = [{"id": tokens.index(t), "content": t, "special": True} | dict.fromkeys(flags, False) for t in special]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None if spec.model_type == "olmoe" else {"type": "NFC"},
        "pre_tokenizer": pre_tokenizer,
        "post_processor": byte_level | {"use_regex": True},
        "decoder": byte_level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {t: i for i, t in enumerate(tokens) if t not in special},
            "merges": [m.split(" ") for m in merges],
        },
    }
