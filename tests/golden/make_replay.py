"""Writes tests/golden/replay/: a compiled program, a small model and its logits, which the core replays without Python.

    PYTHONPATH=tests python -m golden.make_replay

model.gguf   random weights, Q4_0 and Q8_0 mixed
program.bin  headrace/program.py's bytes for passes of at most 8 rows
index.txt    where the program's weights and the experts lie in model.gguf, and the tokens
logits.bin   float32 [tokens, vocab], bit for bit what every instruction set must give
"""

from __future__ import annotations

from pathlib import Path

import checkpoints

from headrace.engine import Engine, EngineOptions
from headrace.formats import open_checkpoint
from headrace.models.blocks import INV_FREQ, inverse_frequencies
from headrace.models.families import build_graph
from headrace.program import compile_graph

REPLAY = Path(__file__).parent / "replay"
SPEC = checkpoints.QWEN3.but(
    num_hidden_layers=2,
    hidden_size=64,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    vocab_size=40,
)
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 8, 9, 7, 9, 32, 38, 4, 6]
MAX_ROWS = 8


def program_bytes(checkpoint) -> bytes:
    return compile_graph(build_graph(checkpoint, route_capacity=8), MAX_ROWS, MAX_ROWS).data


def index_lines(checkpoint) -> list[str]:
    lines = []
    for w in build_graph(checkpoint).weights:
        if w.role == "table":
            e = checkpoint.embedding
            lines.append(f"table {w.index} {e.offset} {e.stride_bytes}")
        elif w.name == INV_FREQ:
            values = inverse_frequencies(checkpoint.config)
            lines.append(f"vector {w.index} {len(values)} " + " ".join(float(v).hex() for v in values))
        else:
            t = checkpoint.tensors[w.name]
            lines.append(f"load {w.index} {t.offset} {t.nbytes} {int(t.dtype)}")
    for layer in checkpoint.experts:
        parts = " ".join(f"{int(dtype)} {rows} {cols}" for dtype, rows, cols in layer.parts)
        lines.append(f"layer {layer.num_experts} {parts} " + " ".join(map(str, layer.offset.reshape(-1))))
    lines.append(f"tokens {len(TOKENS)} " + " ".join(map(str, TOKENS)))
    return lines


def main() -> None:
    REPLAY.mkdir(exist_ok=True)
    model = REPLAY / "model.gguf"
    types = {"ffn_down_exps": "Q8_0", "blk.1.ffn_gate_exps": "Q8_0", "blk.1.ffn_up_exps": "Q8_0", "attn_v": "F16"}
    checkpoints.write_gguf(model, SPEC, checkpoints.random_weights(SPEC), dtype="Q4_0", overrides=types)
    checkpoint = open_checkpoint(model)
    (REPLAY / "program.bin").write_bytes(program_bytes(checkpoint))
    (REPLAY / "index.txt").write_text("\n".join(index_lines(checkpoint)) + "\n")
    options = EngineOptions(context=len(TOKENS), max_rows=MAX_ROWS, max_out_rows=MAX_ROWS)
    with Engine(checkpoint, options) as engine:
        (REPLAY / "logits.bin").write_bytes(engine.session().verify(TOKENS).tobytes())


if __name__ == "__main__":
    main()
