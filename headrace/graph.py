"""Graph: the ops of one pass, built once from a checkpoint. The number of rows is its only free extent.

A model file calls one builder method per op (Graph.linear, Graph.attention, ...). Nothing is computed here:
reference.py interprets the graph in NumPy, program.py compiles it for the C++ executor.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.errors import HeadraceError
from headrace.formats.checkpoint import DType
from headrace.ops import OPS, Kind, Shape


@dataclass(frozen=True)
class Value:
    index: int
    shape: Shape


@dataclass(frozen=True)
class Weight:
    """role "matrix": [rows, cols] of dtype, resident in tile layout. "vector": float32 [cols], resident,
    rows 1 (files may hold it in another float type). "table": the embedding, rows read from its file.
    """

    index: int
    name: str
    role: str
    dtype: DType
    rows: int
    cols: int


@dataclass(frozen=True)
class State:
    """What an op keeps between passes, per session.

    kind "kv": keys and values of every position so far, num_heads * head_dim numbers each. It grows by one
    position a row and is rolled back by shortening it.
    """

    index: int
    kind: str
    num_heads: int
    head_dim: int


@dataclass(frozen=True)
class Node:
    op: str
    inputs: tuple[Value, ...]
    weights: tuple[Weight, ...]
    state: State | None
    outputs: tuple[Value, ...]
    attrs: dict[str, float]


@dataclass
class Graph:
    nodes: list[Node] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    weights: list[Weight] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    logits: Value | None = None
    log_probs: Value | None = None  # None: a graph without `output`, which gives logits only
    _quantized: dict[int, Value] = field(default_factory=dict)

    # ---- declarations

    def matrix(self, name: str, dtype: DType, rows: int, cols: int) -> Weight:
        return self._weight(name, "matrix", dtype, rows, cols)

    def vector(self, name: str, cols: int) -> Weight:
        return self._weight(name, "vector", DType.F32, 1, cols)

    def table(self, name: str, dtype: DType, rows: int, cols: int) -> Weight:
        return self._weight(name, "table", dtype, rows, cols)

    def state(self, kind: str, num_heads: int, head_dim: int) -> State:
        s = State(len(self.states), kind, num_heads, head_dim)
        self.states.append(s)
        return s

    # ---- ops, one method each (see headrace/ops.py for their meaning)

    def embed(self, table: Weight) -> Value:
        return self._add("embed", weights=(table,))[0]

    def rms_norm(self, x: Value, weight: Weight, *, group: int, eps: float) -> Value:
        if x.shape.width % group or weight.cols != group:
            raise HeadraceError(
                f"rms_norm of {weight.name}: group {group} against row width {x.shape.width} "
                f"and weight length {weight.cols}"
            )
        return self._add("rms_norm", (x,), (weight,), {"group": group, "eps": eps})[0]

    def quantize(self, x: Value) -> Value:
        """x in int8; computed once per value, however many products read it."""
        if x.index not in self._quantized:
            self._quantized[x.index] = self._add("quantize", (x,))[0]
        return self._quantized[x.index]

    def linear(self, x: Value, weight: Weight) -> Value:
        if x.shape.width != weight.cols:
            raise HeadraceError(f"linear {weight.name}: input width {x.shape.width}, expected {weight.cols}")
        return self._add("linear", (self._as_input(x, weight.dtype),), (weight,))[0]

    def rope_angles(self, inv_freq: Weight) -> Value:
        return self._add("rope_angles", weights=(inv_freq,))[0]

    def rope(self, x: Value, angles: Value, *, head_dim: int, style: int = 0) -> Value:
        return self._add("rope", (x, angles), attrs={"head_dim": head_dim, "style": style})[0]

    def attention(self, q: Value, k: Value, v: Value, state: State, **attrs: float) -> Value:
        return self._add("attention", (q, k, v), attrs=attrs, state=state)[0]

    def add(self, a: Value, b: Value) -> Value:
        return self._add("add", (a, b))[0]

    def route(self, logits: Value, **attrs: float) -> tuple[Value, Value]:
        ids, weights = self._add("route", (logits,), attrs=attrs)
        return ids, weights

    def experts(self, x: Value, ids: Value, weights: Value, gate_dtype: DType, **attrs: float) -> Value:
        return self._add("experts", (self._as_input(x, gate_dtype), ids, weights), attrs=attrs)[0]

    def select_rows(self, x: Value) -> Value:
        return self._add("select_rows", (x,))[0]

    def output(self, x: Value, weight: Weight) -> None:
        """The end of a model: sets logits and log_probs."""
        self.logits, self.log_probs = self._add("output", (self._as_input(x, weight.dtype),), (weight,))

    # ---- private

    def _weight(self, name: str, role: str, dtype: DType, rows: int, cols: int) -> Weight:
        w = Weight(len(self.weights), name, role, dtype, rows, cols)
        self.weights.append(w)
        return w

    def _as_input(self, x: Value, weight_dtype: DType) -> Value:
        return self.quantize(x) if weight_dtype.is_quantized and x.shape.kind == Kind.F32 else x

    def _add(self, op, inputs=(), weights=(), attrs=None, state=None) -> tuple[Value, ...]:
        spec, attrs = OPS[op], attrs or {}
        if set(attrs) != set(spec.attrs) or len(inputs) != len(spec.inputs):
            raise TypeError(f"{op}: attributes {sorted(attrs)}, expected {sorted(spec.attrs)}")
        shapes = spec.shape([v.shape for v in inputs], [(w.rows, w.cols) for w in weights], attrs)
        outputs = []
        for shape in shapes:
            outputs.append(Value(len(self.values), shape))
            self.values.append(outputs[-1])
        self.nodes.append(Node(op, tuple(inputs), tuple(weights), state, tuple(outputs), dict(attrs)))
        return tuple(outputs)
