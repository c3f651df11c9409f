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
//
// One scheme for every type. A tile is 16 rows of the weights, one lane each, so an output is one chain of sums over
// ascending columns whatever else is computed beside it: how rows and tiles are grouped never shows in the bits.
//
//   groups   Activation rows go in groups of at most as many as the registers hold sums for; a weight is decoded once
//            for all rows of a group. Up to kGroups groups share one reading of the weights.
//   steps    Columns go in steps whose activations, gathered so that one pointer finds them all, stay in the L1 cache
//            beside the weights they meet; outputs hold the sums in between. One group alone takes as many columns as
//            it can: its weights come from memory, in long runs.
//   unpack   Where several groups meet a tile, its blocks are decoded to bytes once, in the L1 cache.
//
// The work left per block of 32 columns and 16 rows is, for each activation row, 8 products, a conversion, a
// multiplication and a fused multiply-add: with two vector ports 8/11 of the bare products' rate is the limit.

constexpr uint32_t kGroups = 8;

// The rows of one product, divided as evenly as possible: [begin(i), begin(i + 1)) for i < count.
struct Division {
  uint32_t n, count;
  Division(uint32_t n, uint32_t most) : n(n), count((n + most - 1) / most) {}
  uint32_t begin(uint32_t i) const { return static_cast<uint32_t>(uint64_t{n} * i / count); }
};

template <uint32_t kValue>
struct Constant {
  static constexpr uint32_t value = kValue;
};

// fn(Constant<n>()) for 1 <= n <= kMax.
template <uint32_t kMax, class Fn>
inline void with_constant(uint32_t n, Fn fn) {
  if constexpr (kMax > 1) {
    if (n < kMax) return with_constant<kMax - 1>(n, fn);
  }
  fn(Constant<kMax>());
}

// The sums of tiles [tile, tile + kTiles) so far: 0 before the first step, then what the outputs hold.
template <uint32_t kTiles, uint32_t kTokens>
inline void load_sums(const Matrix& w, uint32_t tile, bool first_step, float* const* y,
                      Floats (&acc)[kTiles][kTokens]) {
  for (uint32_t i = 0; i < kTiles; ++i) {
    const uint32_t row = (tile + i) * kTileRows;
    const uint32_t n = min_u32(kTileRows, w.rows - row);
    for (uint32_t t = 0; t < kTokens; ++t) {
      if (first_step) {
        acc[i][t] = set1(0.0f);
      } else {
        acc[i][t] = n == kTileRows ? load(y[t] + row) : load_n(y[t] + row, n);
      }
    }
  }
}

template <uint32_t kTiles, uint32_t kTokens>
inline void store_sums(const Matrix& w, uint32_t tile, const Floats (&acc)[kTiles][kTokens], float* const* y) {
  for (uint32_t i = 0; i < kTiles; ++i) {
    const uint32_t row = (tile + i) * kTileRows;
    const uint32_t n = min_u32(kTileRows, w.rows - row);
    for (uint32_t t = 0; t < kTokens; ++t) {
      if (n == kTileRows) {
        store(y[t] + row, acc[i][t]);
      } else {
        store_n(y[t] + row, acc[i][t], n);
      }
    }
  }
}

// A quant type is a decoder of blocks of 32 columns: the rows' scales, and Bytes for two groups of 4 columns at a time,
// as value + kOffset.
struct Q4_0 {
  static constexpr uint32_t kBlockBytes = 288;
  static constexpr int32_t kOffset = 8;
  using Products = Dot<15>;
  static constexpr uint32_t group(uint32_t pair, uint32_t i) { return pair + 4 * i; }
  static Floats scales(const uint8_t* block) { return F16::load(block); }
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
  static Floats scales(const uint8_t* block) { return F16::load(block); }
  static void decode(const uint8_t* block, uint32_t pair, Bytes (&w)[2]) {
    w[0] = flip_sign(load_bytes(block + 32 + 128 * pair));
    w[1] = flip_sign(load_bytes(block + 32 + 128 * pair + 64));
  }
};

// What Quant's decoder gave, kept: 16 scales as floats, then the Bytes in the order in which they were decoded.
template <class Quant>
struct Unpacked {
  static constexpr uint32_t kBlockBytes = 64 + 512;
  static constexpr int32_t kOffset = Quant::kOffset;
  using Products = typename Quant::Products;
  static constexpr uint32_t group(uint32_t pair, uint32_t i) { return Quant::group(pair, i); }
  static Floats scales(const uint8_t* block) { return F32::load(block); }
  static void decode(const uint8_t* block, uint32_t pair, Bytes (&w)[2]) {
    w[0] = load_bytes(block + 64 + 128 * pair);
    w[1] = load_bytes(block + 64 + 128 * pair + 64);
  }
};

// One tile ahead into L2 and 2.3 KB ahead into L1: with one token Intel gets 0.7 of streaming without, with eight AMD
// gets 0.6 of this speed.
template <class Quant>
inline void prefetch_block(const uint8_t* block, size_t tile_stride) {
  for (uint32_t i = 0; i < Quant::kBlockBytes; i += 64) {
    prefetch_near(block + 8 * 288 + i);
    prefetch_far(block + tile_stride + i);
  }
}

template <class Quant>
inline void unpack_blocks(const uint8_t* block, size_t tile_stride, uint32_t blocks, uint8_t* to) {
  for (uint32_t b = 0; b < blocks; ++b, block += Quant::kBlockBytes, to += Unpacked<Quant>::kBlockBytes) {
    prefetch_block<Quant>(block, tile_stride);
    store(reinterpret_cast<float*>(to), Quant::scales(block));
    for (uint32_t pair = 0; pair < 4; ++pair) {
      Bytes w[2];
      Quant::decode(block, pair, w);
      store_bytes(to + 64 + 128 * pair, w[0]);
      store_bytes(to + 64 + 128 * pair + 64, w[1]);
    }
  }
}

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

// acc[t] += the products of `blocks` blocks of one tile with kTokens activation rows. tile_stride: 0 where the tile has
// been unpacked, and nothing need be fetched ahead.
template <class Quant, uint32_t kTokens>
inline void quant_blocks(const uint8_t* block, size_t tile_stride, uint32_t blocks, const Activation* x,
                         Floats (&acc)[kTokens]) {
  for (uint32_t b = 0; b < blocks; ++b, block += Quant::kBlockBytes, x += kTokens) {
    if (tile_stride != 0) prefetch_block<Quant>(block, tile_stride);
    typename Quant::Products dot[kTokens];
    for (uint32_t t = 0; t < kTokens; ++t) dot[t] = typename Quant::Products(x[t].start);
    for (uint32_t pair = 0; pair < 4; ++pair) {
      Bytes w[2];
      Quant::decode(block, pair, w);
      for (uint32_t i = 0; i < 2; ++i)
        for (uint32_t t = 0; t < kTokens; ++t) dot[t].add4(w[i], x[t].q + 4 * Quant::group(pair, i));
    }
    const Floats d_w = Quant::scales(block);
    for (uint32_t t = 0; t < kTokens; ++t) acc[t] = fma(to_floats(dot[t].sum()), mul(d_w, set1(x[t].d)), acc[t]);
  }
}

template <class Quant>
void quant_matmul(const Matrix& w, const void* const* x, uint32_t n, float* const* y, uint32_t tile_begin,
                  uint32_t tile_end) {
  constexpr uint32_t kTokens = Quant::Products::kTokens;
  constexpr uint32_t kStep = 24;       // blocks that several groups share, unpacked: 14 KB
  constexpr uint32_t kOneGroup = 512;  // activation blocks of one group alone: 20 KB
  constexpr uint32_t kGathered = kGroups * kTokens * kStep > kOneGroup ? kGroups * kTokens * kStep : kOneGroup;
  Activation gathered[kGathered];
  alignas(64) uint8_t unpacked[kStep * Unpacked<Quant>::kBlockBytes];
  const uint32_t all_blocks = w.cols / kQuantBlock;
  const size_t tile_stride = size_t{all_blocks} * Quant::kBlockBytes;

  const Division parts(n, kGroups * kTokens);
  for (uint32_t part = 0; part < parts.count; ++part) {
    const uint32_t row = parts.begin(part);
    const Division groups(parts.begin(part + 1) - row, kTokens);
    const Division steps(all_blocks, groups.count == 1 ? kOneGroup / groups.n : kStep);
    for (uint32_t step = 0; step < steps.count; ++step) {
      const uint32_t begin = steps.begin(step), blocks = steps.begin(step + 1) - begin;
      // Group after group; in a group, block after block.
      Activation* to = gathered;
      for (uint32_t g = 0; g < groups.count; ++g)
        for (uint32_t b = begin; b < begin + blocks; ++b)
          for (uint32_t t = groups.begin(g); t < groups.begin(g + 1); ++t) gather<Quant>(x[row + t], w.cols, b, to++);

      for (uint32_t tile = tile_begin; tile < tile_end; ++tile) {
        const uint8_t* first = w.data + tile * tile_stride + size_t{begin} * Quant::kBlockBytes;
        if (groups.count > 1) unpack_blocks<Quant>(first, tile_stride, blocks, unpacked);
        for (uint32_t g = 0; g < groups.count; ++g) {
          const uint32_t t = groups.begin(g);
          with_constant<kTokens>(groups.begin(g + 1) - t, [&](auto tokens) {
            Floats acc[1][decltype(tokens)::value];
            load_sums(w, tile, step == 0, y + row + t, acc);
            if (groups.count == 1) {
              quant_blocks<Quant>(first, tile_stride, blocks, gathered, acc[0]);
            } else {
              quant_blocks<Unpacked<Quant>>(unpacked, 0, blocks, gathered + t * blocks, acc[0]);
            }
            store_sums(w, tile, acc, y + row + t);
          });
        }
      }
    }
  }
}

// acc[i][t] += the products of `cols` columns of kTiles tiles with kTokens activation rows, x: [cols][kTokens].
template <class Element, uint32_t kTiles, uint32_t kTokens>
inline void float_columns(const uint8_t* column, size_t tile_stride, uint32_t cols, const float* x,
                          Floats (&acc)[kTiles][kTokens]) {
  constexpr uint32_t kColumnBytes = kTileRows * Element::kBytes;
  for (uint32_t k = 0; k < cols; ++k, column += kColumnBytes, x += kTokens) {
    Floats w[kTiles];
    for (uint32_t i = 0; i < kTiles; ++i) {
      prefetch_near(column + i * tile_stride + 2304);
      w[i] = Element::load(column + i * tile_stride);
    }
    for (uint32_t t = 0; t < kTokens; ++t) {
      const Floats x_k = set1(x[t]);
      for (uint32_t i = 0; i < kTiles; ++i) acc[i][t] = fma(w[i], x_k, acc[i][t]);
    }
  }
}

template <class Element>
void float_matmul(const Matrix& w, const void* const* x, uint32_t n, float* const* y, uint32_t tile_begin,
                  uint32_t tile_end) {
  // At least two tiles beside each other where the registers allow: their sums hide each other's latency, and every
  // activation is fetched for both.
  constexpr uint32_t kTokens = kLiveSums >= 16 ? kLiveSums / 2 : kLiveSums;
  constexpr uint32_t kStep = 128;  // columns that several groups share: 4 tiles of them are 16 KB as BF16
  constexpr uint32_t kGathered = kGroups * kTokens * kStep;
  alignas(64) float gathered[kGathered];
  const size_t tile_stride = size_t{w.cols} * kTileRows * Element::kBytes;

  const Division parts(n, kGroups * kTokens);
  for (uint32_t part = 0; part < parts.count; ++part) {
    const uint32_t row = parts.begin(part);
    const Division groups(parts.begin(part + 1) - row, kTokens);
    const Division steps(w.cols, groups.count == 1 ? kGathered / groups.n : kStep);
    for (uint32_t step = 0; step < steps.count; ++step) {
      const uint32_t begin = steps.begin(step), cols = steps.begin(step + 1) - begin;
      for (uint32_t g = 0; g < groups.count; ++g) {
        const uint32_t t_begin = groups.begin(g), tokens = groups.begin(g + 1) - t_begin;
        for (uint32_t t = 0; t < tokens; ++t) {
          const uint8_t* from = static_cast<const uint8_t*>(x[row + t_begin + t]) + 4 * size_t{begin};
          float* to = gathered + t_begin * cols + t;
          for (uint32_t k = 0; k < cols; ++k) to[k * tokens] = read<float>(from + 4 * size_t{k});
        }
      }

      for (uint32_t tile = tile_begin; tile < tile_end; tile += 4) {
        const uint32_t tiles = min_u32(4, tile_end - tile);
        for (uint32_t g = 0; g < groups.count; ++g) {
          const uint32_t t = groups.begin(g);
          with_constant<kTokens>(groups.begin(g + 1) - t, [&](auto tokens) {
            constexpr uint32_t kN = decltype(tokens)::value;
            constexpr uint32_t kTiles = min_u32(4, kLiveSums / kN);
            const auto run = [&](auto count, uint32_t i) {
              Floats acc[decltype(count)::value][kN];
              const uint8_t* column = w.data + (tile + i) * tile_stride + size_t{begin} * kTileRows * Element::kBytes;
              load_sums(w, tile + i, step == 0, y + row + t, acc);
              float_columns<Element>(column, tile_stride, cols, gathered + t * cols, acc);
              store_sums(w, tile + i, acc, y + row + t);
            };
            uint32_t i = 0;
            for (; i + kTiles <= tiles; i += kTiles) run(Constant<kTiles>(), i);
            for (; i < tiles; ++i) run(Constant<1>(), i);
          });
        }
      }
    }
  }
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

template <class Element>
inline void store_key_typed(const float* x, uint32_t head_dim, uint32_t position, uint8_t* keys) {
  constexpr uint32_t kStep = kTileRows * Element::kBytes;
  uint8_t* to = keys + position / kTileRows * size_t{head_dim} * kStep + position % kTileRows * Element::kBytes;
  for (uint32_t d = 0; d < head_dim; d += 16) {
    const uint32_t n = min_u32(16, head_dim - d);
    uint8_t stored[kStep];
    Element::store_n(stored, load_n(x + d, n), n);
    for (uint32_t i = 0; i < n; ++i, to += kStep) __builtin_memcpy(to, stored + i * Element::kBytes, Element::kBytes);
  }
}

void store_key(const float* x, uint32_t head_dim, uint32_t position, DType kv_type, void* keys) {
  uint8_t* to = static_cast<uint8_t*>(keys);
  if (kv_type == DType::kF16) {
    store_key_typed<F16>(x, head_dim, position, to);
  } else {
    store_key_typed<F32>(x, head_dim, position, to);
  }
}

// Attention works on tiles of up to kRowTile queries (rows of the pass times heads that share the kv head) and blocks
// of kKeyBlock keys. Both products keep their sums in registers: of scores the lanes are keys, which is why keys lie in
// tile layout; of outputs the lanes are elements of a value. A key or value is loaded once for all queries of a tile,
// and where there are several tiles a block is converted to floats once for all of them and stays in the L1 cache.
// No sum crosses lanes but the last one of l, so a query's result does not depend on the tile it is in.
constexpr uint32_t kRowTile = min_u32(8, kLiveSums);

constexpr uint32_t power_of_two_within(uint32_t n) { return n < 2 ? 1 : 2 * power_of_two_within(n / 2); }

// p[r][16 i + lane] = scale * the products of query r with the keys of tile i. q: [kRows, head_dim]; p: rows of
// kKeyBlock. The bytes `ahead` of those read are brought near where kStreams.
template <class Element, bool kStreams, uint32_t kRows, uint32_t kTiles>
inline void score_tiles(const float* q, uint32_t head_dim, const uint8_t* tile, ptrdiff_t ahead, float scale,
                        float* p) {
  constexpr uint32_t kStep = kTileRows * Element::kBytes;
  const size_t tile_stride = size_t{head_dim} * kStep;
  Floats sum[kRows][kTiles];
  for (uint32_t r = 0; r < kRows; ++r)
    for (uint32_t i = 0; i < kTiles; ++i) sum[r][i] = set1(0.0f);
  const auto step = [&](uint32_t at_d) {
    Floats k[kTiles];
    for (uint32_t i = 0; i < kTiles; ++i) k[i] = Element::load(tile + i * tile_stride + at_d * kStep);
    for (uint32_t r = 0; r < kRows; ++r) {
      const Floats q_d = set1(q[size_t{r} * head_dim + at_d]);
      for (uint32_t i = 0; i < kTiles; ++i) sum[r][i] = fma(q_d, k[i], sum[r][i]);
    }
  };
  constexpr uint32_t kLine = 64 / kStep;  // elements of a key in a cache line
  uint32_t d = 0;
  for (; d + kLine <= head_dim; d += kLine, tile += kLine * kStep, q += kLine) {
    if constexpr (kStreams) {
      for (uint32_t i = 0; i < kTiles; ++i) {
        prefetch_far(tile + i * tile_stride + ahead);
        prefetch_near(tile + i * tile_stride + 1024);
      }
    }
    for (uint32_t i = 0; i < kLine; ++i) step(i);
  }
  if (d < head_dim) step(0);
  for (uint32_t r = 0; r < kRows; ++r)
    for (uint32_t i = 0; i < kTiles; ++i) store(p + r * kKeyBlock + 16 * i, mul(set1(scale), sum[r][i]));
}

// acc[r][0..] += p[r][j] * v[j][0..] for keys j < keys in turn: kVectors * 16 elements, or n where kVectors is 0.
template <class Element, bool kStreams, uint32_t kRows, uint32_t kVectors>
inline void add_values(float* acc, uint32_t head_dim, const float* p, const uint8_t* v, uint32_t keys, ptrdiff_t ahead,
                       uint32_t n) {
  constexpr uint32_t kSums = kVectors == 0 ? 1 : kVectors;
  const size_t stride = size_t{head_dim} * Element::kBytes;
  Floats a[kRows][kSums];
  for (uint32_t r = 0; r < kRows; ++r)
    for (uint32_t i = 0; i < kSums; ++i) {
      const float* from = acc + size_t{r} * head_dim + 16 * i;
      a[r][i] = kVectors == 0 ? load_n(from, n) : load(from);
    }
  for (uint32_t j = 0; j < keys; ++j, v += stride) {
    Floats v_j[kSums];
    for (uint32_t i = 0; i < kSums; ++i) {
      const uint8_t* at = v + 16 * i * Element::kBytes;
      if (kStreams && 16 * i * Element::kBytes % 64 == 0) {
        prefetch_far(at + ahead);
        prefetch_near(at + 4 * stride);
      }
      v_j[i] = kVectors == 0 ? Element::load_n(at, n) : Element::load(at);
    }
    for (uint32_t r = 0; r < kRows; ++r) {
      const Floats p_j = set1(p[size_t{r} * kKeyBlock + j]);
      for (uint32_t i = 0; i < kSums; ++i) a[r][i] = fma(p_j, v_j[i], a[r][i]);
    }
  }
  for (uint32_t r = 0; r < kRows; ++r)
    for (uint32_t i = 0; i < kSums; ++i) {
      float* to = acc + size_t{r} * head_dim + 16 * i;
      if constexpr (kVectors == 0) {
        store_n(to, a[r][i], n);
      } else {
        store(to, a[r][i]);
      }
    }
}

// Keys of a block, as offsets from its first.
struct KeyRange {
  uint32_t begin, end;
  bool empty() const { return begin >= end; }
};

// One block of keys and values: its first position, its data, and how far on the next block's lie.
struct KeysBlock {
  uint32_t position;
  const uint8_t* keys;
  const uint8_t* values;
  ptrdiff_t keys_ahead, values_ahead;
};

// The state of one call, in the caller's scratch.
struct Attention {
  const KeysAndValues& kv;
  const uint32_t num_q, position;
  float *block_keys, *block_values;  // [kKeyBlock * head_dim] each
  float* p;                          // [queries, kKeyBlock]
  float* sums;                       // [queries, 16]
  float* q;                          // [queries, head_dim]
  float* acc;                        // [queries, head_dim]
  float* running_max;                // [queries]

  uint32_t first_key(uint32_t at) const { return kv.window == 0 || at < kv.window ? 0 : at - kv.window + 1; }

  // What queries [i, i + kRows) see of a block. Returns whether that is all of it for all of them.
  template <uint32_t kRows>
  bool see(uint32_t i, uint32_t block, KeyRange (&keys)[kRows]) const {
    uint32_t last = position + i / num_q, head = i % num_q;
    bool all = true;
    for (uint32_t r = 0; r < kRows; ++r) {
      const uint32_t first = first_key(last);
      keys[r] = {first > block ? min_u32(first - block, kKeyBlock) : 0,
                 last < block ? 0 : min_u32(last - block + 1, kKeyBlock)};
      all = all && keys[r].begin == 0 && keys[r].end == kKeyBlock;
      if (++head == num_q) head = 0, ++last;
    }
    return all;
  }

  // Scores of queries [i, i + kRows), whole tiles of keys at a time; -infinity for keys that a query does not see.
  template <class Element, bool kStreams, uint32_t kRows>
  void score(uint32_t i, const KeysBlock& block) const {
    constexpr uint32_t kTiles = power_of_two_within(min_u32(kKeyBlock / kTileRows, kLiveSums / kRows));
    const size_t tile_bytes = size_t{kv.head_dim} * kTileRows * Element::kBytes;
    const float* q_i = q + size_t{i} * kv.head_dim;
    float* p_i = p + size_t{i} * kKeyBlock;
    KeyRange keys[kRows], any = {0, kKeyBlock};
    const bool sees_all = see<kRows>(i, block.position, keys);
    if (!sees_all) {
      any = {kKeyBlock, 0};
      for (const KeyRange& k : keys) {
        if (k.empty()) continue;
        any = {min_u32(any.begin, k.begin), any.end > k.end ? any.end : k.end};
      }
    }
    if (any.empty()) return;
    uint32_t tile = any.begin / kTileRows;
    const uint32_t tile_end = (any.end + kTileRows - 1) / kTileRows;
    for (; tile + kTiles <= tile_end; tile += kTiles)
      score_tiles<Element, kStreams, kRows, kTiles>(q_i, kv.head_dim, block.keys + tile * tile_bytes, block.keys_ahead,
                                                    kv.scale, p_i + tile * kTileRows);
    for (; tile < tile_end; ++tile)
      score_tiles<Element, kStreams, kRows, 1>(q_i, kv.head_dim, block.keys + tile * tile_bytes, block.keys_ahead,
                                               kv.scale, p_i + tile * kTileRows);
    if (sees_all) return;
    for (uint32_t r = 0; r < kRows; ++r) set_unseen(p_i + r * kKeyBlock, keys[r], -kInfinity);
  }

  // Scores to weights exp(s - max), and what earlier blocks gave brought to the new maximum.
  template <uint32_t kRows>
  void softmax(uint32_t i, const KeyRange (&keys)[kRows]) const {
    float change[16] = {};
    for (uint32_t r = 0; r < kRows; ++r) {
      if (keys[r].empty()) continue;
      const float* p_r = p + size_t{i + r} * kKeyBlock;
      const float block_max = max_lanes(max(max(load(p_r), load(p_r + 16)), max(load(p_r + 32), load(p_r + 48))));
      const float before = running_max[i + r];
      running_max[i + r] = before > block_max ? before : block_max;
      // Nothing to change yet where there was no earlier block.
      change[r] = before == -kInfinity ? 0.0f : before - running_max[i + r];
    }
    store(change, exp_lanes(load(change)));
    for (uint32_t r = 0; r < kRows; ++r) {
      if (keys[r].empty()) continue;
      float* p_r = p + size_t{i + r} * kKeyBlock;
      const Floats m = set1(running_max[i + r]);
      // exp(-infinity) would be 0 too, but takes a hundred cycles to underflow.
      set_unseen(p_r, keys[r], running_max[i + r]);
      for (uint32_t j = 0; j < kKeyBlock; j += 16) store(p_r + j, exp_lanes(sub(load(p_r + j), m)));
      set_unseen(p_r, keys[r], 0.0f);
      const Floats sum = add(add(load(p_r), load(p_r + 16)), add(load(p_r + 32), load(p_r + 48)));
      float* l = sums + size_t{i + r} * 16;
      const Floats c = set1(change[r]);
      store(l, fma(load(l), c, sum));
      if (change[r] == 1.0f) continue;
      float* acc_r = acc + size_t{i + r} * kv.head_dim;
      uint32_t d = 0;
      for (; d + 16 <= kv.head_dim; d += 16) store(acc_r + d, mul(load(acc_r + d), c));
      if (d < kv.head_dim) store_n(acc_r + d, mul(load_n(acc_r + d, kv.head_dim - d), c), kv.head_dim - d);
    }
  }

  // Scores of one query for keys that it does not see.
  static void set_unseen(float* p_r, KeyRange keys, float value) {
    for (uint32_t j = 0; j < keys.begin; ++j) p_r[j] = value;
    for (uint32_t j = keys.end; j < kKeyBlock; ++j) p_r[j] = value;
  }

  template <class Element, bool kStreams, uint32_t kRows>
  void add_range(uint32_t i, const KeysBlock& block, KeyRange keys) const {
    if (keys.empty()) return;
    constexpr uint32_t kVectors = power_of_two_within(min_u32(8, kLiveSums / kRows));
    const uint32_t n = keys.end - keys.begin;
    const float* p_i = p + size_t{i} * kKeyBlock + keys.begin;
    float* a = acc + size_t{i} * kv.head_dim;
    const uint8_t* v = block.values + size_t{keys.begin} * kv.head_dim * Element::kBytes;
    const ptrdiff_t ahead = block.values_ahead;
    uint32_t d = 0;
    for (; d + 16 * kVectors <= kv.head_dim; d += 16 * kVectors)
      add_values<Element, kStreams, kRows, kVectors>(a + d, kv.head_dim, p_i, v + d * Element::kBytes, n, ahead, 0);
    for (; d + 16 <= kv.head_dim; d += 16)
      add_values<Element, kStreams, kRows, 1>(a + d, kv.head_dim, p_i, v + d * Element::kBytes, n, ahead, 0);
    if (d < kv.head_dim)
      add_values<Element, kStreams, kRows, 0>(a + d, kv.head_dim, p_i, v + d * Element::kBytes, n, ahead,
                                              kv.head_dim - d);
  }

  // Keys that all queries of the tile see are taken together, those before and after them one query at a time: adding
  // 0 * v for a key that a query does not see could change its bits.
  template <class Element, bool kStreams, uint32_t kRows>
  void softmax_and_values(uint32_t i, const KeysBlock& block) const {
    KeyRange keys[kRows];
    KeyRange common = {0, kKeyBlock};
    const bool sees_all = see<kRows>(i, block.position, keys);
    for (uint32_t r = 0; r < kRows; ++r) {
      common = {common.begin > keys[r].begin ? common.begin : keys[r].begin, min_u32(common.end, keys[r].end)};
    }
    softmax<kRows>(i, keys);
    if (sees_all) return add_range<Element, kStreams, kRows>(i, block, common);
    if (common.empty()) {
      for (uint32_t r = 0; r < kRows; ++r) add_range<Element, kStreams, 1>(i + r, block, keys[r]);
      return;
    }
    for (uint32_t r = 0; r < kRows; ++r) add_range<Element, kStreams, 1>(i + r, block, {keys[r].begin, common.begin});
    add_range<Element, kStreams, kRows>(i, block, common);
    for (uint32_t r = 0; r < kRows; ++r) add_range<Element, kStreams, 1>(i + r, block, {common.end, keys[r].end});
  }

  template <class Element, bool kStreams, uint32_t kRows>
  void tile(uint32_t i, uint32_t rows, const KeysBlock& block, bool scores) const {
    if (rows == kRows) {
      if (scores) {
        score<Element, kStreams, kRows>(i, block);
      } else {
        softmax_and_values<Element, kStreams, kRows>(i, block);
      }
    } else if constexpr (kRows > 1) {
      tile<Element, kStreams, kRows - 1>(i, rows, block, scores);
    }
  }

  // All queries with one block: first with its keys, then with its values.
  template <class Element, bool kStreams>
  void add_block(uint32_t queries, uint32_t tiles, const KeysBlock& block) const {
    for (uint32_t step = 0; step < 2; ++step) {
      for (uint32_t t = 0; t < tiles; ++t) {
        const uint32_t i = queries * t / tiles, end = queries * (t + 1) / tiles;
        tile<Element, kStreams, kRowTile>(i, end - i, block, step == 0);
      }
    }
  }
};

// n stored values as floats; the bytes `ahead` of those read are brought near.
template <class Element>
inline void widen(const uint8_t* from, float* to, size_t n, ptrdiff_t ahead) {
  size_t i = 0;
  for (; i + 32 <= n; i += 32) {
    prefetch_far(from + i * Element::kBytes + ahead);
    store(to + i, Element::load(from + i * Element::kBytes));
    store(to + i + 16, Element::load(from + (i + 16) * Element::kBytes));
  }
  for (; i + 16 <= n; i += 16) store(to + i, Element::load(from + i * Element::kBytes));
  const uint32_t rest = static_cast<uint32_t>(n - i);
  if (rest > 0) store_n(to + i, Element::load_n(from + i * Element::kBytes, rest), rest);
}

template <class Element>
void attend_typed(const KeysAndValues& kv, const float* const* q, uint32_t num_q, uint32_t n, uint32_t position,
                  float* const* out, float* scratch) {
  const uint32_t queries = n * num_q, tiles = (queries + kRowTile - 1) / kRowTile, head_dim = kv.head_dim;
  const size_t width = head_dim;
  Attention a = {kv,      num_q,   position, scratch, scratch + kKeyBlock * width,
                 nullptr, nullptr, nullptr,  nullptr, nullptr};
  a.p = a.block_values + kKeyBlock * width;
  a.sums = a.p + size_t{kKeyBlock} * queries;
  a.q = a.sums + size_t{16} * queries;
  a.acc = a.q + width * queries;
  a.running_max = a.acc + width * queries;
  for (uint32_t i = 0; i < 16 * queries; ++i) a.sums[i] = 0.0f;
  for (size_t i = 0; i < width * queries; ++i) a.acc[i] = 0.0f;
  for (uint32_t i = 0; i < queries; ++i) a.running_max[i] = -kInfinity;
  // Queries side by side: where they lie in the pass, a power of two apart, they would meet in the L1 cache.
  for (uint32_t i = 0; i < n; ++i) __builtin_memcpy(a.q + i * num_q * width, q[i], num_q * width * sizeof(float));

  const uint32_t first = a.first_key(position), last = position + n - 1;
  const size_t row_bytes = width * Element::kBytes;
  for (uint32_t at = first / kKeyBlock * kKeyBlock; at <= last; at += kKeyBlock) {
    const uint32_t begin = at < first ? first : at, end = min_u32(at + kKeyBlock, last + 1);
    const ptrdiff_t ahead = end > last ? 0 : static_cast<ptrdiff_t>(kKeyBlock * row_bytes);
    const bool is_shared = at < kv.shared;
    const size_t offset = (is_shared ? at : at - kv.shared) * row_bytes;  // of the block
    const uint8_t* keys = static_cast<const uint8_t*>(is_shared ? kv.shared_keys : kv.keys) + offset;
    const uint8_t* values = static_cast<const uint8_t*>(is_shared ? kv.shared_values : kv.values) + offset;
    if (tiles > 1 && Element::kBytes != F32::kBytes) {
      const uint32_t key_begin = begin / kTileRows * kTileRows, key_end = (end + kTileRows - 1) / kTileRows * kTileRows;
      widen<Element>(keys + (key_begin - at) * row_bytes, a.block_keys + (key_begin - at) * width,
                     (key_end - key_begin) * width, ahead);
      widen<Element>(values + (begin - at) * row_bytes, a.block_values + (begin - at) * width, (end - begin) * width,
                     ahead);
      const KeysBlock block = {at, reinterpret_cast<const uint8_t*>(a.block_keys),
                               reinterpret_cast<const uint8_t*>(a.block_values), 0, 0};
      a.add_block<F32, false>(queries, tiles, block);
    } else {
      a.add_block<Element, true>(queries, tiles, {at, keys, values, ahead, ahead});
    }
  }

  for (uint32_t i = 0; i < queries; ++i) {
    const float l = sum_lanes(load(a.sums + size_t{16} * i));
    float* to = out[i / num_q] + i % num_q * width;
    for (uint32_t d = 0; d < head_dim; ++d) to[d] = a.acc[i * width + d] / l;
  }
}

void attend(const KeysAndValues& kv, const float* const* q, uint32_t num_q, uint32_t n, uint32_t position,
            float* const* out, float* scratch) {
  if (kv.type == DType::kF16) {
    attend_typed<F16>(kv, q, num_q, n, position, out, scratch);
  } else {
    attend_typed<F32>(kv, q, num_q, n, position, out, scratch);
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

// ---- Log-probabilities

void sum_exp(const float* logits, uint32_t n, float* max_logit, float* sum) {
  float rest[16];
  for (float& l : rest) l = -kInfinity;
  const uint32_t whole = n / 16 * 16;
  for (uint32_t i = whole; i < n; ++i) rest[i - whole] = logits[i];
  Floats largest = load(rest);
  for (uint32_t i = 0; i < whole; i += 16) largest = max(largest, load(logits + i));
  *max_logit = max_lanes(largest);
  const Floats m = set1(*max_logit);
  Floats sums = set1(0.0f);
  for (uint32_t i = 0; i < whole; i += 16) sums = add(sums, exp_lanes(sub(load(logits + i), m)));
  if (whole < n) sums = add(sums, exp_lanes(sub(load(rest), m)));
  *sum = sum_lanes(sums);
}

// x = 2^k y with y between sqrt(1/2) and sqrt(2); log y = 2 artanh((y - 1) / (y + 1)), a series. x >= 1, or NaN.
inline double log_one(double x) {
  if (!(x < __builtin_inf())) return x;
  const uint64_t x_bits = __builtin_bit_cast(uint64_t, x);
  double k = static_cast<double>(static_cast<int64_t>(x_bits >> 52) - 1023);
  double y = __builtin_bit_cast(double, (x_bits & ((uint64_t{1} << 52) - 1)) | uint64_t{1023} << 52);
  if (y > 0x1.6a09e667f3bcdp+0) y *= 0.5, k += 1;
  const double s = (y - 1) / (y + 1), z = s * s;
  double series = 1.0 / 21;
  for (int n = 19; n > 0; n -= 2) series = __builtin_fma(series, z, 1.0 / n);
  return __builtin_fma(k, 0x1.62e42fefa39efp-1, 2 * s * series);
}

float log_prob(float logit, const float* maxima, const float* sums, uint32_t pieces) {
  float m = maxima[0];
  for (uint32_t i = 1; i < pieces; ++i) m = maxima[i] > m ? maxima[i] : m;
  double sum = 0;
  for (uint32_t i = 0; i < pieces; i += 16) {
    const uint32_t n = min_u32(16, pieces - i);
    float scale[16] = {};
    for (uint32_t j = 0; j < n; ++j) scale[j] = maxima[i + j] - m;
    store(scale, exp_lanes(load(scale)));
    for (uint32_t j = 0; j < n; ++j)
      sum = __builtin_fma(static_cast<double>(scale[j]), static_cast<double>(sums[i + j]), sum);
  }
  return static_cast<float>((static_cast<double>(logit) - m) - log_one(sum));
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
      .store_key = store_key,
      .attend = attend,
      .route = route,
      .sum_exp = sum_exp,
      .log_prob = log_prob,
  };
}

}  // namespace
}  // namespace headrace
