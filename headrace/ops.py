"""The op table: what the graph builder, the NumPy oracle and the C++ executor all hold to.

Each op names its inputs (values), weights, states, attributes and outputs, and gives the shape of its outputs.
`python -m headrace.ops` prints csrc/executor/op_table.h from this table; a test keeps the two equal.

A value is a table of rows. Its extent says how many: ROWS, one per row of the pass; OUT_ROWS, one per row of which
something was asked for; LOGIT_ROWS, the same where that is logits, none where it is the probability of a target. Its
kind says what a row holds: `width` float32, `width` int32, or `width` numbers quantized to int8 in blocks of 32
(csrc/kernels/dtype.h, q8_row_bytes). BYTES is an op's workspace.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any


class Kind(IntEnum):
    F32 = 0
    I32 = 1
    Q8 = 2
    BYTES = 3


class Extent(IntEnum):
    ROWS = 0
    OUT_ROWS = 1
    NONE = 2  # workspace: `width` bytes in all
    LOGIT_ROWS = 3


def q8_row_bytes(width: int) -> int:
    """int8 values, then a float32 scale and an int32 sum per block of 32."""
    return width + width // 32 * 8


def row_bytes(kind: Kind, width: int) -> int:
    return q8_row_bytes(width) if kind == Kind.Q8 else 4 * width


@dataclass(frozen=True)
class Shape:
    kind: Kind
    width: int
    extent: Extent = Extent.ROWS


# Given input shapes, (rows, cols) of weights, and attributes, returns the outputs' shapes. A workspace comes last.
ShapeRule = Callable[[list[Shape], list[tuple[int, int]], dict[str, Any]], list[Shape]]


@dataclass(frozen=True)
class Op:
    """One line of the table. attrs: name -> int or float. state: the state kind that the op keeps, or None.

    in_place: the first output may share the first input's memory.
    """

    code: int
    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: dict[str, type]
    shape: ShapeRule
    state: str | None = None
    in_place: bool = False


def _same_as_first(ins, weights, attrs):
    return [ins[0]]


def _experts_shape(ins, weights, attrs):
    hidden, width, capacity = ins[0].width, attrs["moe_intermediate_size"], attrs["route_capacity"]
    # Per route: gate and up as floats, their product quantized, and the expert's output.
    workspace = capacity * (2 * 4 * width + q8_row_bytes(width) + 4 * hidden)
    return [Shape(Kind.F32, hidden, ins[0].extent), Shape(Kind.BYTES, workspace, Extent.NONE)]


OPS: dict[str, Op] = {
    # Rows of the embedding table, read from its file.
    "embed": Op(0, (), ("table",), ("y",), {}, lambda i, w, a: [Shape(Kind.F32, w[0][1])]),
    # Over groups of `group` elements (the whole row, or a head).
    "rms_norm": Op(1, ("x",), ("weight",), ("y",), {"group": int, "eps": float}, _same_as_first, in_place=True),
    "quantize": Op(2, ("x",), (), ("y",), {}, lambda i, w, a: [Shape(Kind.Q8, i[0].width, i[0].extent)]),
    # y = W x. x is Q8 if W's type is quantized, else F32.
    "linear": Op(3, ("x",), ("weight",), ("y",), {}, lambda i, w, a: [Shape(Kind.F32, w[0][0], i[0].extent)]),
    # Row: cos then sin of position * inv_freq. Once per pass, shared by all layers.
    "rope_angles": Op(4, (), ("inv_freq",), ("y",), {}, lambda i, w, a: [Shape(Kind.F32, 2 * w[0][1])]),
    "rope": Op(
        5,
        ("x", "angles"),
        (),
        ("y",),
        {"head_dim": int, "style": int},
        _same_as_first,
        in_place=True,
    ),
    # Stores the rows' k and v in the state, then attends to positions 0..own (the last `window` if not 0).
    "attention": Op(
        6,
        ("q", "k", "v"),
        (),
        ("y",),
        {
            "num_attention_heads": int,
            "num_key_value_heads": int,
            "head_dim": int,
            "window": int,
            "scale": float,
        },
        _same_as_first,
        in_place=True,
        state="kv",
    ),
    "add": Op(7, ("a", "b"), (), ("y",), {}, _same_as_first, in_place=True),
    # Ids ascend within a row. scoring: 0 softmax over all experts. layer: among the layers that route, from 0.
    # Where the pass brings routes, these replace the choice, each with weight scaling / top_k.
    "route": Op(
        8,
        ("logits",),
        (),
        ("ids", "weights"),
        {"layer": int, "top_k": int, "scoring": int, "normalize": int, "scaling": float},
        lambda i, w, a: [
            Shape(Kind.I32, a["top_k"], i[0].extent),
            Shape(Kind.F32, a["top_k"], i[0].extent),
        ],
    ),
    # Weighted sum of the routed experts' SwiGLU, in ascending expert id. Its weights are the slots of `layer`.
    "experts": Op(
        9,
        ("x", "ids", "weights"),
        (),
        ("y", "workspace"),
        {"layer": int, "num_experts": int, "moe_intermediate_size": int, "route_capacity": int},
        _experts_shape,
    ),
    # Keeps the rows of which something was asked for.
    "select_rows": Op(
        10,
        ("x",),
        (),
        ("y",),
        {},
        lambda i, w, a: [Shape(i[0].kind, i[0].width, Extent.OUT_ROWS)],
    ),
    # The model's end: W x as logits, or, in a pass that brings a target token for each row, log softmax(W x)[target];
    # then no row's logits exist whole.
    "output": Op(
        11,
        ("x",),
        ("weight",),
        ("logits", "log_probs"),
        {},
        lambda i, w, a: [Shape(Kind.F32, w[0][0], Extent.LOGIT_ROWS), Shape(Kind.F32, 1, Extent.OUT_ROWS)],
    ),
}

STATES = {"kv": 0}


def cpp_header() -> str:
    """The table as csrc/executor/op_table.h."""
    lines = [
        "// Printed by `python -m headrace.ops` from headrace/ops.py. Do not edit.",
        "// clang-format off",
        "#pragma once",
        "",
        "#include <cstdint>",
        "",
        "namespace headrace {",
        "",
        "enum class ValueKind : uint32_t { " + ", ".join(f"k{k.name.title()} = {k.value}" for k in Kind) + " };",
        "enum class Extent : uint32_t { " + ", ".join(f"k{_camel(e.name)} = {e.value}" for e in Extent) + " };",
        "enum class StateKind : uint32_t { " + ", ".join(f"k{_camel(s)} = {c}" for s, c in STATES.items()) + " };",
        "",
        "enum class OpCode : uint32_t {",
        *(f"  k{_camel(name)} = {op.code}," for name, op in OPS.items()),
        "};",
        "",
        "// Indices of each op's attributes in the program's attribute list.",
        *(
            f"namespace attr_{name} {{ enum : uint32_t {{ " + ", ".join(f"k{_camel(a)}" for a in op.attrs) + " }; }"
            for name, op in OPS.items()
            if op.attrs
        ),
        "",
        "struct OpSpec {",
        "  const char* name;",
        "  uint32_t num_inputs, num_weights, num_states, num_outputs, num_attrs;",
        '  const char* attr_types;  // one of "i" (int64) and "d" (double) per attribute',
        "};",
        "",
        f"constexpr uint32_t kNumOps = {len(OPS)};",
        "constexpr OpSpec kOps[kNumOps] = {",
        *(
            f'    {{"{name}", {len(op.inputs)}, {len(op.weights)}, {int(op.state is not None)}, '
            f'{len(op.outputs)}, {len(op.attrs)}, "{_attr_types(op)}"}},'
            for name, op in OPS.items()
        ),
        "};",
        "",
        "}  // namespace headrace",
    ]
    return "\n".join(lines) + "\n"


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def _attr_types(op: Op) -> str:
    return "".join("d" if t is float else "i" for t in op.attrs.values())


if __name__ == "__main__":
    print(cpp_header(), end="")
