"""Compiles a Graph to flat bytes that the C++ executor (csrc/executor/program.h) replays.

Buffers are planned once, by liveness, for the largest pass: a value's memory is reused as soon as its last
reader is done. The bytes are little-endian and hold no pointers, so the core's tests replay them from a file.

    header   magic "HRPROG1\\0", then u32: num_values, num_weights, num_states, num_ops, max_rows, max_out_rows,
             logits value, log_probs value (2^32 - 1: none); then u64: scratch bytes
    values   u32 kind, u32 extent, u64 width, u64 offset in scratch (a multiple of 64)
    weights  u32 role (0 table, 1 matrix, 2 vector), u32 dtype, u32 rows, u32 cols
    states   u32 kind, u32 num_heads, u32 head_dim, u32 0
    ops      u32 code, then u32 counts of inputs, weights, states, outputs, attrs; their indices in that order as
             u32; zero padding to 8 bytes; attrs as int64 or float64 by the op table
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from headrace.graph import Graph, Value
from headrace.ops import OPS, STATES, Extent, row_bytes

MAGIC = b"HRPROG1\0"
ALIGN = 64
ROLES = {"table": 0, "matrix": 1, "vector": 2}
NO_VALUE = (1 << 32) - 1


@dataclass(frozen=True)
class Program:
    """max_rows: rows of the largest pass; max_out_rows: rows whose logits one pass can return."""

    data: bytes
    scratch_bytes: int
    max_rows: int
    max_out_rows: int


def value_bytes(value: Value, max_rows: int, max_out_rows: int) -> int:
    shape = value.shape
    if shape.extent == Extent.NONE:
        return shape.width
    rows = max_out_rows if shape.extent == Extent.LOGIT_ROWS else max_rows
    return rows * row_bytes(shape.kind, shape.width)


def plan_buffers(graph: Graph, max_rows: int, max_out_rows: int) -> tuple[list[int], int]:
    """Offsets of all values in scratch and its size. First fit over the values that live at the same time."""
    last_use = {v.index: i for i, node in enumerate(graph.nodes) for v in node.outputs}
    for i, node in enumerate(graph.nodes):
        for v in node.inputs:
            last_use[v.index] = i
    for end in (graph.logits, graph.log_probs):
        if end is not None:
            last_use[end.index] = len(graph.nodes)

    offsets = [0] * len(graph.values)
    sizes = [0] * len(graph.values)
    live: list[int] = []
    scratch_bytes = 0
    for i, node in enumerate(graph.nodes):
        for k, out in enumerate(node.outputs):
            size = -(-value_bytes(out, max_rows, max_out_rows) // ALIGN) * ALIGN
            sizes[out.index] = size
            first = node.inputs[0] if node.inputs else None
            if (
                k == 0
                and OPS[node.op].in_place
                and first is not None
                and last_use[first.index] == i
                and node.inputs.count(first) == 1
            ):
                offsets[out.index] = offsets[first.index]
                live.remove(first.index)
            else:
                offsets[out.index] = _first_fit(live, offsets, sizes, size)
            live.append(out.index)
            scratch_bytes = max(scratch_bytes, offsets[out.index] + size)
        live = [v for v in live if last_use[v] > i]
    return offsets, scratch_bytes


def _first_fit(live: list[int], offsets: list[int], sizes: list[int], size: int) -> int:
    at = 0
    for v in sorted(live, key=lambda v: offsets[v]):
        if offsets[v] - at >= size:
            break
        at = max(at, offsets[v] + sizes[v])
    return at


def compile_graph(graph: Graph, max_rows: int, max_out_rows: int = 1) -> Program:
    offsets, scratch_bytes = plan_buffers(graph, max_rows, max_out_rows)
    assert graph.logits is not None
    out = bytearray(MAGIC)
    out += struct.pack(
        "<8IQ",
        len(graph.values),
        len(graph.weights),
        len(graph.states),
        len(graph.nodes),
        max_rows,
        max_out_rows,
        graph.logits.index,
        NO_VALUE if graph.log_probs is None else graph.log_probs.index,
        scratch_bytes,
    )
    for v in graph.values:
        out += struct.pack("<IIQQ", v.shape.kind, v.shape.extent, v.shape.width, offsets[v.index])
    for w in graph.weights:
        out += struct.pack("<4I", ROLES[w.role], w.dtype, w.rows, w.cols)
    for s in graph.states:
        out += struct.pack("<4I", STATES[s.kind], s.num_heads, s.head_dim, 0)
    for node in graph.nodes:
        spec = OPS[node.op]
        states = [node.state] if node.state else []
        groups = [[x.index for x in g] for g in (node.inputs, node.weights, states, node.outputs)]
        out += struct.pack("<6I", spec.code, *(len(g) for g in groups), len(spec.attrs))
        for indices in groups:
            out += struct.pack(f"<{len(indices)}I", *indices)
        out += b"\0" * (-len(out) % 8)
        for name, kind in spec.attrs.items():
            out += struct.pack("<d" if kind is float else "<q", kind(node.attrs[name]))
    return Program(bytes(out), scratch_bytes, max_rows, max_out_rows)
