// Every kernel, written once over sixteen lanes and compiled once per instruction set. The file that includes this
// has first included a lanes header, which provides, with the same bits everywhere:
//   Floats, Ints, Bytes     16 floats, 16 int32, 16 groups of 4 unsigned bytes, and their arithmetic. max and min
//                           give the second operand if either is NaN; round_to_ints rounds half to even and gives
//                           INT32_MIN where an int32 cannot hold the value; _n reads or writes the first n lanes
//                           (n <= 16) and reads 0 in the others.
//   sum_lanes, max_lanes    the tree of kernels.h; sum_lanes16 does it for 16 vectors, result i from vector i.
//   Dot<kMax>               one block's dot products, exact: sum() is start plus what at most 8 add4(w, x) added, each
//                           in lane i the sum over j of w[4i + j] * x[j], unsigned (up to kMax) times signed.
//                           Registers hold kTokens of them, each beside a Floats.
//   kLiveSums               how many Floats the registers hold as sums, beside what is added to them.
//   F32, F16, BF16          stored element types: load, and for F32 and F16 load_n and store_n.
//   prefetch_near, _far     hints; the address need not exist.
// Everything is in an unnamed namespace, so no two instruction sets share a definition.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernels.h"

namespace headrace {
namespace {

constexpr float kInfinity = __builtin_inff();

template <class T>
inline T read(const uint8_t* p) {
  T value;
  __builtin_memcpy(&value, p, sizeof value);
  return value;
}

constexpr uint32_t min_u32(uint32_t a, uint32_t b) { return a < b ? a : b; }

// ---- exp, sin, cos

// To about 1 ulp. x = k ln 2 + r with |r| <= ln 2 / 2; exp(r) = 1 + r + r^2 Q(r) by a minimax polynomial; times 2^k in
// two steps, of which only the second can round (to a subnormal), go to 0 or to infinity. NaN stays NaN.
inline Floats exp_lanes(Floats x) {
  x = max(set1(-105.0f), x);
  x = min(set1(90.0f), x);
  // Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits.
  const Floats shifter = set1(0x1.8p23f);
  const Floats shifted = fma(x, set1(0x1.715476p+0f), shifter);
  const Floats k = sub(shifted, shifter);
  const Ints k_int = sub(bits(shifted), bits(shifter));
  Floats r = fma(k, set1(-0x1.62e4p-1f), x);  // ln 2 in two parts
  r = fma(k, set1(-0x1.7f7d1cp-20f), r);
  Floats q = set1(0x1.6a23ccp-10f);
  q = fma(q, r, set1(0x1.123a2p-7f));
  q = fma(q, r, set1(0x1.5558f4p-5f));
  q = fma(q, r, set1(0x1.555492p-3f));
  q = fma(q, r, set1(0x1.fffffcp-2f));
  const Floats p = add(fma(mul(r, r), q, r), set1(1.0f));
  const Ints half = shift_right<1>(k_int);
  const Ints bias = set1_int(127);
  const Floats scale1 = from_bits(shift_left<23>(add(half, bias)));
  const Floats scale2 = from_bits(shift_left<23>(add(sub(k_int, half), bias)));
  return mul(mul(p, scale1), scale2);
}

inline float exp_one(float x) {
  float out[16];
  store(out, exp_lanes(set1(x)));
  return out[0];
}

struct SinCos {
  double sin, cos;
};

// For |x| up to 2^30 or so, to far better than a float can hold. x = k pi/2 + r with |r| <= pi/4, then Taylor series.
inline SinCos sin_cos(double x) {
  const double shifter = 0x1.8p52;
  const double shifted = __builtin_fma(x, 0x1.45f306dc9c883p-1, shifter);
  const double k = shifted - shifter;
  const uint64_t quadrant = __builtin_bit_cast(uint64_t, shifted) & 3;
  double r = __builtin_fma(k, -0x1.921fb54442d18p+0, x);  // pi/2 in two parts
  r = __builtin_fma(k, -0x1.1a62633145c07p-54, r);
  const double z = r * r;
  double s = 1.0 / 6227020800;  // 1/13!
  s = __builtin_fma(s, z, -1.0 / 39916800);
  s = __builtin_fma(s, z, 1.0 / 362880);
  s = __builtin_fma(s, z, -1.0 / 5040);
  s = __builtin_fma(s, z, 1.0 / 120);
  s = __builtin_fma(s, z, -1.0 / 6);
  s = __builtin_fma(s * z, r, r);
  double c = -1.0 / 87178291200;  // -1/14!
  c = __builtin_fma(c, z, 1.0 / 479001600);
  c = __builtin_fma(c, z, -1.0 / 3628800);
  c = __builtin_fma(c, z, 1.0 / 40320);
  c = __builtin_fma(c, z, -1.0 / 720);
  c = __builtin_fma(c, z, 1.0 / 24);
  c = __builtin_fma(c, z, -0.5);
  c = __builtin_fma(c, z, 1.0);
  switch (quadrant) {
    case 0: return {s, c};
    case 1: return {c, -s};
    case 2: return {-s, -c};
    default: return {-c, s};
  }
}

// ---- Matrix products

// A quant type is a decoder of blocks of 32 columns: Bytes for two groups of 4 columns at a time, as value + kOffset.
struct Q4_0 {
  static constexpr uint32_t kBlockBytes = 288;
  static constexpr int32_t kOffset = 8;
  using Products = Dot<15>;
  static constexpr uint32_t group(uint32_t pair, uint32_t i) { return pair + 4 * i; }
  static void decode(const uint8_t* block, uint32_t pair, Bytes (&w)[2]) {
    const Bytes packed = load_bytes(block + 32 + 64 * pair);
    w[0] = low_nibbles(packed);
    w[1] = high_nibbles(packed);
  }
};

struct Q8_0 {
  static constexpr uint32_t kBlockBytes = 544;
  static constexpr int32_t kOffset = 128;
  using Products = Dot<255>;
  static constexpr uint32_t group(uint32_t pair, uint32_t i) { return 2 * pair + i; }
  static void decode(const uint8_t* block, uint32_t pair, Bytes (&w)[2]) {
    w[0] = flip_sign(load_bytes(block + 32 + 128 * pair));
    w[1] = flip_sign(load_bytes(block + 32 + 128 * pair + 64));
  }
};

// One block of an activation row beside the other rows' same block: the product below then finds all by one pointer.
struct Activation {
  int8_t q[kQuantBlock];
  float d;
  int32_t start;  // undoes kOffset
};

template <class Quant>
inline void gather(const void* row, uint32_t cols, uint32_t b, Activation* to) {
  const uint8_t* q = static_cast<const uint8_t*>(row);
  const uint8_t* d = q + cols + size_t{4} * b;
  __builtin_memcpy(to->q, q + kQuantBlock * size_t{b}, kQuantBlock);
  to->d = read<float>(d);
  to->start = -Quant::kOffset * read<int32_t>(d + size_t{4} * (cols / kQuantBlock));
}

// acc[t] += the products of `blocks` blocks of one tile with kTokens activation rows. A block is decoded once for all.
template <class Quant, uint32_t kTokens>
inline void quant_blocks(const uint8_t* block, size_t tile_stride, uint32_t blocks, const Activation* x,
                         Floats (&acc)[kTokens]) {
  for (uint32_t b = 0; b < blocks; ++b, block += Quant::kBlockBytes, x += kTokens) {
    // One tile ahead into L2 and 2.3 KB ahead into L1: with one token Intel gets 0.7 of streaming without, with eight
    // AMD gets 0.6 of this speed.
    for (uint32_t i = 0; i < Quant::kBlockBytes; i += 64) {
      prefetch_near(block + 8 * 288 + i);
      prefetch_far(block + tile_stride + i);
    }
    typename Quant::Products dot[kTokens];
    for (uint32_t t = 0; t < kTokens; ++t) dot[t] = typename Quant::Products(x[t].start);
    for (uint32_t pair = 0; pair < 4; ++pair) {
      Bytes w[2];
      Quant::decode(block, pair, w);
      for (uint32_t i = 0; i < 2; ++i)
        for (uint32_t t = 0; t < kTokens; ++t) dot[t].add4(w[i], x[t].q + 4 * Quant::group(pair, i));
    }
    const Floats d_w = F16::load(block);
    for (uint32_t t = 0; t < kTokens; ++t) acc[t] = fma(to_floats(dot[t].sum()), mul(d_w, set1(x[t].d)), acc[t]);
  }
}

// kTiles tiles in a row times kTokens activation rows: kTiles * kTokens independent sums hide the latency of one.
template <class Element, uint32_t kTiles, uint32_t kTokens>
inline void float_tiles(const uint8_t* tile, uint32_t cols, const void* const* x, Floats (&out)[kTiles][kTokens]) {
  constexpr uint32_t kStep = kTileRows * Element::kBytes;
  const size_t tile_stride = size_t{cols} * kStep;
  Floats acc[kTiles][kTokens];
  for (uint32_t i = 0; i < kTiles; ++i)
    for (uint32_t t = 0; t < kTokens; ++t) acc[i][t] = set1(0.0f);
  for (uint32_t k = 0; k < cols; ++k) {
    Floats w[kTiles];
    for (uint32_t i = 0; i < kTiles; ++i) {
      const uint8_t* p = tile + i * tile_stride + size_t{k} * kStep;
      prefetch_near(p + 2304);
      w[i] = Element::load(p);
    }
    for (uint32_t t = 0; t < kTokens; ++t) {
      const Floats x_k = set1(read<float>(static_cast<const uint8_t*>(x[t]) + 4 * size_t{k}));
      for (uint32_t i = 0; i < kTiles; ++i) acc[i][t] = fma(w[i], x_k, acc[i][t]);
    }
  }
  for (uint32_t i = 0; i < kTiles; ++i)
    for (uint32_t t = 0; t < kTokens; ++t) out[i][t] = acc[i][t];
}

template <uint32_t kTokens>
inline void load_tile(const Matrix& w, uint32_t tile, float* const* y, Floats (&acc)[kTokens]) {
  const uint32_t row = tile * kTileRows;
  const uint32_t n = min_u32(kTileRows, w.rows - row);
  for (uint32_t t = 0; t < kTokens; ++t) acc[t] = n == kTileRows ? load(y[t] + row) : load_n(y[t] + row, n);
}

template <uint32_t kTokens>
inline void store_tile(const Matrix& w, uint32_t tile, const Floats* acc, float* const* y) {
  const uint32_t row = tile * kTileRows;
  const uint32_t n = min_u32(kTileRows, w.rows - row);
  for (uint32_t t = 0; t < kTokens; ++t) {
    if (n == kTileRows) {
      store(y[t] + row, acc[t]);
    } else {
      store_n(y[t] + row, acc[t], n);
    }
  }
}

constexpr uint32_t kGathered = 512;  // blocks: 20 KB, which leaves room in the L1 cache

// As many columns at a time as can be gathered; y holds the sums in between.
template <class Quant, uint32_t kTokens>
void quant_tokens(const Matrix& w, const void* const* x, float* const* y, uint32_t tile_begin, uint32_t tile_end) {
  constexpr uint32_t kStep = kGathered / kTokens;
  Activation gathered[kStep * kTokens];
  const uint32_t blocks = w.cols / kQuantBlock;
  const size_t tile_stride = size_t{blocks} * Quant::kBlockBytes;
  for (uint32_t begin = 0; begin < blocks; begin += kStep) {
    const uint32_t step = min_u32(kStep, blocks - begin);
    for (uint32_t b = 0; b < step; ++b)
      for (uint32_t t = 0; t < kTokens; ++t) gather<Quant>(x[t], w.cols, begin + b, gathered + b * kTokens + t);
    for (uint32_t tile = tile_begin; tile < tile_end; ++tile) {
      Floats acc[kTokens];
      if (begin == 0) {
        for (uint32_t t = 0; t < kTokens; ++t) acc[t] = set1(0.0f);
      } else {
        load_tile<kTokens>(w, tile, y, acc);
      }
      const uint8_t* first = w.data + tile * tile_stride + size_t{begin} * Quant::kBlockBytes;
      quant_blocks<Quant, kTokens>(first, tile_stride, step, gathered, acc);
      store_tile<kTokens>(w, tile, acc, y);
    }
  }
}

// n <= kTokens activation rows.
template <class Quant, uint32_t kTokens>
inline void quant_group(const Matrix& w, const void* const* x, uint32_t n, float* const* y, uint32_t tile_begin,
                        uint32_t tile_end) {
  if (n == kTokens) {
    quant_tokens<Quant, kTokens>(w, x, y, tile_begin, tile_end);
  } else if constexpr (kTokens > 1) {
    quant_group<Quant, kTokens - 1>(w, x, n, y, tile_begin, tile_end);
  }
}

// Rows go in groups of nearly the same size, each over tiles that stay in the L2 cache for the next pass.
template <class Quant>
void quant_matmul(const Matrix& w, const void* const* x, uint32_t n, float* const* y, uint32_t tile_begin,
                  uint32_t tile_end) {
  constexpr uint32_t kTokens = Quant::Products::kTokens;
  constexpr size_t kPieceBytes = 256 << 10;
  const uint32_t groups = (n + kTokens - 1) / kTokens;
  const bool one_pass = groups == 1 && size_t{n} * (w.cols / kQuantBlock) <= kGathered;
  const uint32_t piece = static_cast<uint32_t>(kPieceBytes / tile_bytes(w.type, w.cols)) + 1;
  const uint32_t tile_step = one_pass ? tile_end - tile_begin : piece;
  for (uint32_t tile = tile_begin; tile < tile_end; tile += tile_step) {
    for (uint32_t group = 0; group < groups; ++group) {
      const uint32_t t = static_cast<uint32_t>(size_t{n} * group / groups);
      const uint32_t t_end = static_cast<uint32_t>(size_t{n} * (group + 1) / groups);
      quant_group<Quant, kTokens>(w, x + t, t_end - t, y + t, tile, min_u32(tile_end, tile + tile_step));
    }
  }
}

template <class Element, uint32_t kTiles, uint32_t kTokens>
inline void float_tokens(const Matrix& w, uint32_t tile, const void* const* x, float* const* y) {
  Floats acc[kTiles][kTokens];
  float_tiles<Element, kTiles, kTokens>(w.data + size_t{tile} * w.cols * kTileRows * Element::kBytes, w.cols, x, acc);
  for (uint32_t i = 0; i < kTiles; ++i) store_tile<kTokens>(w, tile + i, acc[i], y);
}

// kTokens activation rows times kTiles tiles, as many tiles at a time as the registers hold.
template <class Element, uint32_t kTiles, uint32_t kTokens>
inline void float_pass(const Matrix& w, uint32_t tile, const void* const* x, float* const* y) {
  constexpr uint32_t kStep = min_u32(kTiles, kLiveSums / kTokens);
  for (uint32_t i = 0; i < kTiles; i += kStep) float_tokens<Element, kStep, kTokens>(w, tile + i, x, y);
}

template <class Element, uint32_t kTiles>
inline void float_step(const Matrix& w, uint32_t tile, const void* const* x, uint32_t n, float* const* y) {
  uint32_t t = 0;
  for (; t + 4 <= n; t += 4) float_pass<Element, kTiles, 4>(w, tile, x + t, y + t);
  switch (n - t) {
    case 3: return float_pass<Element, kTiles, 3>(w, tile, x + t, y + t);
    case 2: return float_pass<Element, kTiles, 2>(w, tile, x + t, y + t);
    case 1: return float_pass<Element, kTiles, 1>(w, tile, x + t, y + t);
  }
}

template <class Element>
void float_matmul(const Matrix& w, const void* const* x, uint32_t n, float* const* y, uint32_t tile_begin,
                  uint32_t tile_end) {
  uint32_t tile = tile_begin;
  for (; tile + 4 <= tile_end; tile += 4) float_step<Element, 4>(w, tile, x, n, y);
  for (; tile < tile_end; ++tile) float_step<Element, 1>(w, tile, x, n, y);
}

void matmul(const Matrix& w, const void* const* x, uint32_t n, float* const* y, uint32_t tile_begin,
            uint32_t tile_end) {
  switch (w.type) {
    case DType::kF32: return float_matmul<F32>(w, x, n, y, tile_begin, tile_end);
    case DType::kF16: return float_matmul<F16>(w, x, n, y, tile_begin, tile_end);
    case DType::kBF16: return float_matmul<BF16>(w, x, n, y, tile_begin, tile_end);
    case DType::kQ4_0: return quant_matmul<Q4_0>(w, x, n, y, tile_begin, tile_end);
    case DType::kQ8_0: return quant_matmul<Q8_0>(w, x, n, y, tile_begin, tile_end);
  }
}

void quantize(const float* x, uint32_t cols, uint32_t block_begin, uint32_t block_end, uint8_t* out) {
  const uint32_t blocks = cols / kQuantBlock;
  const Ints magnitude = set1_int(0x7fffffff);
  for (uint32_t b = block_begin; b < block_end; ++b) {
    const Floats lo = load(x + size_t{b} * kQuantBlock), hi = load(x + size_t{b} * kQuantBlock + 16);
    // Magnitudes compare as integers, and there a NaN is the largest: it reaches d and stays visible.
    const int32_t max_bits = max_lanes(max(bit_and(bits(lo), magnitude), bit_and(bits(hi), magnitude)));
    const float max_abs = __builtin_bit_cast(float, max_bits);
    float d = max_abs / 127.0f;
    float inverse = 127.0f / max_abs;
    if (inverse == kInfinity) d = inverse = 0.0f;
    const Ints least = set1_int(-128);
    const Ints q_lo = max(round_to_ints(mul(lo, set1(inverse))), least);
    const Ints q_hi = max(round_to_ints(mul(hi, set1(inverse))), least);
    const int32_t sum = sum_lanes(add(q_lo, q_hi));
    int8_t* q = reinterpret_cast<int8_t*>(out + size_t{b} * kQuantBlock);
    store_int8(q, q_lo);
    store_int8(q + 16, q_hi);
    __builtin_memcpy(out + cols + size_t{4} * b, &d, sizeof d);
    __builtin_memcpy(out + cols + size_t{4} * (blocks + b), &sum, sizeof sum);
  }
}

// ---- Element by element

void rms_norm(const float* x, const float* w, float* y, uint32_t width, uint32_t group, float eps) {
  for (uint32_t begin = 0; begin < width; begin += group, x += group, y += group) {
    Floats squares = set1(0.0f);
    uint32_t i = 0;
    for (; i + 16 <= group; i += 16) {
      const Floats v = load(x + i);
      squares = fma(v, v, squares);
    }
    if (i < group) {
      const Floats v = load_n(x + i, group - i);
      squares = fma(v, v, squares);
    }
    const float mean = sum_lanes(squares) / static_cast<float>(group);
    const Floats r = set1(1.0f / __builtin_sqrtf(mean + eps));
    for (i = 0; i + 16 <= group; i += 16) store(y + i, mul(mul(load(x + i), r), load(w + i)));
    if (i < group) store_n(y + i, mul(mul(load_n(x + i, group - i), r), load_n(w + i, group - i)), group - i);
  }
}

void add_rows(const float* a, const float* b, float* y, uint32_t n) {
  for (uint32_t i = 0; i < n; ++i) y[i] = a[i] + b[i];
}

void accumulate(float weight, const float* x, float* y, uint32_t n) {
  const Floats weights = set1(weight);
  uint32_t i = 0;
  for (; i + 16 <= n; i += 16) store(y + i, fma(weights, load(x + i), load(y + i)));
  if (i < n) store_n(y + i, fma(weights, load_n(x + i, n - i), load_n(y + i, n - i)), n - i);
}

inline Floats swiglu_lanes(Floats gate, Floats up) {
  const Floats e = exp_lanes(sub(set1(0.0f), gate));
  return mul(div(gate, add(set1(1.0f), e)), up);
}

void swiglu(const float* gate, const float* up, float* y, uint32_t n) {
  uint32_t i = 0;
  for (; i + 16 <= n; i += 16) store(y + i, swiglu_lanes(load(gate + i), load(up + i)));
  if (i < n) store_n(y + i, swiglu_lanes(load_n(gate + i, n - i), load_n(up + i, n - i)), n - i);
}

// ---- Rotary embedding

void rope_angles(uint32_t position, const float* inv_freq, uint32_t half, float* out) {
  for (uint32_t i = 0; i < half; ++i) {
    const SinCos a = sin_cos(static_cast<double>(position) * static_cast<double>(inv_freq[i]));
    out[i] = static_cast<float>(a.cos);
    out[half + i] = static_cast<float>(a.sin);
  }
}

// Elements i and i + half of one head, for all i < half.
inline void rotate_halves(float* x, const float* cos, const float* sin, uint32_t half) {
  for (uint32_t i = 0; i < half; i += 16) {
    const uint32_t n = min_u32(16, half - i);
    const Floats x0 = load_n(x + i, n), x1 = load_n(x + half + i, n);
    const Floats c = load_n(cos + i, n), s = load_n(sin + i, n);
    const Floats minus_x1_s = from_bits(add(bits(mul(x1, s)), set1_int(INT32_MIN)));  // only the sign bit changes
    store_n(x + i, fma(x0, c, minus_x1_s), n);
    store_n(x + half + i, fma(x1, c, mul(x0, s)), n);
  }
}

inline void rotate_neighbours(float* x, const float* cos, const float* sin, uint32_t half) {
  for (uint32_t i = 0; i < half; ++i) {
    const float x0 = x[2 * i], x1 = x[2 * i + 1];
    x[2 * i] = __builtin_fmaf(x0, cos[i], -(x1 * sin[i]));
    x[2 * i + 1] = __builtin_fmaf(x1, cos[i], x0 * sin[i]);
  }
}

void rope(float* x, const float* angles, uint32_t num_heads, uint32_t head_dim, uint32_t rotary, RopeStyle style) {
  const uint32_t half = rotary / 2;
  for (uint32_t h = 0; h < num_heads; ++h, x += head_dim) {
    if (style == RopeStyle::kNeox) {
      rotate_halves(x, angles, angles + half, half);
    } else {
      rotate_neighbours(x, angles, angles + half, half);
    }
  }
}

// ---- Attention

void store_kv(const float* x, void* out, uint32_t n, DType kv_type) {
  uint8_t* p = static_cast<uint8_t*>(out);
  for (uint32_t i = 0; i < n; i += 16) {
    const uint32_t m = min_u32(16, n - i);
    if (kv_type == DType::kF16) {
      F16::store_n(p + size_t{i} * F16::kBytes, load_n(x + i, m), m);
    } else {
      F32::store_n(p + size_t{i} * F32::kBytes, load_n(x + i, m), m);
    }
  }
}

constexpr uint32_t kKeyBlock = 32;

// sum[h][j] += q[h, d..] * key[j, d..] for n <= 16 elements. A key is converted once for all heads.
template <class Element, bool kWhole, uint32_t kHeads, uint32_t kKeys>
inline void add_products(const float* q, uint32_t head_dim, const uint8_t* const* key, uint32_t d, uint32_t n,
                         Floats (&sum)[kHeads][kKeys]) {
  Floats q_d[kHeads];
  for (uint32_t h = 0; h < kHeads; ++h) {
    const float* p = q + size_t{h} * head_dim + d;
    q_d[h] = kWhole ? load(p) : load_n(p, n);
  }
  for (uint32_t j = 0; j < kKeys; ++j) {
    const uint8_t* p = key[j] + size_t{d} * Element::kBytes;
    const Floats k_d = kWhole ? Element::load(p) : Element::load_n(p, n);
    for (uint32_t h = 0; h < kHeads; ++h) sum[h][j] = fma(q_d[h], k_d, sum[h][j]);
  }
}

// p[h][j] = scale * lane_sum(q[h] * key[j]) for kHeads heads and 16 / kHeads keys. p: rows of 32.
template <class Element, uint32_t kHeads>
inline void scores16(const float* q, uint32_t head_dim, const uint8_t* const* key, float scale, float* p) {
  constexpr uint32_t kKeys = 16 / kHeads;
  // More than 8 keys at once would meet in the same sets of the L1 cache.
  constexpr uint32_t kGroup = min_u32(min_u32(kKeys, 8), kLiveSums / kHeads);
  Floats sums[16];
  for (uint32_t first = 0; first < kKeys; first += kGroup) {
    Floats sum[kHeads][kGroup];
    for (uint32_t h = 0; h < kHeads; ++h)
      for (uint32_t j = 0; j < kGroup; ++j) sum[h][j] = set1(0.0f);
    uint32_t d = 0;
    for (; d + 16 <= head_dim; d += 16) add_products<Element, true>(q, head_dim, key + first, d, 16, sum);
    if (d < head_dim) add_products<Element, false>(q, head_dim, key + first, d, head_dim - d, sum);
    for (uint32_t h = 0; h < kHeads; ++h)
      for (uint32_t j = 0; j < kGroup; ++j) sums[h * kKeys + first + j] = sum[h][j];
  }
  float scores[16];
  store(scores, mul(set1(scale), sum_lanes16(sums)));
  for (uint32_t h = 0; h < kHeads; ++h) __builtin_memcpy(p + h * kKeyBlock, scores + h * kKeys, kKeys * sizeof(float));
}

// acc[h][d..] += p[h][j] * v[j][d..], keys in turn, for kVectors * 16 elements, or n where kVectors is 0.
template <class Element, uint32_t kHeads, uint32_t kVectors>
inline void add_values(float* acc, uint32_t head_dim, const float* p, const uint8_t* v, size_t stride_bytes,
                       uint32_t keys, uint32_t n) {
  constexpr uint32_t kSums = kVectors == 0 ? 1 : kVectors;
  Floats a[kHeads][kSums];
  for (uint32_t h = 0; h < kHeads; ++h)
    for (uint32_t i = 0; i < kSums; ++i) {
      const float* from = acc + size_t{h} * head_dim + 16 * i;
      a[h][i] = kVectors == 0 ? load_n(from, n) : load(from);
    }
  for (uint32_t j = 0; j < keys; ++j, v += stride_bytes) {
    for (uint32_t i = 0; i < kSums; ++i) {
      const Floats v_i = kVectors == 0 ? Element::load_n(v, n) : Element::load(v + 16 * i * Element::kBytes);
      for (uint32_t h = 0; h < kHeads; ++h) a[h][i] = fma(set1(p[h * kKeyBlock + j]), v_i, a[h][i]);
    }
  }
  for (uint32_t h = 0; h < kHeads; ++h)
    for (uint32_t i = 0; i < kSums; ++i) {
      float* to = acc + size_t{h} * head_dim + 16 * i;
      if constexpr (kVectors == 0) {
        store_n(to, a[h][i], n);
      } else {
        store(to, a[h][i]);
      }
    }
}

// The state of one row's attention, in the caller's scratch: accumulators [num_q, head_dim], then for each head the
// running maximum, the running sum and the block's 32 scores.
template <class Element>
struct Attention {
  const float* q;
  uint32_t num_q, head_dim;
  float* acc;
  float* running_max;
  float* running_sum;
  float* p;

  template <uint32_t kHeads>
  void scores(uint32_t h, const uint8_t* const* key, uint32_t keys, float scale) {
    for (uint32_t j = 0; j < keys; j += 16 / kHeads)
      scores16<Element, kHeads>(q + size_t{h} * head_dim, head_dim, key + j, scale, p + h * kKeyBlock + j);
  }

  // Scores to weights p = exp(s - max), the earlier blocks' results brought to the new maximum.
  void softmax(uint32_t h, uint32_t keys) {
    float* p_h = p + h * kKeyBlock;
    for (uint32_t j = keys; j < kKeyBlock; ++j) p_h[j] = -kInfinity;
    const float block_max = max_lanes(max(load(p_h), load(p_h + 16)));
    const float new_max = running_max[h] > block_max ? running_max[h] : block_max;
    for (uint32_t j = 0; j < kKeyBlock; j += 16) store(p_h + j, exp_lanes(sub(load(p_h + j), set1(new_max))));
    const float c = exp_one(running_max[h] - new_max);
    float sum = 0.0f;
    for (uint32_t j = 0; j < keys; ++j) sum += p_h[j];
    running_sum[h] = __builtin_fmaf(running_sum[h], c, sum);
    running_max[h] = new_max;
    float* acc_h = acc + size_t{h} * head_dim;
    for (uint32_t d = 0; d < head_dim; ++d) acc_h[d] = acc_h[d] * c;
  }

  template <uint32_t kHeads>
  void values(uint32_t h, const uint8_t* v, size_t stride_bytes, uint32_t keys) {
    constexpr uint32_t kVectors = min_u32(8, kLiveSums / kHeads);
    float* acc_h = acc + size_t{h} * head_dim;
    const float* p_h = p + h * kKeyBlock;
    uint32_t d = 0;
    for (; d + 16 * kVectors <= head_dim; d += 16 * kVectors)
      add_values<Element, kHeads, kVectors>(acc_h + d, head_dim, p_h, v + d * Element::kBytes, stride_bytes, keys, 0);
    for (; d < head_dim; d += 16)
      add_values<Element, kHeads, 0>(acc_h + d, head_dim, p_h, v + d * Element::kBytes, stride_bytes, keys,
                                     min_u32(16, head_dim - d));
  }
};

// Brings the next block's rows near while this one is worked on: left alone, attention waits for memory.
inline void prefetch_rows(const uint8_t* first_row, size_t stride_bytes, uint32_t rows, uint32_t row_bytes) {
  for (uint32_t j = 0; j < rows; ++j)
    for (uint32_t i = 0; i < row_bytes; i += 64) prefetch_far(first_row + j * stride_bytes + i);
}

template <class Element>
void attend_typed(const float* q, uint32_t num_q, uint32_t head_dim, const uint8_t* k, const uint8_t* v,
                  size_t stride_bytes, uint32_t first, uint32_t last, float scale, float* out, float* scratch) {
  Attention<Element> a = {q, num_q, head_dim, scratch, nullptr, nullptr, nullptr};
  a.running_max = a.acc + size_t{num_q} * head_dim;
  a.running_sum = a.running_max + num_q;
  a.p = a.running_sum + num_q;
  for (size_t i = 0; i < size_t{num_q} * head_dim; ++i) a.acc[i] = 0.0f;
  for (uint32_t h = 0; h < num_q; ++h) a.running_max[h] = -kInfinity, a.running_sum[h] = 0.0f;

  for (uint32_t block = first / kKeyBlock; block <= last / kKeyBlock; ++block) {
    const uint32_t block_begin = block * kKeyBlock;
    const uint32_t begin = block_begin < first ? first : block_begin;
    const uint32_t keys = min_u32(last - begin, block_begin + kKeyBlock - 1 - begin) + 1;
    const uint32_t next_keys = min_u32(kKeyBlock, last - (begin + keys - 1));
    const uint8_t* k_begin = k + begin * stride_bytes;
    const uint8_t* v_begin = v + begin * stride_bytes;
    const uint8_t* key[kKeyBlock];
    for (uint32_t j = 0; j < kKeyBlock; ++j) {
      key[j] = k_begin + (j < keys ? j : 0) * stride_bytes;  // a present key stands in for an absent one
    }

    prefetch_rows(k_begin + keys * stride_bytes, stride_bytes, next_keys, head_dim * Element::kBytes);
    uint32_t h = 0;
    for (; h + 4 <= num_q; h += 4) a.template scores<4>(h, key, keys, scale);
    for (; h < num_q; ++h) a.template scores<1>(h, key, keys, scale);
    for (h = 0; h < num_q; ++h) a.softmax(h, keys);
    prefetch_rows(v_begin + keys * stride_bytes, stride_bytes, next_keys, head_dim * Element::kBytes);
    for (h = 0; h + 4 <= num_q; h += 4) a.template values<4>(h, v_begin, stride_bytes, keys);
    for (; h < num_q; ++h) a.template values<1>(h, v_begin, stride_bytes, keys);
  }
  for (uint32_t h = 0; h < num_q; ++h)
    for (uint32_t d = 0; d < head_dim; ++d) out[h * head_dim + d] = a.acc[h * head_dim + d] / a.running_sum[h];
}

void attend(const float* q, uint32_t num_q, uint32_t head_dim, const void* k, const void* v, DType kv_type,
            size_t stride_elems, uint32_t first, uint32_t last, float scale, float* out, float* scratch) {
  const uint8_t* keys = static_cast<const uint8_t*>(k);
  const uint8_t* values = static_cast<const uint8_t*>(v);
  if (kv_type == DType::kF16) {
    attend_typed<F16>(q, num_q, head_dim, keys, values, stride_elems * F16::kBytes, first, last, scale, out, scratch);
  } else {
    attend_typed<F32>(q, num_q, head_dim, keys, values, stride_elems * F32::kBytes, first, last, scale, out, scratch);
  }
}

// ---- Routing

inline float logit_or_lowest(float logit) { return logit == logit ? logit : -kInfinity; }

void route(const float* logits, uint32_t num_experts, uint32_t top_k, Scoring, bool normalize, float scaling,
           int32_t* ids, float* weights) {
  // Insertion into a list in descending order of logit; an equal later one stays behind, so ties go to the lowest id.
  uint32_t chosen = 0;
  for (uint32_t e = 0; e < num_experts; ++e) {
    const float logit = logit_or_lowest(logits[e]);
    if (chosen == top_k && !(logit > weights[chosen - 1])) continue;
    uint32_t at = chosen < top_k ? chosen++ : chosen - 1;
    for (; at > 0 && logit > weights[at - 1]; --at) weights[at] = weights[at - 1], ids[at] = ids[at - 1];
    weights[at] = logit;
    ids[at] = static_cast<int32_t>(e);
  }
  const float max_logit = weights[0];

  for (uint32_t i = 1; i < top_k; ++i) {  // into ascending expert id
    const int32_t id = ids[i];
    const float logit = weights[i];
    uint32_t at = i;
    for (; at > 0 && ids[at - 1] > id; --at) weights[at] = weights[at - 1], ids[at] = ids[at - 1];
    weights[at] = logit;
    ids[at] = id;
  }

  float sum = 0.0f;
  for (uint32_t e = 0; e < num_experts; e += 16) {
    const uint32_t n = min_u32(16, num_experts - e);
    float l[16] = {};
    for (uint32_t i = 0; i < n; ++i) l[i] = logit_or_lowest(logits[e + i]);
    store(l, exp_lanes(sub(load(l), set1(max_logit))));
    for (uint32_t i = 0; i < n; ++i) sum += l[i];
  }
  float chosen_sum = 0.0f;
  for (uint32_t i = 0; i < top_k; ++i) {
    weights[i] = exp_one(weights[i] - max_logit) / sum;
    chosen_sum += weights[i];
  }
  for (uint32_t i = 0; i < top_k; ++i) {
    if (normalize) weights[i] = weights[i] / chosen_sum;
    weights[i] = weights[i] * scaling;
  }
}

constexpr Kernels make_table(const char* isa) {
  return {
      .isa = isa,
      .matmul = matmul,
      .quantize = quantize,
      .rms_norm = rms_norm,
      .add = add_rows,
      .accumulate = accumulate,
      .swiglu = swiglu,
      .rope_angles = rope_angles,
      .rope = rope,
      .store_kv = store_kv,
      .attend = attend,
      .route = route,
  };
}

}  // namespace
}  // namespace headrace
