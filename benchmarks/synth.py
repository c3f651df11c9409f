"""Writes a random MoE checkpoint of a real model's shape as GGUF, for speed and memory
measurements.

    python benchmarks/synth.py {olmoe,qwen3,small} OUT.gguf [--dtype Q4_0] [--layers N] [--seed S]

Needs the `gguf` package. Tensors are written in pieces, so memory stays under 200 MB at any size.
There is no vocabulary: such a checkpoint takes token ids.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

PIECE_BYTES = 8 << 20
DTYPES = ("F32", "F16", "BF16", "Q4_0", "Q8_0")
STD = 0.02  # of weights, as after training
# Embeddings that outweigh what layers add, and sharp routers: so each random token goes to experts of its own.
EMBEDDING_STD = 1.0
ROUTER_STD = 0.1


@dataclass(frozen=True)
class Shape:
    """A model's extents, in Hugging Face's words."""

    arch: str
    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    vocab_size: int
    rope_theta: float
    rms_norm_eps: float


SHAPES = {
    "olmoe": Shape("olmoe", 16, 2048, 16, 16, 128, 64, 8, 1024, 50304, 1e4, 1e-5),
    "qwen3": Shape("qwen3moe", 48, 2048, 32, 4, 128, 128, 8, 768, 151936, 1e6, 1e-6),
    # About 480 MB as Q4_0.
    "small": Shape("olmoe", 8, 1024, 16, 16, 64, 64, 8, 512, 8192, 1e4, 1e-5),
}


def write_synthetic(path: Path, shape: Shape, dtype: str = "Q4_0", layers: int | None = None, seed: int = 0) -> None:
    """Matrices are of `dtype`, vectors and routers F32. The same arguments give the same file."""
    num_layers = layers or shape.num_hidden_layers
    tensors = dict(_tensors(shape, num_layers))
    types = {name: _type(name, dims, dtype) for name, dims in tensors.items()}

    writer = gguf.GGUFWriter(path, shape.arch)
    writer.add_block_count(num_layers)
    writer.add_context_length(8192)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.moe_intermediate_size)
    writer.add_expert_feed_forward_length(shape.moe_intermediate_size)
    writer.add_head_count(shape.num_attention_heads)
    writer.add_head_count_kv(shape.num_key_value_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_layer_norm_rms_eps(shape.rms_norm_eps)
    writer.add_expert_count(shape.num_experts)
    writer.add_expert_used_count(shape.num_experts_per_tok)
    writer.add_vocab_size(shape.vocab_size)
    writer.add_tokenizer_model("none")
    for name, dims in tensors.items():
        qtype = gguf.GGMLQuantizationType[types[name]]
        nbytes = _nbytes(types[name], math.prod(dims))
        stored = gguf.quant_shape_to_byte_shape(dims, qtype)
        writer.add_tensor_info(name, stored, np.dtype(np.uint8), nbytes, raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()

    # The package writes whole tensors; pieces keep memory bounded.
    rng = np.random.default_rng(seed)
    alignment = gguf.GGUF_DEFAULT_ALIGNMENT
    with open(path, "ab") as file:
        for name, dims in tensors.items():
            file.write(bytes(-file.tell() % alignment))
            for piece in _values(name, types[name], math.prod(dims), rng):
                file.write(piece)
        file.write(bytes(-file.tell() % alignment))


def _tensors(s: Shape, num_layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    q, kv = s.num_attention_heads * s.head_dim, s.num_key_value_heads * s.head_dim
    d, inner, n = s.hidden_size, s.moe_intermediate_size, s.num_experts
    full = s.arch == "olmoe"  # norms of queries and keys over all heads, or over each
    yield "token_embd.weight", (s.vocab_size, d)
    yield "output_norm.weight", (d,)
    yield "output.weight", (s.vocab_size, d)
    for i in range(num_layers):
        for name, dims in (
            ("attn_norm", (d,)),
            ("attn_q", (q, d)),
            ("attn_k", (kv, d)),
            ("attn_v", (kv, d)),
            ("attn_output", (d, q)),
            ("attn_q_norm", (q if full else s.head_dim,)),
            ("attn_k_norm", (kv if full else s.head_dim,)),
            ("ffn_norm", (d,)),
            ("ffn_gate_inp", (n, d)),
            ("ffn_gate_exps", (n, inner, d)),
            ("ffn_up_exps", (n, inner, d)),
            ("ffn_down_exps", (n, d, inner)),
        ):
            yield f"blk.{i}.{name}.weight", dims


def _type(name: str, dims: tuple[int, ...], dtype: str) -> str:
    return "F32" if len(dims) == 1 or "ffn_gate_inp" in name else dtype


def _nbytes(dtype: str, count: int) -> int:
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[dtype]]
    return count // per_block * block_bytes


def _values(name: str, dtype: str, count: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """`count` random values of a tensor as stored, in pieces."""
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[dtype]]
    num_blocks = count // per_block
    step = PIECE_BYTES // block_bytes
    std = {"token_embd.weight": EMBEDDING_STD}.get(name, ROUTER_STD if "ffn_gate_inp" in name else STD)
    for begin in range(0, num_blocks, step):
        n = min(step, num_blocks - begin)
        if dtype in ("Q4_0", "Q8_0"):
            # Codes are symmetric about zero: a mean, however small, would add up over a row to a direction that all
            # tokens share, and they would all be routed alike. Standard deviations: of -7..7 and -127..127.
            blocks = np.empty((n, block_bytes), np.uint8)
            blocks[:, :2] = np.array([std / (4.32 if dtype == "Q4_0" else 73.3)], "<f2").view(np.uint8)
            codes = blocks[:, 2:]
            if dtype == "Q4_0":
                codes[:] = rng.integers(1, 16, codes.shape, np.uint8)
                codes |= rng.integers(1, 16, codes.shape, np.uint8) << 4
            else:
                codes[:] = rng.integers(-127, 128, codes.shape, np.int8).view(np.uint8)
            yield blocks
            continue
        values = rng.standard_normal(n, np.float32)
        if name.endswith("_norm.weight"):
            values = 1 + np.float32(0.1) * values
        else:
            values *= np.float32(std)
        if dtype == "BF16":
            yield (values.view(np.uint32) >> 16).astype("<u2")
        else:
            yield values.astype("<f2" if dtype == "F16" else "<f4")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", choices=DTYPES, default="Q4_0")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write_synthetic(args.out, SHAPES[args.shape], args.dtype, args.layers, args.seed)


if __name__ == "__main__":
    main()
