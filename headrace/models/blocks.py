"""What the decoder families share: attention and MoE blocks, written as graph-builder calls.

A family's file (olmoe.py, qwen3_moe.py) says how its blocks differ and in which order they come.
"""

from __future__ import annotations

import numpy as np

from headrace.errors import HeadraceError
from headrace.formats.checkpoint import Checkpoint
from headrace.graph import Graph, Value, Weight
from headrace.models.config import ModelConfig

INV_FREQ = "rope.inv_freq"  # computed, in no file

# Routes that the expert op processes at a time; beyond it an expert's tokens are done in rounds.
ROUTE_CAPACITY = 256


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """float32 [head_dim / 2]: rope_theta ** (-2i / head_dim)."""
    i = np.arange(0, config.head_dim, 2, dtype=np.float64)
    return (config.rope_theta ** (-i / config.head_dim)).astype(np.float32)


class DecoderBuilder:
    """A Graph under construction, with the checkpoint's tensors declared as they are first used."""

    def __init__(self, checkpoint: Checkpoint, route_capacity: int = ROUTE_CAPACITY, route_all_rows: bool = False):
        self.checkpoint, self.config = checkpoint, checkpoint.config
        self.route_capacity, self.route_all_rows = route_capacity, route_all_rows
        self.graph = Graph()

    def matrix(self, name: str, rows: int, cols: int) -> Weight:
        return self.graph.matrix(name, self._tensor(name, (rows, cols)).dtype, rows, cols)

    def vector(self, name: str, cols: int) -> Weight:
        self._tensor(name, (cols,))
        return self.graph.vector(name, cols)

    def _tensor(self, name: str, shape: tuple[int, ...]):
        tensor = self.checkpoint.tensors.get(name)
        if tensor is None:
            raise HeadraceError(f"{self.checkpoint.path}: tensor {name} is missing")
        if tensor.shape != shape:
            raise HeadraceError(
                f"{self.checkpoint.path}: tensor {name} has shape {list(tensor.shape)}, "
                f"the config asks for {list(shape)}"
            )
        return tensor

    # ---- blocks

    def embed(self) -> Value:
        e = self.checkpoint.embedding
        return self.graph.embed(self.graph.table("token_embd.weight", e.dtype, e.rows, e.cols))

    def norm(self, x: Value, name: str) -> Value:
        weight = self.vector(name, x.shape.width)
        return self.graph.rms_norm(x, weight, group=x.shape.width, eps=self.config.rms_norm_eps)

    def rope_angles(self) -> Value:
        return self.graph.rope_angles(self.graph.vector(INV_FREQ, self.config.head_dim // 2))

    def attention(self, x: Value, angles: Value, layer: int, qk_norm: str) -> Value:
        """Self-attention over normed x, up to but without the output projection.

        qk_norm: "full" (over the whole projected vector) or "head" (over each head), before rope.
        """
        g, c, b = self.graph, self.config, f"blk.{layer}."
        q_width, kv_width = (
            c.num_attention_heads * c.head_dim,
            c.num_key_value_heads * c.head_dim,
        )
        q = g.linear(x, self.matrix(b + "attn_q.weight", q_width, c.hidden_size))
        k = g.linear(x, self.matrix(b + "attn_k.weight", kv_width, c.hidden_size))
        v = g.linear(x, self.matrix(b + "attn_v.weight", kv_width, c.hidden_size))
        q_group, k_group = (q_width, kv_width) if qk_norm == "full" else (c.head_dim, c.head_dim)
        q = g.rms_norm(q, self.vector(b + "attn_q_norm.weight", q_group), group=q_group, eps=c.rms_norm_eps)
        k = g.rms_norm(k, self.vector(b + "attn_k_norm.weight", k_group), group=k_group, eps=c.rms_norm_eps)
        q = g.rope(q, angles, head_dim=c.head_dim)
        k = g.rope(k, angles, head_dim=c.head_dim)
        return g.attention(
            q,
            k,
            v,
            g.state("kv", c.num_key_value_heads, c.head_dim),
            num_attention_heads=c.num_attention_heads,
            num_key_value_heads=c.num_key_value_heads,
            head_dim=c.head_dim,
            window=0,
            scale=c.head_dim**-0.5,
        )

    def attention_output(self, attended: Value, layer: int) -> Value:
        name = f"blk.{layer}.attn_output.weight"
        return self.graph.linear(attended, self.matrix(name, self.config.hidden_size, attended.shape.width))

    def route(self, x: Value, layer: int) -> tuple[Value, Value]:
        """Softmax router over all experts, top-k."""
        g, c = self.graph, self.config
        router = self.matrix(f"blk.{layer}.ffn_gate_inp.weight", c.num_experts, c.hidden_size)
        return g.route(
            g.linear(x, router),
            layer=layer,
            top_k=c.num_experts_per_tok,
            scoring=0,
            normalize=int(c.norm_topk_prob),
            scaling=1.0,
        )

    def experts(self, x: Value, ids: Value, weights: Value, layer: int) -> Value:
        """The routed experts' weighted sum."""
        c = self.config
        return self.graph.experts(
            x,
            ids,
            weights,
            self.checkpoint.experts[layer].parts[0][0],
            layer=layer,
            num_experts=c.num_experts,
            moe_intermediate_size=c.moe_intermediate_size,
            route_capacity=max(self.route_capacity, c.num_experts_per_tok),
        )

    def logits(self, x: Value) -> Graph:
        """Final norm and output projection; returns the finished graph."""
        c = self.config
        x = self.norm(x, "output_norm.weight")
        # A tied table is listed among the tensors as output.weight too: it is resident as a matrix.
        head = self.matrix("output.weight", c.vocab_size, c.hidden_size)
        self.graph.output(x, head)
        return self.graph


def decoder_graph(builder: DecoderBuilder, qk_norm: str) -> Graph:
    """Pre-norm decoder: per layer, attention and MoE, each added to the stream."""
    g, num_layers = builder.graph, builder.config.num_hidden_layers
    x = builder.embed()
    angles = builder.rope_angles()
    for layer in range(num_layers):
        h = builder.norm(x, f"blk.{layer}.attn_norm.weight")
        attended = builder.attention(h, angles, layer, qk_norm)
        is_last = layer == num_layers - 1
        if is_last and not builder.route_all_rows:
            # From here on a row sees only itself: go on with those whose logits were asked for.
            attended, x = g.select_rows(attended), g.select_rows(x)
        x = g.add(x, builder.attention_output(attended, layer))
        h = builder.norm(x, f"blk.{layer}.ffn_norm.weight")
        ids, weights = builder.route(h, layer)
        if is_last and builder.route_all_rows:
            x, h, ids, weights = (g.select_rows(v) for v in (x, h, ids, weights))
        x = g.add(x, builder.experts(h, ids, weights, layer))
    return builder.logits(x)
