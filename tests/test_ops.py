"""The op table, the C++ header printed from it, and the compiler's buffer plan."""

from pathlib import Path

import pytest

from headrace.errors import HeadraceError
from headrace.formats.checkpoint import DType
from headrace.graph import Graph
from headrace.ops import OPS, Extent, cpp_header
from headrace.program import compile_graph, plan_buffers, value_bytes

ROOT = Path(__file__).parent.parent


def test_cpp_header_is_the_table():
    header = (ROOT / "csrc/executor/op_table.h").read_text()
    assert header == cpp_header(), "run: python -m headrace.ops > csrc/executor/op_table.h"


def test_codes_are_dense_and_unique():
    assert sorted(op.code for op in OPS.values()) == list(range(len(OPS)))


def residual_graph(layers: int, width: int = 64, dtype: DType = DType.Q4_0) -> Graph:
    g = Graph()
    x = g.embed(g.table("token_embd.weight", dtype, 96, width))
    for i in range(layers):
        h = g.rms_norm(x, g.vector(f"norm{i}", width), group=width, eps=1e-6)
        a = g.linear(h, g.matrix(f"a{i}", dtype, 3 * width, width))
        b = g.linear(h, g.matrix(f"b{i}", dtype, 3 * width, width))
        h = g.linear(g.add(a, b), g.matrix(f"c{i}", dtype, width, 3 * width))
        x = g.add(x, h)
    g.logits = g.linear(g.select_rows(x), g.matrix("output.weight", dtype, 96, width))
    return g


def live_ranges(graph: Graph) -> dict[int, tuple[int, int]]:
    born, dies = {}, {}
    for i, node in enumerate(graph.nodes):
        for v in node.inputs:
            dies[v.index] = i
        for v in node.outputs:
            born[v.index] = dies[v.index] = i
    dies[graph.logits.index] = len(graph.nodes)
    return {v: (born[v], dies[v]) for v in born}


@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize("dtype", [DType.Q4_0, DType.F32])
def test_live_values_never_share_memory(rows, dtype):
    graph = residual_graph(4, dtype=dtype)
    offsets, scratch_bytes = plan_buffers(graph, rows, 1)
    ranges = live_ranges(graph)
    spans = {v.index: (offsets[v.index], offsets[v.index] + value_bytes(v, rows, 1)) for v in graph.values}
    in_place = {(node.inputs[0].index, node.outputs[0].index) for node in graph.nodes if OPS[node.op].in_place}
    for a, (a_born, a_dies) in ranges.items():
        assert offsets[a] % 64 == 0 and spans[a][1] <= scratch_bytes
        for b, (b_born, _) in ranges.items():
            # b is written at b_born, while a is still needed.
            if a != b and a_born <= b_born <= a_dies:
                if a_dies == b_born and (a, b) in in_place:
                    continue
                apart = spans[a][1] <= spans[b][0] or spans[b][1] <= spans[a][0]
                assert apart, (a, b)


def test_memory_is_reused_between_layers():
    one, many = (plan_buffers(residual_graph(n), 16, 1)[1] for n in (1, 12))
    assert many == one


def test_quantize_is_shared_by_all_readers_of_a_value():
    graph = residual_graph(1)
    assert [n.op for n in graph.nodes].count("quantize") == 3  # h, a + b, the selected row
    assert "quantize" not in [n.op for n in residual_graph(1, dtype=DType.BF16).nodes]


def test_select_rows_changes_the_extent_of_all_that_follows():
    graph = residual_graph(1)
    at = [n.op for n in graph.nodes].index("select_rows")
    assert {v.shape.extent for n in graph.nodes[:at] for v in n.outputs} == {Extent.ROWS}
    assert {v.shape.extent for n in graph.nodes[at:] for v in n.outputs} == {Extent.OUT_ROWS}


def test_program_size_is_what_its_header_says():
    graph = residual_graph(2)
    program = compile_graph(graph, 32)
    assert program.data[:8] == b"HRPROG1\0" and len(program.data) % 8 == 0
    assert program.scratch_bytes == plan_buffers(graph, 32, 1)[1]


def test_wrong_shapes_are_refused_by_the_builder():
    g = Graph()
    x = g.embed(g.table("t", DType.F32, 10, 64))
    with pytest.raises(HeadraceError, match="input width 64, expected 32"):
        g.linear(x, g.matrix("w", DType.F32, 8, 32))
    with pytest.raises(HeadraceError, match="weight length 48"):
        g.rms_norm(x, g.vector("n", 48), group=64, eps=1e-5)
    with pytest.raises(TypeError):
        g._add("rope", (x, x), attrs={"head_dim": 16})
