"""From the tensors that a file holds to those that a Checkpoint names: shapes checked, fused
tensors cut, experts located. GGUF and Hugging Face directories meet here, both under GGUF's
names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from headrace.errors import HeadraceError
from headrace.formats.checkpoint import DType, EmbeddingTable, LayerExperts, TensorInfo
from headrace.models.config import ModelConfig


@dataclass(frozen=True)
class FileTensor:
    """A tensor as a file stores it. title: what errors call it (file and the file's own name)."""

    title: str
    dtype: DType
    shape: tuple[int, ...]  # outermost first
    file: int
    offset: int
    nbytes: int

    def rows(self, begin: int, count: int) -> FileTensor:
        """Rows [begin, begin + count) of all but the last dimension."""
        size = self.dtype.row_bytes(self.shape[-1])
        shape = (count, self.shape[-1])
        return FileTensor(self.title, self.dtype, shape, self.file, self.offset + begin * size, count * size)


def no_place(t: FileTensor) -> HeadraceError:
    return HeadraceError(
        f"{t.title}: this tensor has no place in the model; without it every result could be another, so the "
        "checkpoint is refused"
    )


@dataclass(frozen=True)
class Placed:
    tensors: dict[str, TensorInfo]
    embedding: EmbeddingTable
    experts: tuple[LayerExperts, ...]


def trunk_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every tensor of the trunk. With tied embeddings output.weight is among them
    too."""
    c = config
    q_rows, kv_rows = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    # OLMoE normalizes the whole projected vector, Qwen3 each head.
    per_head = c.model_type == "qwen3_moe"
    yield "output_norm.weight", (c.hidden_size,)
    yield "output.weight", (c.vocab_size, c.hidden_size)
    for layer in range(c.num_hidden_layers):
        blk = f"blk.{layer}."
        yield blk + "attn_norm.weight", (c.hidden_size,)
        yield blk + "attn_q.weight", (q_rows, c.hidden_size)
        yield blk + "attn_k.weight", (kv_rows, c.hidden_size)
        yield blk + "attn_v.weight", (kv_rows, c.hidden_size)
        yield blk + "attn_output.weight", (c.hidden_size, q_rows)
        yield blk + "attn_q_norm.weight", (c.head_dim if per_head else q_rows,)
        yield blk + "attn_k_norm.weight", (c.head_dim if per_head else kv_rows,)
        yield blk + "ffn_norm.weight", (c.hidden_size,)
        yield blk + "ffn_gate_inp.weight", (c.num_experts, c.hidden_size)


def place(config: ModelConfig, tensors: dict[str, FileTensor], where: str) -> Placed:
    """tensors: by GGUF's canonical names, q, k, v apart or fused (`attn_qkv`), experts stacked
    (`ffn_gate_exps`), fused (`ffn_gate_up_exps`) or one by one (`ffn_gate.E`).

    Raises HeadraceError for a tensor that is missing, of another shape than the config says, or
    unknown.
    """
    shelf = _Shelf(tensors, where)
    embedding = shelf.take("token_embd.weight", (config.vocab_size, config.hidden_size))
    if config.tie_word_embeddings:
        shelf.tensors["output.weight"] = embedding
    _split_qkv(config, shelf)

    trunk: dict[str, TensorInfo] = {}
    for name, shape in trunk_shapes(config):
        t = shelf.take(name, shape)
        if len(shape) == 1 and t.dtype.is_quantized:
            raise HeadraceError(f"{t.title}: expected F32, F16 or BF16, found {t.dtype.name}")
        trunk[name] = TensorInfo(name, t.dtype, t.shape, t.file, t.offset, t.nbytes)
    experts = tuple(_layer_experts(config, shelf, f"blk.{layer}.") for layer in range(config.num_hidden_layers))
    shelf.refuse_rest()

    table = EmbeddingTable(
        embedding.dtype,
        rows=config.vocab_size,
        cols=config.hidden_size,
        file=embedding.file,
        offset=embedding.offset,
        stride_bytes=embedding.dtype.row_bytes(config.hidden_size),
    )
    return Placed(trunk, table, experts)


def _split_qkv(c: ModelConfig, shelf: _Shelf) -> None:
    q_rows, kv_rows = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    for name in [n for n in shelf.tensors if n.endswith(".attn_qkv.weight")]:
        fused = shelf.take(name, (q_rows + 2 * kv_rows, c.hidden_size))
        begin = 0
        for part, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
            own = name.replace("attn_qkv", f"attn_{part}")
            if own in shelf.tensors:
                raise HeadraceError(f"{fused.title}: {own} exists beside it; expected one of them")
            shelf.tensors[own] = fused.rows(begin, rows)
            begin += rows


@dataclass(frozen=True)
class _Part:
    """One of gate, up and down for all experts of a layer; file and offset: [num_experts]."""

    dtype: DType
    rows: int
    cols: int
    file: np.ndarray
    offset: np.ndarray


def _layer_experts(c: ModelConfig, shelf: _Shelf, blk: str) -> LayerExperts:
    n, inner, hidden = c.num_experts, c.moe_intermediate_size, c.hidden_size
    fused = blk + "ffn_gate_up_exps.weight"
    if fused in shelf.tensors:
        t = shelf.take(fused, (n, 2 * inner, hidden))
        gate, up = _cut(t, n, 2 * inner, 0, inner), _cut(t, n, 2 * inner, inner, inner)
    else:
        gate = _part(shelf, blk + "ffn_gate", n, inner, hidden)
        up = _part(shelf, blk + "ffn_up", n, inner, hidden)
    down = _part(shelf, blk + "ffn_down", n, hidden, inner)
    parts = (gate, up, down)
    return LayerExperts(
        parts=tuple((p.dtype, p.rows, p.cols) for p in parts),
        num_experts=n,
        file=np.stack([p.file for p in parts], axis=1),
        offset=np.stack([p.offset for p in parts], axis=1),
    )


def _part(shelf: _Shelf, stem: str, n: int, rows: int, cols: int) -> _Part:
    if f"{stem}.0.weight" not in shelf.tensors:
        return _cut(shelf.take(stem + "_exps.weight", (n, rows, cols)), n, rows, 0, rows)
    each = [shelf.take(f"{stem}.{e}.weight", (rows, cols)) for e in range(n)]
    for t in each:
        if t.dtype != each[0].dtype:
            raise HeadraceError(
                f"{t.title}: expected {each[0].dtype.name} like the layer's other experts, found {t.dtype.name}"
            )
    return _Part(
        each[0].dtype,
        rows,
        cols,
        np.array([t.file for t in each], np.uint32),
        np.array([t.offset for t in each], np.uint64),
    )


def _cut(t: FileTensor, n: int, stride_rows: int, begin: int, rows: int) -> _Part:
    """From a tensor [n, stride_rows, cols] the rows [begin, begin + rows) of each expert."""
    row_bytes = t.dtype.row_bytes(t.shape[-1])
    steps = np.arange(n, dtype=np.uint64) * np.uint64(stride_rows * row_bytes)
    return _Part(
        t.dtype,
        rows,
        t.shape[-1],
        np.full(n, t.file, np.uint32),
        steps + np.uint64(t.offset + begin * row_bytes),
    )


class _Shelf:
    """Tensors that nobody took yet."""

    def __init__(self, tensors: dict[str, FileTensor], where: str):
        self.tensors = dict(tensors)
        self.where = where

    def take(self, name: str, shape: tuple[int, ...]) -> FileTensor:
        t = self.tensors.pop(name, None)
        if t is None:
            raise HeadraceError(
                f"{self.where}: tensor {name} is missing: expected shape {list(shape)}; the file is incomplete or of "
                "another architecture"
            )
        if t.shape != shape:
            raise HeadraceError(f"{t.title}: expected shape {list(shape)} from the config, found {list(t.shape)}")
        return t

    def refuse_rest(self) -> None:
        # A bias or a scale that is silently left out would change every result.
        for t in self.tensors.values():
            raise no_place(t)
