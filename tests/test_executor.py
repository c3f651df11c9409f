"""The native executor against the oracle (headrace/reference.py), op by op, then its manners.

That every way to cut a pass gives the same bits is tested in tests/cpp/executor_test.cc; here the
values are right.
"""

import gc
import signal
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from checkpoints import decode, encode

from headrace import _core
from headrace.errors import HeadraceError
from headrace.formats.checkpoint import DType, EmbeddingTable, LayerExperts, TensorInfo
from headrace.graph import Graph
from headrace.program import compile_graph
from headrace.reference import Reference, ReferenceSession

ALL_TYPES = list(DType)


class SmallModel:
    """A graph with random weights in one file; run() and expected() compute it."""

    def __init__(self, tmp_path, width: int, vocab: int = 40, table: DType = DType.F32):
        self.graph, self.rng = Graph(), np.random.default_rng(5)
        self.path = tmp_path / "weights"
        self.path.write_bytes(b"")
        self.tensors, self.layers, self.vocab = {}, [], vocab
        _, offset, nbytes = self.append((vocab, width), table)
        stride = nbytes // vocab
        self.embedding = EmbeddingTable(table, vocab, width, 0, offset, stride)
        self.config = SimpleNamespace(hidden_size=width)
        self.x = self.graph.embed(self.graph.table("table", table, vocab, width))

    def append(self, shape, dtype, scale=1.0):
        values = self.rng.standard_normal(shape).astype(np.float32) * np.float32(scale)
        data = encode(values, dtype.name)
        offset = self.path.stat().st_size
        with self.path.open("ab") as f:
            f.write(data.tobytes())
        return decode(data, dtype.name) if dtype != DType.F32 else values, offset, data.nbytes

    def tensor(self, name, shape, dtype, scale=1.0):
        _, offset, nbytes = self.append(shape, dtype, scale)
        self.tensors[name] = TensorInfo(name, dtype, shape, 0, offset, nbytes)

    def matrix(self, rows, cols, dtype=DType.F32):
        name = f"matrix{len(self.tensors)}"
        self.tensor(name, (rows, cols), dtype, 1 / np.sqrt(cols))
        return self.graph.matrix(name, dtype, rows, cols)

    def vector(self, cols):
        name = f"vector{len(self.tensors)}"
        self.tensor(name, (cols,), DType.F32)
        return self.graph.vector(name, cols)

    def experts(self, x, types, num_experts=8, top_k=3, width=64, route_capacity=1000):
        hidden = x.shape.width
        parts = [(t, width, hidden) if i < 2 else (t, hidden, width) for i, t in enumerate(types)]
        offset = np.zeros((num_experts, 3), np.uint64)
        for e in range(num_experts):
            for i, (dtype, rows, cols) in enumerate(parts):
                offset[e, i] = self.append((rows, cols), dtype, 1 / np.sqrt(cols))[1]
        layer = len(self.layers)
        file = np.zeros((num_experts, 3), np.uint32)
        self.layers.append(LayerExperts(tuple(parts), num_experts, file, offset))
        logits = self.graph.linear(x, self.matrix(num_experts, hidden))
        ids, weights = self.graph.route(logits, layer=layer, top_k=top_k, scoring=0, normalize=1, scaling=1.5)
        return self.graph.experts(
            x,
            ids,
            weights,
            types[0],
            layer=layer,
            num_experts=num_experts,
            moe_intermediate_size=width,
            route_capacity=route_capacity,
        )

    def finish(self, y):
        self.graph.logits = self.graph.select_rows(y)
        return self

    def executor(self, max_rows=16, num_threads=2):
        program = _core.Program(compile_graph(self.graph, max_rows, max_rows).data)
        weights = _core.Weights(program)
        path = str(self.path)
        for w in self.graph.weights:
            if w.role == "table":
                weights.set_table(w.index, path, self.embedding.offset, self.embedding.stride_bytes)
            else:
                t = self.tensors[w.name]
                weights.load(w.index, w.name, path, t.offset, t.nbytes, int(t.dtype))
        memory = None
        if self.layers:
            source = _core.ExpertSource([path], self.layers)
            memory = _core.ExpertMemory(source, source.total_bytes())
        return program, _core.Executor(program, weights, memory, num_threads)

    def run(self, tokens, out_rows, split=None, kv_dtype=DType.F16):
        """Logits of out_rows; split: the tokens before it go in a pass of their own."""
        program, executor = self.executor()
        state = _core.SessionState(program, 64, int(kv_dtype))
        if split:
            run_pass(executor, state, tokens[:split], [])
            tokens, out_rows = tokens[split:], [r - split for r in out_rows]
        return run_pass(executor, state, tokens, out_rows)

    def expected(self, tokens, out_rows, kv_dtype=DType.F16, int8=True, targets=None):
        checkpoint = SimpleNamespace(
            files=[self.path],
            tensors=self.tensors,
            embedding=self.embedding,
            experts=self.layers,
            config=self.config,
        )
        reference = Reference(self.graph, checkpoint, {}, int8=int8)
        kv = np.float16 if kv_dtype == DType.F16 else np.float32
        return reference.run(ReferenceSession(self.graph, kv), tokens, out_rows, targets=targets)

    def check(self, rtol=2e-5, tokens=(3, 9, 3, 0, 39, 12), out_rows=(0, 2, 4, 5), **kwargs):
        got = self.run(list(tokens), list(out_rows), **kwargs)
        kwargs.pop("split", None)
        expected = self.expected(list(tokens), list(out_rows), **kwargs)
        assert expected.std() > 0.05
        np.testing.assert_allclose(got, expected, rtol=rtol, atol=rtol * np.abs(expected).max())


def run_pass(executor, state, tokens, out_rows, cancel=None):
    logits = np.full((len(out_rows), executor.vocab_size), np.nan, np.float32)
    executor.run(
        np.array(tokens, np.int32),
        np.zeros(len(tokens), np.uint32),
        [state],
        np.array(out_rows, np.uint32),
        logits,
        cancel,
    )
    return logits


# ---- op by op


@pytest.mark.parametrize("dtype", ALL_TYPES)
def test_embed(tmp_path, dtype):
    m = SmallModel(tmp_path, 96, table=dtype)
    m.finish(m.x).check(rtol=0)


@pytest.mark.parametrize("group", [60, 12, 1])
def test_rms_norm(tmp_path, group):
    m = SmallModel(tmp_path, 60)
    m.finish(m.graph.rms_norm(m.x, m.vector(group), group=group, eps=0.3)).check()


@pytest.mark.parametrize("dtype", ALL_TYPES)
@pytest.mark.parametrize("rows", [1, 16, 77])
def test_linear(tmp_path, dtype, rows):
    m = SmallModel(tmp_path, 96)
    m.finish(m.graph.linear(m.x, m.matrix(rows, 96, dtype))).check()


def test_int8_activations_are_near_the_floats_they_stand_for(tmp_path):
    m = SmallModel(tmp_path, 256)
    m.finish(m.graph.linear(m.x, m.matrix(64, 256, DType.Q8_0)))
    got, meant = m.run([1, 2], [0, 1]), m.expected([1, 2], [0, 1], int8=False)
    assert 0 < np.abs(got - meant).max() < 0.03 * meant.std()


@pytest.mark.parametrize("style", [0, 1])
@pytest.mark.parametrize("rotary", [16, 10, 2])
def test_rope(tmp_path, style, rotary):
    m = SmallModel(tmp_path, 64)
    angles = m.graph.rope_angles(m.vector(rotary // 2))
    y = m.graph.rope(m.x, angles, head_dim=16, style=style)
    # x is read again, so it is not rotated in place.
    m.finish(m.graph.add(m.x, y)).check(split=2, out_rows=[2, 4, 5])


@pytest.mark.parametrize("kv_dtype", [DType.F16, DType.F32])
@pytest.mark.parametrize("window", [0, 1, 4])
def test_attention(tmp_path, kv_dtype, window):
    m = SmallModel(tmp_path, 72)
    g = m.graph
    q, k, v = (g.linear(m.x, m.matrix(n, 72)) for n in (6 * 12, 2 * 12, 2 * 12))
    attrs = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 12}
    y = g.attention(q, k, v, g.state("kv", 2, 12), **attrs, window=window, scale=0.4)
    tokens = [7, 1, 30, 7, 7, 2, 18, 5, 5, 11]
    # A key on the edge between two float16 may go to the other one.
    rtol = 1e-3 if kv_dtype == DType.F16 else 2e-5
    m.finish(y).check(rtol, tokens, [3, 4, 9], split=3, kv_dtype=kv_dtype)


@pytest.mark.parametrize("normalize", [0, 1])
def test_route(tmp_path, normalize):
    m = SmallModel(tmp_path, 48)
    logits = m.graph.linear(m.x, m.matrix(10, 48))
    _, weights = m.graph.route(logits, layer=0, top_k=4, scoring=0, normalize=normalize, scaling=2.0)
    m.finish(weights).check()


@pytest.mark.parametrize("route_capacity", [1, 4, 1000])
@pytest.mark.parametrize(
    "types",
    [
        (DType.F32, DType.F32, DType.F32),
        (DType.F16, DType.BF16, DType.Q8_0),
        (DType.Q4_0, DType.Q8_0, DType.F16),
        (DType.Q4_0, DType.Q4_0, DType.Q4_0),
    ],
)
def test_experts(tmp_path, types, route_capacity):
    m = SmallModel(tmp_path, 64)
    m.finish(m.experts(m.x, types, route_capacity=route_capacity))
    # Between up and down, a product on the edge between two int8 may go to the other one.
    m.check(rtol=5e-3 if types[2].is_quantized else 2e-5)


@pytest.mark.parametrize("dtype", ALL_TYPES)
@pytest.mark.parametrize("vocab", [1, 40, 256, 600])
def test_output(tmp_path, dtype, vocab):
    m = SmallModel(tmp_path, 64)
    m.graph.output(m.graph.select_rows(m.x), m.matrix(vocab, 64, dtype))
    m.check()
    tokens, out_rows = [3, 9, 3, 0, 39, 12], [0, 2, 4, 5]
    targets = [0, vocab - 1, vocab // 2, vocab // 3]
    program, executor = m.executor()
    state = _core.SessionState(program, 64)
    got = np.full(len(targets), np.nan, np.float32)
    executor.run(
        np.array(tokens, np.int32),
        np.zeros(len(tokens), np.uint32),
        [state],
        np.array(out_rows, np.uint32),
        None,
        targets=np.array(targets, np.int32),
        log_probs=got,
    )
    np.testing.assert_allclose(got, m.expected(tokens, out_rows, targets=targets)[:, 0], rtol=2e-5, atol=1e-5)
    assert (got <= 0).all() and (vocab > 1 or (got == 0).all())


def test_two_layers_of_everything(tmp_path):
    m = SmallModel(tmp_path, 64, table=DType.Q8_0)
    g, x = m.graph, m.x
    angles = g.rope_angles(m.vector(8))
    attrs = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "window": 0}
    for _ in range(2):
        h = g.rms_norm(x, m.vector(64), group=64, eps=1e-5)
        q, k, v = (g.linear(h, m.matrix(n, 64, DType.BF16)) for n in (64, 32, 32))
        q, k = (g.rope(y, angles, head_dim=16) for y in (q, k))
        x = g.add(x, g.attention(q, k, v, g.state("kv", 2, 16), **attrs, scale=0.25))
        h = g.rms_norm(x, m.vector(64), group=64, eps=1e-5)
        x = g.add(x, m.experts(h, (DType.F16,) * 3))
    m.finish(g.linear(x, m.matrix(50, 64))).check(1e-4, split=4, out_rows=[4, 5], kv_dtype=DType.F32)


# ---- manners


@pytest.fixture
def attention_model(tmp_path):
    m = SmallModel(tmp_path, 32)
    attrs = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "window": 0}
    y = m.graph.attention(m.x, m.x, m.x, m.graph.state("kv", 2, 16), **attrs, scale=0.25)
    return m.finish(y)


def test_sizes_are_told(attention_model):
    program, executor = attention_model.executor(max_rows=7, num_threads=3)
    assert (program.max_rows, program.max_out_rows, program.vocab_size) == (7, 7, 32)
    assert executor.num_threads == 3
    assert _core.SessionState.bytes(program, 1000, 1) == -(-2 * 2 * 1000 * 32 // 4096) * 4096
    state = _core.SessionState(program, 9)
    run_pass(executor, state, [1, 2, 3], [])
    assert (state.length, state.capacity) == (3, 9)
    state.rollback(1)
    assert state.length == 1
    assert executor.op_seconds["attention"] > 0 and executor.op_seconds["route"] == 0


@pytest.mark.parametrize("cut", [1, 9, 100, -1])
def test_a_damaged_program_is_refused(attention_model, cut):
    data = compile_graph(attention_model.graph, 4).data
    with pytest.raises(HeadraceError, match=r"^program: "):
        _core.Program(data[:cut])


def test_arrays_of_the_wrong_kind_are_refused(attention_model):
    program, executor = attention_model.executor()
    state = _core.SessionState(program, 9)
    tokens, zeros = np.array([1, 2], np.int32), np.zeros(2, np.uint32)
    rows, logits = np.array([1], np.uint32), np.zeros((1, 32), np.float32)
    for args in [
        (tokens.astype(np.int64), zeros, [state], rows, logits),
        (tokens, zeros, [state], rows, logits.astype(np.float64)),
        (tokens, zeros, [state], rows, np.zeros((1, 64), np.float32)[:, ::2]),
    ]:
        with pytest.raises(TypeError):
            executor.run(*args)
    for args, message in [
        ((tokens, zeros, [state], rows, np.zeros((1, 31), np.float32)), r"expected \[1, 32\]"),
        ((tokens, zeros[:1], [state], rows, logits), "1 sequences for 2 rows"),
        ((tokens, zeros + 1, [state], rows, logits), "sequence 1"),
        ((tokens, zeros, [state], rows + 1, logits), "output row 2"),
        ((tokens, zeros, [None], rows, logits), "state 0 is of another model"),
        ((tokens + 39, zeros, [state], rows, logits), "token 40"),
        ((tokens, zeros, [state], rows, None), "room for logits, or targets"),
    ]:
        with pytest.raises(HeadraceError, match=message):
            executor.run(*args)
    assert state.length == 0


def test_an_executor_keeps_what_it_needs(tmp_path):
    m = SmallModel(tmp_path, 64)
    m.finish(m.experts(m.x, (DType.Q4_0,) * 3))
    program, executor = m.executor()
    state = _core.SessionState(program, 9)
    first = run_pass(executor, state, [1, 2], [1])
    del program
    gc.collect()
    state.rollback(0)
    assert np.array_equal(first, run_pass(executor, state, [1, 2], [1]))


def test_two_threads_share_an_executor(attention_model):
    program, executor = attention_model.executor()
    expected = run_pass(executor, _core.SessionState(program, 50), list(range(16)), [15])
    results = []

    def work():
        for _ in range(20):
            state = _core.SessionState(program, 50)
            results.append(run_pass(executor, state, list(range(16)), [15]))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(results) == 60 and all(np.array_equal(r, expected) for r in results)


# ---- stopping


@pytest.fixture
def long_pass(tmp_path):
    """A pass of some seconds: 150 products of 1024 x 1024 for 512 rows."""
    m = SmallModel(tmp_path, 1024)
    y, w = m.x, m.matrix(1024, 1024)
    for _ in range(150):
        y = m.graph.linear(y, w)
    return m.finish(y).executor(max_rows=512)


def test_a_cancelled_pass_leaves_its_state_as_it_was(long_pass):
    program, executor = long_pass
    state, flag = _core.SessionState(program, 512), _core.CancelFlag()
    run_pass(executor, state, [1], [0])
    seen = []

    def stop():
        seen.append(executor.op_seconds["linear"])  # never waits for the pass
        flag.set()

    threading.Timer(0.05, stop).start()
    with pytest.raises(HeadraceError, match=r"^cancelled$"):
        run_pass(executor, state, [2] * 400, [399], cancel=flag)
    assert flag.is_set and seen[0] > 0 and state.length == 1
    flag.clear()
    run_pass(executor, state, [2], [0], cancel=flag)
    assert state.length == 2


def test_a_signal_ends_a_pass(long_pass):
    program, executor = long_pass
    state = _core.SessionState(program, 512)

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            run_pass(executor, state, [2] * 500, [499])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert state.length == 0
    run_pass(executor, state, [2], [0])
    assert state.length == 1
