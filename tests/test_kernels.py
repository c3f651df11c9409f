"""The kernels against NumPy and gguf-py. That instruction sets agree bit for bit is tested in
tests/cpp/kernels_test.cc; here each of them is right."""

import os
import subprocess
import sys

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize, quantize

from headrace import _core
from headrace.errors import HeadraceError

K = _core.kernels
F32, F16, Q4_0, Q8_0, BF16 = 0, 1, 2, 8, 30
ALL_TYPES = [F32, F16, BF16, Q4_0, Q8_0]
QUANTIZED = [Q4_0, Q8_0]
ISAS = K.isas()

per_isa = pytest.mark.parametrize("isa", ISAS)
per_type = pytest.mark.parametrize("dtype", ALL_TYPES)


def file_rows(values: np.ndarray, dtype: int) -> np.ndarray:
    """float32 [rows, cols] as the bytes of a GGUF tensor: uint8 [rows, row_bytes]."""
    if dtype == F32:
        return np.ascontiguousarray(values).view(np.uint8)
    return np.ascontiguousarray(quantize(values, gguf.GGMLQuantizationType(dtype))).view(np.uint8)


def packed(rows: np.ndarray, dtype: int, cols: int) -> np.ndarray:
    num_rows = rows.shape[0]
    out = np.full(_core.matrix_bytes(dtype, num_rows, cols), 0xA5, np.uint8)
    _core.pack_rows(dtype, num_rows, cols, 0, rows.reshape(-1), out)
    return out


def dequantized(rows: np.ndarray, dtype: int) -> np.ndarray:
    if dtype == F32:
        return rows.view(np.float32)
    kind = gguf.GGMLQuantizationType(dtype)
    return dequantize(rows.view(np.float16) if dtype == F16 else rows, kind)


def split_q8(rows: np.ndarray, cols: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q [n, cols] int8, d [n, cols/32] float32, sums [n, cols/32] int32."""
    q = np.ascontiguousarray(rows[:, :cols]).view(np.int8)
    d = np.ascontiguousarray(rows[:, cols : cols + cols // 8]).view(np.float32)
    sums = np.ascontiguousarray(rows[:, cols + cols // 8 :]).view(np.int32)
    return q, d, sums


@pytest.fixture
def rng():
    return np.random.default_rng(11)


@per_type
@pytest.mark.parametrize("shape", [(1, 32), (16, 64), (37, 96), (50, 160)])
def test_packed_weights_are_exactly_what_gguf_dequantizes(dtype, shape, rng):
    num_rows, cols = shape
    rows = file_rows(rng.standard_normal(shape).astype(np.float32), dtype)
    assert rows.shape[1] == _core.row_bytes(dtype, cols)
    tiles = packed(rows, dtype, cols)
    unpacked = [_core.unpack_row(dtype, num_rows, cols, r, tiles) for r in range(num_rows)]
    assert np.array_equal(np.stack(unpacked), rows)
    got = _core.dequantize_rows(dtype, cols, np.concatenate(unpacked))
    assert got.dtype == np.float32
    assert np.array_equal(got.view(np.uint32), dequantized(rows, dtype).view(np.uint32))


@pytest.mark.parametrize("dtype", [F16, Q4_0, Q8_0])
def test_every_half_is_read_as_numpy_reads_it(dtype):
    halves = np.arange(65536, dtype=np.uint16)
    halves = halves[~np.isnan(halves.view(np.float16))]
    if dtype == F16:
        got = _core.dequantize_rows(F16, 1, halves.view(np.uint8)).reshape(-1)
        assert np.array_equal(got.view(np.uint32), halves.view(np.float16).astype(np.float32).view(np.uint32))
        return
    rows = np.zeros((halves.size, _core.row_bytes(dtype, 32)), np.uint8)
    rows[:, :2] = halves.view(np.uint8).reshape(-1, 2)
    rows[:, 2] = 0x01 if dtype == Q8_0 else 0x09  # value 1 in both
    got = _core.dequantize_rows(dtype, 32, rows.reshape(-1))[:, 0]
    assert np.array_equal(got, halves.view(np.float16).astype(np.float32))


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_float_types_take_any_number_of_columns(dtype, rng):
    rows = rng.integers(0, 256, (21, 5 * (4 if dtype == F32 else 2)), dtype=np.uint8)
    tiles = packed(rows, dtype, 5)
    for r in range(21):
        assert np.array_equal(_core.unpack_row(dtype, 21, 5, r, tiles), rows[r])


def test_sizes_and_types_are_checked():
    src, dst = np.zeros(16 * 18, np.uint8), np.zeros(16 * 18, np.uint8)
    _core.pack_rows(Q4_0, 16, 32, 0, src, dst)
    bad = [
        (7, 16, 32, 0, src, dst),  # no such type
        (Q4_0, 16, 31, 0, src, dst),  # part of a block
        (Q4_0, 16, 32, 0, src[:-1], dst),  # part of a row
        (Q4_0, 16, 32, 0, src, dst[:-1]),
        (Q4_0, 16, 32, 0, src[:18], dst),  # ends inside a tile
        (Q4_0, 16, 32, 8, src, dst),
        (Q4_0, 16, 32, 16, src, dst),  # beyond the end
        (Q4_0, 16, 0, 0, src, dst[:0]),
    ]
    for arguments in bad:
        with pytest.raises(HeadraceError, match="expected"):
            _core.pack_rows(*arguments)
    with pytest.raises(HeadraceError, match="row: expected"):
        _core.unpack_row(Q4_0, 16, 32, 16, dst)
    with pytest.raises(HeadraceError, match="dtype: expected"):
        _core.row_bytes(12, 256)
    with pytest.raises(TypeError):
        _core.pack_rows(Q4_0, 16, 32, 0, src.astype(np.int32), dst)


def test_crc32c():
    assert _core.crc32c(b"123456789") == 0xE3069283
    data = np.frombuffer(b"123456789" * 1000, np.uint8)
    assert _core.crc32c(data[4000:], _core.crc32c(data[:4000])) == _core.crc32c(data.tobytes())


@per_isa
@pytest.mark.parametrize("cols", [32, 256, 96])
def test_quantize_is_numpy_rint(isa, cols, rng):
    x = (rng.standard_normal((7, cols)) * 10.0 ** rng.integers(-6, 6, (7, 1))).astype(np.float32)
    x[0] = 0
    x[1, :32] = np.resize([0.5, 1.5, 2.5, -0.5, 127.0], 32)  # exact ties
    q, d, sums = split_q8(K.quantize(isa, x), cols)
    blocks = x.reshape(7, -1, 32)
    largest = np.abs(blocks).max(axis=2)
    with np.errstate(divide="ignore"):
        inverse = np.where(largest > 0, np.float32(127) / largest, np.float32(0))
    want = np.rint(blocks * inverse[:, :, None]).astype(np.int32)
    assert np.array_equal(q.reshape(want.shape), want)
    assert np.array_equal(d, largest / np.float32(127))
    assert np.array_equal(sums, want.sum(axis=2))


@per_isa
@per_type
@pytest.mark.parametrize("shape", [(1, 32), (16, 64), (53, 288)])
def test_matmul(isa, dtype, shape, rng):
    """Against float64. The error is that of float32 sums: 2e-6 of the sum of magnitudes."""
    num_rows, cols = shape
    rows = file_rows(rng.standard_normal(shape).astype(np.float32), dtype)
    w = dequantized(rows, dtype).astype(np.float64)
    x = rng.standard_normal((11, cols)).astype(np.float32)
    if dtype in QUANTIZED:
        activations = K.quantize(isa, x)
        q, d, _ = split_q8(activations, cols)
        x64 = q.astype(np.float64) * np.repeat(d, 32, axis=1)
    else:
        activations = x
        x64 = x.astype(np.float64)
    y = K.matmul(isa, dtype, num_rows, cols, packed(rows, dtype, cols), activations)
    assert y.shape == (11, num_rows)
    assert np.all(np.abs(y - x64 @ w.T) <= 2e-6 * (np.abs(x64) @ np.abs(w).T))


@per_isa
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_quantized_matmul_is_exact_within_a_block(isa, dtype, rng):
    """One block: exact integers, then one rounding of d_w * d_x and one of the product."""
    rows = file_rows(rng.standard_normal((20, 32)).astype(np.float32), dtype)
    d_w = np.ascontiguousarray(rows[:, :2]).view(np.float16).astype(np.float32)
    activations = K.quantize(isa, rng.standard_normal((3, 32)).astype(np.float32))
    q, d, _ = split_q8(activations, 32)
    if dtype == Q8_0:
        q_w = rows[:, 2:].view(np.int8).astype(np.int32)
    else:
        q_w = np.concatenate([rows[:, 2:] & 15, rows[:, 2:] >> 4], axis=1).astype(np.int32) - 8
    want = (q.astype(np.int32) @ q_w.T).astype(np.float32) * (d * d_w.T)
    assert np.array_equal(K.matmul(isa, dtype, 20, 32, packed(rows, dtype, 32), activations), want)


@per_isa
@pytest.mark.parametrize(("width", "group"), [(2048, 2048), (512, 128), (39, 13)])
def test_rms_norm(isa, width, group, rng):
    """Relative error under 1e-6 against float64."""
    x, w = (rng.standard_normal(n).astype(np.float32) for n in (width, group))
    y = K.rms_norm(isa, x, w, 1e-5)
    x64 = x.astype(np.float64).reshape(-1, group)
    want = x64 / np.sqrt((x64**2).mean(axis=1, keepdims=True) + np.float32(1e-5)) * w
    np.testing.assert_allclose(y.reshape(want.shape), want, rtol=1e-6)


@per_isa
def test_add_and_accumulate(isa, rng):
    a, b = rng.standard_normal((2, 45)).astype(np.float32)
    assert np.array_equal(K.add(isa, a, b), a + b)
    y = b.copy()
    K.accumulate(isa, 0.25, a, y)
    # The product is exact in float64: fma rounds the same sum once.
    np.testing.assert_allclose(y, 0.25 * a.astype(np.float64) + b, rtol=6e-8)


@per_isa
def test_swiglu(isa, rng):
    """Relative error under 4e-7: exp within 1 ulp, then three roundings. Limits at the far ends."""
    gate = np.concatenate([rng.standard_normal(1000) * 20, [0.0, 80, -80, -87, 100, 1e4, 1e30]]).astype(np.float32)
    up = rng.standard_normal(gate.size).astype(np.float32)
    g = gate.astype(np.float64)
    want = g / (1 + np.exp(-g)) * up
    np.testing.assert_allclose(K.swiglu(isa, gate, up), want, rtol=4e-7)
    far = np.array([-np.inf, -1e30, -1000, np.inf, np.nan], np.float32)
    got = K.swiglu(isa, far, np.ones(5, np.float32))
    assert np.isnan(got[[0, 4]]).all() and np.array_equal(got[1:4], [0, 0, np.inf])


@per_isa
def test_exp_is_within_one_ulp(isa):
    """Through route: with logits [0, x] the second weight is exp(x) / (1 + exp(x))."""
    x = -np.linspace(0, 104, 4001, dtype=np.float32)
    for value in x:
        _, weights = K.route(isa, np.array([0, value], np.float32), 2, False)
        total = np.float32(1) + np.float32(np.exp(np.float64(value)))
        want = np.exp(np.float64(value)) / np.float64(total)
        # Subnormal results are exact to a part of the smallest float.
        assert abs(weights[1] - want) <= 2.0**-23 * want * 1.5 + 2.0**-149


@per_isa
@pytest.mark.parametrize("position", [0, 1, 77, 4095, 131071, 999999])
def test_rope_angles(isa, position):
    """Rounded from float64: within 1 ulp of 1, where NumPy's own cos and sin are rounded too."""
    inv_freq = (1e4 ** -(np.arange(64) / 64)).astype(np.float32)
    angles = np.float64(position) * inv_freq.astype(np.float64)
    want = np.concatenate([np.cos(angles), np.sin(angles)])
    np.testing.assert_allclose(K.rope_angles(isa, position, inv_freq), want, rtol=6.1e-8, atol=1e-15)


@per_isa
@pytest.mark.parametrize(("head_dim", "rotary"), [(128, 128), (20, 12), (256, 64)])
@pytest.mark.parametrize("style", ["neox", "norm"])
def test_rope(isa, head_dim, rotary, style, rng):
    """Absolute error under 5e-7 for inputs of about 1."""
    x = rng.standard_normal((3, head_dim)).astype(np.float32)
    half = rotary // 2
    angles = K.rope_angles(isa, 1234, (1e4 ** -(np.arange(half) / half)).astype(np.float32))
    y = x.copy()
    K.rope(isa, y, angles, style)
    first, second = (
        (slice(0, half), slice(half, rotary)) if style == "neox" else (slice(0, rotary, 2), slice(1, rotary, 2))
    )
    x64, cos, sin = x.astype(np.float64), angles[:half], angles[half:]
    want = x64.copy()
    want[:, first] = x64[:, first] * cos - x64[:, second] * sin
    want[:, second] = x64[:, second] * cos + x64[:, first] * sin
    np.testing.assert_allclose(y, want, atol=5e-7)
    assert np.array_equal(y[:, rotary:], x[:, rotary:])


@per_isa
def test_store_kv_rounds_as_numpy(isa, rng):
    x = (rng.standard_normal(1003) * 10.0 ** rng.integers(-9, 6, 1003)).astype(np.float32)
    with np.errstate(over="ignore"):
        assert np.array_equal(K.store_kv(isa, x, F16), x.astype(np.float16).view(np.uint8))
    assert np.array_equal(K.store_kv(isa, x, F32), x.view(np.uint8))


@per_isa
@pytest.mark.parametrize("kv_type", [F16, F32])
@pytest.mark.parametrize("head_dim", [128, 64, 21])
@pytest.mark.parametrize(("position", "window"), [(0, 0), (31, 0), (290, 0), (32, 28), (290, 128)])
def test_attend(isa, kv_type, head_dim, position, window, rng):
    """Absolute error under 3e-6 against a float64 softmax over the stored keys and values."""
    q = 2 * rng.standard_normal((9, 4, head_dim)).astype(np.float32)
    k, v = rng.standard_normal((2, 300, head_dim)).astype(np.float32)
    k_rows, v_rows = (K.store_kv(isa, a.reshape(-1), kv_type).reshape(300, -1) for a in (k, v))
    scale = float(np.float32(head_dim**-0.5))
    y = K.attend(isa, q, K.store_keys(isa, k, kv_type), v_rows, kv_type, position, window, scale)
    kind = np.float16 if kv_type == F16 else np.float32
    for row in range(9):
        last = position + row
        seen = slice(max(0, last - window + 1) if window else 0, last + 1)
        k64, v64 = (a.view(kind).astype(np.float64)[seen] for a in (k_rows, v_rows))
        scores = scale * (q[row].astype(np.float64) @ k64.T)
        p = np.exp(scores - scores.max(axis=1, keepdims=True))
        np.testing.assert_allclose(y[row], p @ v64 / p.sum(axis=1, keepdims=True), atol=3e-6)


@per_isa
@pytest.mark.parametrize(("num_experts", "top_k"), [(64, 8), (7, 7), (40, 1), (256, 8)])
@pytest.mark.parametrize("normalize", [False, True])
def test_route(isa, num_experts, top_k, normalize, rng):
    """Relative error under 1e-6 against float64; ids exact."""
    logits = rng.standard_normal(num_experts).astype(np.float32) * 3
    ids, weights = K.route(isa, logits, top_k, normalize, 2.5)
    want_ids = np.sort(np.argsort(-logits, kind="stable")[:top_k])
    assert ids.dtype == np.int32 and np.array_equal(ids, want_ids)
    p = np.exp(logits.astype(np.float64) - logits.max())
    want = p[want_ids] / (p[want_ids].sum() if normalize else p.sum()) * 2.5
    np.testing.assert_allclose(weights, want, rtol=1e-6)


@per_isa
def test_route_ties_and_nan(isa):
    nan, inf = np.nan, np.inf
    ids, weights = K.route(isa, np.array([1, 3, 3, nan, 3], np.float32), 2, True)
    assert ids.tolist() == [1, 2] and weights.tolist() == [0.5, 0.5]
    ids, weights = K.route(isa, np.array([nan, -inf, 0, nan], np.float32), 3, False)
    assert ids.tolist() == [0, 1, 2] and weights.tolist() == [0, 0, 1]


# The definitions of kernels.h, bit for bit. A product of two floats is exact in float64; rounding its
# sum there first and then to float32 differs from fma in about one case of 2^29, and in none here.


def fma32(a, b, c):
    return (np.multiply(a, b, dtype=np.float64) + c).astype(np.float32)


def lane_sum(products: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """Sum over the last axis of a * b, in kernels.h's order."""
    a, b = (np.pad(v, [(0, 0)] * (v.ndim - 1) + [(0, -v.shape[-1] % 16)]) for v in products)
    lanes = np.zeros((*np.broadcast_shapes(a.shape, b.shape)[:-1], 16), np.float32)
    for i in range(0, a.shape[-1], 16):
        lanes = fma32(a[..., i : i + 16], b[..., i : i + 16], lanes)
    for half in (8, 4, 2, 1):
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def exp32(x):
    """The steps of exp_lanes in kernels-inl.h."""
    f = np.float32
    x = np.minimum(np.maximum(x, f(-105)), f(90)).astype(np.float32)
    shifter = f(1.5 * 2**23)
    k = fma32(x, f(float.fromhex("0x1.715476p+0")), shifter) - shifter
    r = fma32(k, f(-float.fromhex("0x1.62e4p-1")), x)
    r = fma32(k, f(-float.fromhex("0x1.7f7d1cp-20")), r)
    q = np.full_like(r, float.fromhex("0x1.6a23ccp-10"))
    for c in ("0x1.123a2p-7", "0x1.5558f4p-5", "0x1.555492p-3", "0x1.fffffcp-2"):
        q = fma32(q, r, f(float.fromhex(c)))
    return np.ldexp(fma32(r * r, q, r) + f(1), k.astype(np.int32))


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype == np.float32 and np.array_equal(a.view(np.uint32), b.view(np.uint32))


@per_isa
@per_type
def test_matmul_bits(isa, dtype, rng):
    rows = file_rows(rng.standard_normal((19, 128)).astype(np.float32), dtype)
    x = rng.standard_normal((3, 128)).astype(np.float32)
    want = np.zeros((3, 19), np.float32)
    if dtype in QUANTIZED:
        activations = K.quantize(isa, x)
        q, d, _ = split_q8(activations, 128)
        blocks = rows.reshape(19, 4, -1)
        d_w = np.ascontiguousarray(blocks[:, :, :2]).view(np.float16).astype(np.float32)[:, :, 0]
        quants = np.rint(dequantized(rows, dtype).reshape(19, 4, 32) / d_w[:, :, None])
        dots = np.einsum("rbk,tbk->btr", quants, q.reshape(3, 4, 32).astype(np.float64))
        for b in range(4):
            want = fma32(dots[b].astype(np.float32), d_w[:, b] * d[:, b : b + 1], want)
    else:
        activations = x
        w = dequantized(rows, dtype)
        for k in range(128):
            want = fma32(w[:, k], x[:, k : k + 1], want)
    tiles = packed(rows, dtype, 128)
    assert same_bits(K.matmul(isa, dtype, 19, 128, tiles, activations), want)


@per_isa
@pytest.mark.parametrize("group", [128, 27])
def test_rms_norm_bits(isa, group, rng):
    x = rng.standard_normal((3, group)).astype(np.float32)
    w = rng.standard_normal(group).astype(np.float32)
    eps = np.float32(1e-6)
    r = np.float32(1) / np.sqrt(lane_sum((x, x)) / np.float32(group) + eps)
    assert same_bits(K.rms_norm(isa, x.reshape(-1), w, eps).reshape(3, -1), (x * r[:, None]) * w)


@per_isa
def test_swiglu_and_accumulate_bits(isa, rng):
    gate = np.concatenate([rng.standard_normal(500) * 30, np.linspace(-90, 90, 333)])
    gate = gate.astype(np.float32)
    up = rng.standard_normal(gate.size).astype(np.float32)
    with np.errstate(over="ignore"):
        want = gate / (np.float32(1) + exp32(-gate)) * up
    assert same_bits(K.swiglu(isa, gate, up), want)
    y = up.copy()
    K.accumulate(isa, 0.3, gate, y)
    assert same_bits(y, fma32(np.float32(0.3), gate, up))


@per_isa
@pytest.mark.parametrize(("position", "window"), [(0, 0), (10, 0), (130, 86), (130, 30)])
def test_attend_bits(isa, position, window, rng):
    q = rng.standard_normal((5, 40)).astype(np.float32)
    k, v = rng.standard_normal((2, 140, 40)).astype(np.float32)
    scale = np.float32(0.7)
    running_max = np.full(5, -np.inf, np.float32)
    running_sum = np.zeros((5, 16), np.float32)
    acc = np.zeros((5, 40), np.float32)
    first = max(0, position - window + 1) if window else 0
    for block in range(first // 64, position // 64 + 1):
        keys = np.arange(max(first, 64 * block), min(position, 64 * block + 63) + 1)
        dot = np.zeros((5, len(keys)), np.float32)
        for d in range(40):
            dot = fma32(q[:, d : d + 1], k[keys, d], dot)
        s = np.full((5, 64), -np.inf, np.float32)
        s[:, keys - 64 * block] = scale * dot
        new_max = np.maximum(running_max, s.max(axis=1))
        p, c = exp32(s - new_max[:, None]), exp32(running_max - new_max)
        lanes = p.reshape(5, 4, 16)
        running_sum = fma32(running_sum, c[:, None], (lanes[:, 0] + lanes[:, 1]) + (lanes[:, 2] + lanes[:, 3]))
        acc = acc * c[:, None]
        for position_j in keys:
            acc = fma32(p[:, position_j - 64 * block][:, None], v[position_j], acc)
        running_max = new_max
    for half in (8, 4, 2, 1):
        running_sum = running_sum[:, :half] + running_sum[:, half:]
    keys_and_values = K.store_keys(isa, k, F32), v.view(np.uint8)
    got = K.attend(isa, q[None], *keys_and_values, F32, position, window, float(scale))
    assert same_bits(got[0], acc / running_sum)


@per_isa
@pytest.mark.parametrize("normalize", [False, True])
def test_route_bits(isa, normalize, rng):
    logits = (4 * rng.standard_normal(45)).astype(np.float32)
    ids, weights = K.route(isa, logits, 6, normalize, 1.5)
    e = exp32(logits - logits.max())
    total = np.float32(0)
    for value in e:
        total = total + value
    p = e[ids] / total
    if normalize:
        chosen = np.float32(0)
        for value in p:
            chosen = chosen + value
        p = p / chosen
    assert same_bits(weights, p * np.float32(1.5))


@per_isa
def test_rope_bits(isa, rng):
    x = rng.standard_normal((2, 48)).astype(np.float32)
    angles = K.rope_angles(isa, 77, rng.random(24).astype(np.float32))
    cos, sin = angles[:24], angles[24:]
    for style, first, second in [
        ("neox", slice(0, 24), slice(24, 48)),
        ("norm", slice(0, 48, 2), slice(1, 48, 2)),
    ]:
        y, want = x.copy(), x.copy()
        K.rope(isa, y, angles, style)
        want[:, first] = fma32(x[:, first], cos, -(x[:, second] * sin))
        want[:, second] = fma32(x[:, second], cos, x[:, first] * sin)
        assert same_bits(y, want)


@pytest.mark.parametrize("isa", ISAS)
def test_the_environment_names_the_instruction_set(isa):
    code = "from headrace import _core; print(_core.isa())"
    environment = {**os.environ, "HEADRACE_ISA": isa}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == isa, done.stderr


def test_an_unknown_instruction_set_is_refused():
    code = "from headrace import _core; _core.isa()"
    environment = {**os.environ, "HEADRACE_ISA": "mmx"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "HEADRACE_ISA: 'mmx' is not an instruction set of this processor; it has" in done.stderr
