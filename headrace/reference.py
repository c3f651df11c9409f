"""The oracle: a NumPy interpreter of a Graph, written to be read and to be right, not to be fast.

Each op is computed in float64 and rounded to float32 at its output, so an executor may differ from it by
float32 rounding only. Quantized weights are used as the floats they stand for. Activations:

    int8=True   as the kernels: `quantize` rounds each block of 32 to int8 (csrc/kernels/dtype.h)
    int8=False  `quantize` does nothing: the model as its weights mean it

Keys and values are read back as they are stored (float16 or float32).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from headrace.formats.checkpoint import Checkpoint, DType, LayerExperts
from headrace.graph import Graph, Node, State
from headrace.ops import Extent

Array = np.ndarray


# ---- reading weights as floats


def dequantize(dtype: DType, raw: Array, cols: int) -> Array:
    """File rows (uint8, whole rows) to float32 [rows, cols], exactly."""
    if dtype == DType.F32:
        return raw.view("<f4").reshape(-1, cols).astype(np.float32)
    if dtype == DType.F16:
        return raw.view("<f2").reshape(-1, cols).astype(np.float32)
    if dtype == DType.BF16:
        bits = raw.view("<u2").astype(np.uint32) << 16
        return bits.view(np.float32).reshape(-1, cols)
    size = 18 if dtype == DType.Q4_0 else 34
    blocks = raw.reshape(-1, size)
    d = blocks[:, :2].copy().view("<f2").astype(np.float32)
    codes = blocks[:, 2:]
    if dtype == DType.Q4_0:
        q = np.concatenate([codes & 15, codes >> 4], axis=1).astype(np.int8) - np.int8(8)
    else:
        q = codes.view(np.int8)
    return (d * q.astype(np.float32)).reshape(-1, cols)


def untile(dtype: DType, raw: Array, rows: int, cols: int) -> Array:
    """tile16 bytes (docs/format.md) to file rows, uint8 [rows, row bytes]."""
    tiles = -(-rows // 16)
    if not dtype.is_quantized:
        size = dtype.row_bytes(1)
        t = raw.reshape(tiles, cols, 16, size).transpose(0, 2, 1, 3)
        return np.ascontiguousarray(t).reshape(tiles * 16, cols * size)[:rows]
    words = 4 if dtype == DType.Q4_0 else 8
    blocks = raw.reshape(tiles, cols // 32, 32 + 64 * words)
    d = blocks[..., :32].reshape(tiles, cols // 32, 16, 2)
    q = blocks[..., 32:].reshape(tiles, cols // 32, words, 16, 4).transpose(0, 1, 3, 2, 4)
    both = np.concatenate([d, q.reshape(tiles, cols // 32, 16, 4 * words)], axis=-1)
    return both.transpose(0, 2, 1, 3).reshape(tiles * 16, -1)[:rows]


def _read(path, offset: int, nbytes: int) -> Array:
    return np.fromfile(path, np.uint8, nbytes, offset=offset)


def read_tensor(checkpoint: Checkpoint, name: str) -> Array:
    """A trunk tensor as float32 [rows, cols] (vectors: [1, n])."""
    t = checkpoint.tensors[name]
    cols = t.shape[-1]
    rows = int(np.prod(t.shape[:-1], dtype=np.int64)) if len(t.shape) > 1 else 1
    raw = _read(checkpoint.files[t.file], t.offset, t.nbytes)
    if t.layout == "tile16":
        raw = untile(t.dtype, raw, rows, cols).reshape(-1)
    return dequantize(t.dtype, raw, cols)


def read_embedding_row(checkpoint: Checkpoint, row: int) -> Array:
    e = checkpoint.embedding
    raw = _read(checkpoint.files[e.file], e.offset + row * e.stride_bytes, e.dtype.row_bytes(e.cols))
    return dequantize(e.dtype, raw, e.cols)[0]


def read_expert(checkpoint: Checkpoint, layer: int, expert: int) -> list[Array]:
    """gate [I, H], up [I, H], down [H, I] as float32."""
    e: LayerExperts = checkpoint.experts[layer]
    packed = e.crc32c is not None
    at = int(e.offset[expert]) if packed else 0
    out = []
    for i, (dtype, rows, cols) in enumerate(e.parts):
        if packed:
            nbytes = -(-rows // 16) * 16 * dtype.row_bytes(cols)
            raw = _read(checkpoint.files[int(e.file[expert])], at, nbytes)
            raw = untile(dtype, raw, rows, cols).reshape(-1)
            at += -(-nbytes // 64) * 64
        else:
            path = checkpoint.files[int(e.file[expert, i])]
            raw = _read(path, int(e.offset[expert, i]), rows * dtype.row_bytes(cols))
        out.append(dequantize(dtype, raw, cols))
    return out


# ---- op by op


def quantize_q8(x: Array) -> Array:
    """float32 [..., K] -> float32, rounded to int8 per block of 32 and back."""
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, 32)
    amax = np.abs(blocks).max(axis=-1, keepdims=True)
    d = (amax / np.float32(127)).astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        inverse = np.where(amax > 0, np.float32(127) / amax, np.float32(0)).astype(np.float32)
    q = np.rint(blocks * inverse)
    return (d.astype(np.float64) * q).reshape(x.shape)


def rms_norm(x: Array, weight: Array, group: int, eps: float) -> Array:
    g = x.astype(np.float64).reshape(len(x), -1, group)
    y = g / np.sqrt((g * g).mean(axis=-1, keepdims=True) + eps)
    return (y * weight.reshape(-1)).reshape(x.shape)


def rope(x: Array, angles: Array, head_dim: int, style: int) -> Array:
    half = angles.shape[1] // 2
    cos, sin = angles[:, None, :half].astype(np.float64), angles[:, None, half:].astype(np.float64)
    y = x.astype(np.float64).reshape(len(x), -1, head_dim).copy()
    pairs = (slice(0, half), slice(half, 2 * half)) if style == 0 else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    a, b = y[..., pairs[0]].copy(), y[..., pairs[1]].copy()
    y[..., pairs[0]] = a * cos - b * sin
    y[..., pairs[1]] = b * cos + a * sin
    return y.reshape(x.shape)


def route(logits: Array, top_k: int, normalize: bool, scaling: float) -> tuple[Array, Array]:
    """ids int32 [n, k] ascending, weights [n, k]. Ties go to the lowest id."""
    logits = logits.astype(np.float64)
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    ids = np.sort(np.argsort(-logits, axis=1, kind="stable")[:, :top_k], axis=1)
    w = np.take_along_axis(p, ids, axis=1)
    if normalize:
        w /= w.sum(axis=1, keepdims=True)
    return ids.astype(np.int32), w * scaling


def swiglu(gate: Array, up: Array) -> Array:
    with np.errstate(over="ignore"):
        return gate / (1 + np.exp(-gate)) * up


def log_probs(logits: Array, targets: list[int]) -> Array:
    """log softmax of each row at its target: [n, vocab] -> float64 [n, 1]."""
    logits = logits.astype(np.float64)
    top = logits.max(axis=1, keepdims=True)
    of_target = np.take_along_axis(logits, np.array(targets)[:, None], axis=1)
    return of_target - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True))


class ReferenceSession:
    """Keys and values per state, float16 or float32, of every position so far."""

    def __init__(self, graph: Graph, kv_dtype: type = np.float16):
        empty: list[Array] = [np.zeros((0, s.num_heads, s.head_dim), kv_dtype) for s in graph.states]
        self.keys, self.values = list(empty), list(empty)
        self.length = 0

    def append(self, state: State, k: Array, v: Array) -> tuple[Array, Array]:
        for stored, new in ((self.keys, k), (self.values, v)):
            old = stored[state.index]
            rows = new.reshape(-1, state.num_heads, state.head_dim).astype(old.dtype)
            stored[state.index] = np.concatenate([old, rows])
        return self.keys[state.index], self.values[state.index]


class Reference:
    """Interprets `graph` over one sequence.

    checkpoint: read tensor by tensor, nothing is kept. vectors: computed weights by name (inverse
    frequencies). int8: see the module. observe, if given, is called with each node and its outputs.
    """

    def __init__(
        self,
        graph: Graph,
        checkpoint: Checkpoint,
        vectors: dict[str, Array],
        *,
        int8: bool = True,
        observe: Callable[[Node, list[Array]], None] | None = None,
    ):
        self.graph, self.checkpoint, self.vectors = graph, checkpoint, vectors
        self.int8, self.observe = int8, observe
        self._tensors: dict[str, Array] = {}

    def run(
        self,
        session: ReferenceSession,
        tokens: list[int],
        out_rows: list[int],
        routes: Array | None = None,
        targets: list[int] | None = None,
    ) -> Array:
        """Logits float32 [len(out_rows), vocab_size], or the log-probabilities [len(out_rows), 1] of targets, one
        for each of out_rows; the session grows by the tokens.

        routes: expert ids [layers, len(tokens), top_k] that replace what routing chooses."""
        values: dict[int, Array] = {}
        positions = np.arange(session.length, session.length + len(tokens))
        for node in self.graph.nodes:
            ins = [values[v.index] for v in node.inputs]
            outs = self._op(node, ins, session, tokens, positions, out_rows, routes, targets)
            outs = [o if o.dtype == np.int32 else o.astype(np.float32) for o in outs]
            for v, o in zip(node.outputs, outs, strict=False):
                values[v.index] = o
            if self.observe:
                self.observe(node, outs)
        session.length += len(tokens)
        end = self.graph.logits if targets is None else self.graph.log_probs
        assert end is not None
        return values[end.index]

    def _weight(self, name: str) -> Array:
        if name in self.vectors:
            return self.vectors[name]
        if name not in self._tensors:
            self._tensors[name] = read_tensor(self.checkpoint, name)
        return self._tensors[name]

    def _quantized(self, x: Array) -> Array:
        return quantize_q8(x) if self.int8 else x

    def _op(self, node, ins, session, tokens, positions, out_rows, routes, targets) -> list[Array]:
        a, op = node.attrs, node.op
        if op == "embed":
            return [np.stack([read_embedding_row(self.checkpoint, t) for t in tokens])]
        if op == "rms_norm":
            return [rms_norm(ins[0], self._weight(node.weights[0].name), a["group"], a["eps"])]
        if op == "quantize":
            return [self._quantized(ins[0])]
        if op == "linear":
            w = self._weight(node.weights[0].name).astype(np.float64)
            return [ins[0].astype(np.float64) @ w.T]
        if op == "rope_angles":
            angle = positions[:, None] * self._weight(node.weights[0].name).astype(np.float64)
            return [np.concatenate([np.cos(angle), np.sin(angle)], axis=1)]
        if op == "rope":
            return [rope(ins[0], ins[1], a["head_dim"], a["style"])]
        if op == "attention":
            k, v = session.append(node.state, ins[1], ins[2])
            return [self._attention(ins[0], k, v, positions, a)]
        if op == "add":
            return [ins[0] + ins[1]]
        if op == "route":
            assert a["scoring"] == 0
            if routes is not None:
                ids = routes[a["layer"]].astype(np.int32)
                if node.outputs[0].shape.extent == Extent.OUT_ROWS:
                    ids = ids[out_rows]
                return [ids, np.full(ids.shape, a["scaling"] / a["top_k"])]
            return list(route(ins[0], a["top_k"], bool(a["normalize"]), a["scaling"]))
        if op == "experts":
            return [self._experts(ins[0], ins[1], ins[2], a["layer"])]
        if op == "select_rows":
            return [ins[0][out_rows]]
        if op == "output":
            logits = ins[0].astype(np.float64) @ self._weight(node.weights[0].name).astype(np.float64).T
            if targets is None:
                return [logits, np.zeros((len(logits), 1))]
            return [logits[:0], log_probs(logits.astype(np.float32), targets)]
        raise NotImplementedError(op)

    def _attention(self, q: Array, k: Array, v: Array, positions: Array, a: dict) -> Array:
        heads, head_dim = a["num_attention_heads"], a["head_dim"]
        per = heads // a["num_key_value_heads"]
        out = np.zeros(q.shape)
        q = q.astype(np.float64).reshape(len(q), heads, head_dim)
        for i, position in enumerate(positions):
            first = max(0, position + 1 - a["window"]) if a["window"] else 0
            keys = k[first : position + 1].astype(np.float64).repeat(per, axis=1)
            vals = v[first : position + 1].astype(np.float64).repeat(per, axis=1)
            s = np.einsum("hd,phd->hp", q[i], keys) * a["scale"]
            p = np.exp(s - s.max(axis=1, keepdims=True))
            p /= p.sum(axis=1, keepdims=True)
            out[i] = np.einsum("hp,phd->hd", p, vals).reshape(-1)
        return out

    def _experts(self, x: Array, ids: Array, weights: Array, layer: int) -> Array:
        down_quantized = self.checkpoint.experts[layer].parts[2][0].is_quantized
        y = np.zeros((len(x), self.checkpoint.config.hidden_size))
        for expert in np.unique(ids):
            gate, up, down = (m.astype(np.float64) for m in read_expert(self.checkpoint, layer, int(expert)))
            rows, slots = np.nonzero(ids == expert)
            h = swiglu(x[rows] @ gate.T, x[rows] @ up.T).astype(np.float32)
            if down_quantized:
                h = self._quantized(h)
            y[rows] += weights[rows, slots, None] * (h @ down.T)
        return y
