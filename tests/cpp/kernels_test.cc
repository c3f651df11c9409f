// Every table gives the portable twin's bits, over odd sizes, remainders, misalignments and special values. What the
// bits should be is checked against NumPy in tests/test_kernels.py.
#include "kernels/kernels.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <random>
#include <vector>

#include "check.h"
#include "kernels/half.h"
#include "support/error.h"

using namespace headrace;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
const Kernels& portable = *kernels_for("portable");

// The tables to compare with the twin.
std::vector<const Kernels*> others() {
  std::vector<const Kernels*> found = available_kernels();
  found.pop_back();
  if (found.empty()) std::printf("skip: this processor has no instruction set beside portable\n");
  return found;
}

std::mt19937& rng() {
  static std::mt19937 generator(7);
  return generator;
}

float normal() { return std::normal_distribution<float>()(rng()); }
uint32_t below(uint32_t n) { return static_cast<uint32_t>(rng()() % n); }

std::vector<float> normals(size_t n) {
  std::vector<float> v(n);
  for (float& x : v) x = normal();
  return v;
}

// Values that find careless kernels, between ordinary ones.
std::vector<float> specials(size_t n) {
  const float values[] = {0.0f,  -0.0f,   1e-45f,   -1e-40f,  3e38f,    -3e38f,  kInf,
                          -kInf, kNan,    65504.0f, 65519.9f, 65520.0f, 88.7f,   -88.7f,
                          89.0f, -104.0f, 6e-8f,    2.9e-8f,  1e30f,    -1e-30f, 1.0f};
  std::vector<float> v(n);
  for (float& x : v) x = below(2) ? normal() : values[below(std::size(values))];
  return v;
}

// A NaN equals every NaN: which one comes out is no part of a kernel's definition.
bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::isnan(a[i]) && std::isnan(b[i])) continue;
    if (std::bit_cast<uint32_t>(a[i]) != std::bit_cast<uint32_t>(b[i])) {
      std::fprintf(stderr, "element %zu of %zu: %a vs %a\n", i, a.size(), a[i], b[i]);
      return false;
    }
  }
  return true;
}

struct AlignedBytes {
  explicit AlignedBytes(size_t n) : size(n) {
    void* p = nullptr;  // no byte beyond n, so that the address sanitizer sees one read
    if (posix_memalign(&p, 64, n) != 0) std::abort();
    data = static_cast<uint8_t*>(p);
  }
  ~AlignedBytes() { std::free(data); }
  AlignedBytes(const AlignedBytes&) = delete;
  AlignedBytes& operator=(const AlignedBytes&) = delete;
  uint8_t* data = nullptr;
  size_t size;
};

// Random file rows: any bits in quants, ordinary magnitudes in scales and values.
std::vector<uint8_t> random_rows(DType type, uint32_t rows, uint32_t cols) {
  std::vector<uint8_t> bytes(rows * row_bytes(type, cols));
  if (type == DType::kF32) {
    for (size_t i = 0; i < bytes.size(); i += 4) {
      const float v = normal();
      std::memcpy(&bytes[i], &v, 4);
    }
    return bytes;
  }
  for (uint8_t& b : bytes) b = static_cast<uint8_t>(rng()());
  const size_t step = type == DType::kQ4_0 ? 18 : type == DType::kQ8_0 ? 34 : 2;
  for (size_t i = 0; i < bytes.size(); i += step) {
    const uint16_t sign = static_cast<uint16_t>(below(2) << 15);
    uint16_t v;
    if (type == DType::kBF16) {
      v = static_cast<uint16_t>(sign | (0x3c00 + below(0x500)));
    } else {
      v = static_cast<uint16_t>(sign | below(0x4400));  // subnormals too
    }
    std::memcpy(&bytes[i], &v, 2);
  }
  return bytes;
}

const DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16, DType::kQ4_0, DType::kQ8_0};

// Rows of activations as a type wants them, each at an odd address.
struct Activations {
  Activations(DType type, uint32_t n, uint32_t cols) {
    const size_t bytes = is_quantized(type) ? q8_row_bytes(cols) : cols * sizeof(float);
    for (uint32_t t = 0; t < n; ++t) {
      rows.emplace_back(bytes + 1);
      const std::vector<float> x = normals(cols);
      if (is_quantized(type)) {
        portable.quantize(x.data(), cols, 0, cols / kQuantBlock, rows.back().data() + 1);
      } else {
        std::memcpy(rows.back().data() + 1, x.data(), bytes);
      }
    }
    for (auto& row : rows) pointers.push_back(row.data() + 1);
  }
  std::vector<std::vector<uint8_t>> rows;
  std::vector<const void*> pointers;
};

std::vector<float> run_matmul(const Kernels& k, const Matrix& w, const Activations& x, uint32_t first, uint32_t n,
                              uint32_t tile_begin, uint32_t tile_end) {
  std::vector<float> y(size_t{n} * w.rows, -7.0f);
  std::vector<float*> out;
  for (uint32_t t = 0; t < n; ++t) out.push_back(y.data() + size_t{t} * w.rows);
  k.matmul(w, x.pointers.data() + first, n, out.data(), tile_begin, tile_end);
  return y;
}

}  // namespace

TEST("kernels_for knows its names") {
  CHECK(kernels_for("portable") != nullptr);
  CHECK(kernels_for("") == nullptr);
  CHECK(kernels_for("AVX512") == nullptr);
  CHECK(available_kernels().back() == &portable);
  for (const Kernels* k : available_kernels()) CHECK(kernels_for(k->isa) == k);
  CHECK_EQ(std::string(portable.isa), "portable");
}

TEST("matmul: same bits for every table, number of tokens and range of tiles") {
  for (DType type : kTypes) {
    for (uint32_t rows : {1u, 15u, 16u, 33u, 80u, 101u}) {
      for (uint32_t cols : {32u, 96u, 1u, 37u, 160u}) {
        if (is_quantized(type) && cols % kQuantBlock != 0) continue;
        AlignedBytes packed(matrix_bytes(type, rows, cols));
        pack_rows(type, rows, cols, 0, rows, random_rows(type, rows, cols).data(), packed.data);
        const Matrix w = {type, rows, cols, packed.data};
        const uint32_t tiles = num_tiles(rows);
        const Activations x(type, 20, cols);
        const std::vector<float> all = run_matmul(portable, w, x, 0, 20, 0, tiles);

        for (const Kernels* k : available_kernels()) {
          for (uint32_t n = 1; n <= 20; n += k == &portable ? 6 : 1) {
            const uint32_t first = below(20 - n + 1);
            const std::vector<float> want(all.begin() + first * rows, all.begin() + (first + n) * rows);
            CHECK(same_bits(run_matmul(*k, w, x, first, n, 0, tiles), want));
          }
          const uint32_t begin = below(tiles), end = begin + 1 + below(tiles - begin);
          const std::vector<float> part = run_matmul(*k, w, x, 0, 3, begin, end);
          std::vector<float> want(all.begin(), all.begin() + 3 * rows);
          for (uint32_t i = 0; i < 3 * rows; ++i) {
            const uint32_t tile = i % rows / kTileRows;
            if (tile < begin || tile >= end) want[i] = -7.0f;  // untouched
          }
          CHECK(same_bits(part, want));
        }
      }
    }
  }
}

// kernels.h's definition for one quantized row (file layout) and one activation row.
float defined_product(DType type, const uint8_t* row, const uint8_t* x, uint32_t cols) {
  float acc = 0.0f;
  for (uint32_t b = 0; b < cols / kQuantBlock; ++b) {
    const uint8_t* block = row + b * row_bytes(type, kQuantBlock);
    int32_t sum = 0;
    for (uint32_t i = 0; i < kQuantBlock; ++i) {
      const int32_t q_w =
          type == DType::kQ8_0 ? static_cast<int8_t>(block[2 + i]) : (block[2 + i % 16] >> (i < 16 ? 0 : 4) & 15) - 8;
      sum += q_w * static_cast<int8_t>(x[b * kQuantBlock + i]);
    }
    uint16_t d_w;
    float d_x;
    std::memcpy(&d_w, block, sizeof d_w);
    std::memcpy(&d_x, x + cols + 4 * b, sizeof d_x);
    acc = std::fma(static_cast<float>(sum), float_from_f16(d_w) * d_x, acc);
  }
  return acc;
}

TEST("matmul: wide rows, as defined") {
  const uint32_t rows = 101, cols = 257 * kQuantBlock, n = 17;
  for (DType type : {DType::kQ4_0, DType::kQ8_0}) {
    const std::vector<uint8_t> src = random_rows(type, rows, cols);
    AlignedBytes packed(matrix_bytes(type, rows, cols));
    pack_rows(type, rows, cols, 0, rows, src.data(), packed.data);
    const Matrix w = {type, rows, cols, packed.data};
    const Activations x(type, n, cols);
    std::vector<float> all;
    for (const void* x_t : x.pointers)
      for (uint32_t r = 0; r < rows; ++r)
        all.push_back(defined_product(type, &src[r * row_bytes(type, cols)], static_cast<const uint8_t*>(x_t), cols));
    for (const Kernels* k : available_kernels()) {
      for (uint32_t tokens : {1u, 3u, n}) {
        const std::vector<float> want(all.begin(), all.begin() + tokens * rows);
        CHECK(same_bits(run_matmul(*k, w, x, 0, tokens, 0, num_tiles(rows)), want));
      }
    }
  }
}

// Every way to cut rows into parts and groups, and columns into steps, on both sides of each border; every buffer ends
// where its data does, so that the address sanitizer sees a read too far.
TEST("matmul: every grouping gives the defined bits") {
  const uint32_t most = 230;
  struct Shape {
    uint32_t rows, cols;
  };
  for (DType type : kTypes) {
    const std::vector<Shape> shapes = is_quantized(type) ? std::vector<Shape>{{37, 32}, {17, 25 * 32}}
                                                         : std::vector<Shape>{{37, 1}, {1, 129}, {83, 259}};
    for (const auto [rows, cols] : shapes) {
      const std::vector<uint8_t> src = random_rows(type, rows, cols);
      AlignedBytes packed(matrix_bytes(type, rows, cols));
      pack_rows(type, rows, cols, 0, rows, src.data(), packed.data);
      const Matrix w = {type, rows, cols, packed.data};
      const Activations x(type, most, cols);
      std::vector<std::vector<float>> weights;  // rows as floats, of float types
      for (uint32_t r = 0; r < rows && !is_quantized(type); ++r)
        dequantize_row(type, &src[r * row_bytes(type, cols)], cols, weights.emplace_back(cols).data());
      std::vector<float> all;
      for (const void* x_t : x.pointers) {
        for (uint32_t r = 0; r < rows; ++r) {
          if (is_quantized(type)) {
            all.push_back(
                defined_product(type, &src[r * row_bytes(type, cols)], static_cast<const uint8_t*>(x_t), cols));
            continue;
          }
          float acc = 0.0f;
          for (uint32_t c = 0; c < cols; ++c) {
            float x_c;
            std::memcpy(&x_c, static_cast<const uint8_t*>(x_t) + 4 * c, sizeof x_c);
            acc = std::fma(weights[r][c], x_c, acc);
          }
          all.push_back(acc);
        }
      }
      for (const Kernels* k : available_kernels()) {
        for (uint32_t n : {1u,  2u,  4u,  5u,  7u,  8u,  9u,  13u, 14u,  15u,  16u,  17u,  27u,  28u,  29u,
                           31u, 32u, 33u, 63u, 64u, 65u, 97u, 98u, 111u, 112u, 113u, 129u, 223u, 225u, most}) {
          if (k == &portable && n > 5 && n != 33 && n != 113) continue;
          const uint32_t first = below(most - n + 1);
          const std::vector<float> want(all.begin() + first * rows, all.begin() + (first + n) * rows);
          CHECK(same_bits(run_matmul(*k, w, x, first, n, 0, num_tiles(rows)), want));
        }
      }
    }
  }
}

TEST("matmul: extreme quants and scales") {
  for (const Kernels* k : others()) {
    for (DType type : {DType::kQ4_0, DType::kQ8_0}) {
      const uint32_t rows = 16, cols = 64;
      std::vector<uint8_t> src(rows * row_bytes(type, cols));
      for (uint8_t fill : {0x00, 0x80, 0x7f, 0xff}) {
        std::fill(src.begin(), src.end(), fill);
        const size_t step = type == DType::kQ4_0 ? 18 : 34;
        const uint16_t scales[] = {0x0001, 0x7bff, 0x7c00, 0xfc00, 0x8000, 0x3c00, 0x7e01};
        for (size_t b = 0; b * step < src.size(); ++b) std::memcpy(&src[b * step], &scales[b % std::size(scales)], 2);
        AlignedBytes packed(matrix_bytes(type, rows, cols));
        pack_rows(type, rows, cols, 0, rows, src.data(), packed.data);
        const Matrix w = {type, rows, cols, packed.data};
        for (float value : {1.0f, -1.0f, 0.0f, 1e38f, 1e-38f, kInf, kNan}) {
          Activations x(type, 1, cols);
          std::vector<float> floats(cols, value);
          portable.quantize(floats.data(), cols, 0, 2, x.rows[0].data() + 1);
          CHECK(same_bits(run_matmul(*k, w, x, 0, 1, 0, 1), run_matmul(portable, w, x, 0, 1, 0, 1)));
        }
      }
    }
  }
}

TEST("quantize: same bytes, any range of blocks, special values") {
  for (const Kernels* k : others()) {
    for (uint32_t blocks : {1u, 2u, 5u, 64u}) {
      const uint32_t cols = blocks * kQuantBlock;
      for (bool special : {false, true}) {
        std::vector<float> x = special ? specials(cols) : normals(cols);
        if (special) std::fill(x.begin(), x.begin() + kQuantBlock, below(2) ? 0.0f : 1e-44f);
        std::vector<uint8_t> want(q8_row_bytes(cols)), got(q8_row_bytes(cols) + 3);
        portable.quantize(x.data(), cols, 0, blocks, want.data());
        const uint32_t cut = below(blocks + 1);
        k->quantize(x.data(), cols, cut, blocks, got.data() + 3);
        k->quantize(x.data(), cols, 0, cut, got.data() + 3);
        // Scales may be NaN; the rest is integers.
        CHECK(std::memcmp(want.data(), got.data() + 3, cols) == 0);
        CHECK(std::memcmp(want.data() + cols + 4 * blocks, got.data() + 3 + cols + 4 * blocks, 4 * blocks) == 0);
        std::vector<float> d_want(blocks), d_got(blocks);
        std::memcpy(d_want.data(), want.data() + cols, 4 * blocks);
        std::memcpy(d_got.data(), got.data() + 3 + cols, 4 * blocks);
        CHECK(same_bits(d_want, d_got));
      }
    }
  }
}

TEST("quantize: a NaN or an infinity stays visible, tiny blocks become zeros") {
  for (const Kernels* k : available_kernels()) {
    for (float value : {kNan, kInf, -kInf, 1e-45f, 3e-37f}) {
      std::vector<float> x(kQuantBlock, 1e-45f);
      x[17] = value;
      std::vector<uint8_t> row(q8_row_bytes(kQuantBlock));
      k->quantize(x.data(), kQuantBlock, 0, 1, row.data());
      float d;
      std::memcpy(&d, row.data() + kQuantBlock, 4);
      if (std::abs(value) < 1) {
        CHECK_EQ(d, 0.0f);
        for (uint32_t i = 0; i < kQuantBlock; ++i) CHECK_EQ(int{row[i]}, 0);
      } else {
        CHECK(!std::isfinite(d));
      }
    }
  }
}

TEST("quantize: halves go to the even neighbour") {
  for (const Kernels* k : available_kernels()) {
    std::vector<float> x(kQuantBlock, 127.0f);  // so that d is 1
    for (uint32_t i = 1; i < kQuantBlock; ++i) x[i] = static_cast<float>(i) - 16.5f;
    std::vector<uint8_t> row(q8_row_bytes(kQuantBlock));
    k->quantize(x.data(), kQuantBlock, 0, 1, row.data());
    for (uint32_t i = 0; i < kQuantBlock; ++i) {
      CHECK_EQ(int{static_cast<int8_t>(row[i])}, static_cast<int>(std::nearbyint(x[i])));
    }
  }
}

TEST("rms_norm: same bits, groups, in place") {
  for (const Kernels* k : others()) {
    for (uint32_t group : {1u, 7u, 16u, 31u, 128u, 200u}) {
      for (uint32_t groups : {1u, 3u}) {
        const uint32_t width = group * groups;
        const std::vector<float> x = normals(width), w = normals(group);
        std::vector<float> want(width), got = x;
        portable.rms_norm(x.data(), w.data(), want.data(), width, group, 1e-5f);
        k->rms_norm(got.data(), w.data(), got.data(), width, group, 1e-5f);
        CHECK(same_bits(got, want));
      }
    }
  }
}

TEST("add, accumulate, swiglu: same bits, remainders, special values") {
  for (const Kernels* k : others()) {
    for (uint32_t n = 1; n < 70; n += n < 20 ? 1 : 7) {
      for (bool special : {false, true}) {
        const std::vector<float> a = special ? specials(n) : normals(n), b = special ? specials(n) : normals(n);
        std::vector<float> want(n), got(n);
        portable.add(a.data(), b.data(), want.data(), n);
        k->add(a.data(), b.data(), got.data(), n);
        CHECK(same_bits(got, want));
        portable.swiglu(a.data(), b.data(), want.data(), n);
        k->swiglu(a.data(), b.data(), got.data(), n);
        CHECK(same_bits(got, want));
        want = got = b;
        portable.accumulate(0.3f, a.data(), want.data(), n);
        k->accumulate(0.3f, a.data(), got.data(), n);
        CHECK(same_bits(got, want));
      }
    }
  }
}

// exp through swiglu, y = gate / (1 + exp(-gate)) * up with gate = -x: exact enough to see the tails.
TEST("exp: a sweep over all magnitudes gives the same bits") {
  for (const Kernels* k : others()) {
    std::vector<float> x, up;
    for (uint32_t bits = 0; bits < 0x7f800000; bits += 9973 * 16) {
      x.push_back(std::bit_cast<float>(bits));
      x.push_back(-x.back());
    }
    up.assign(x.size(), 1.0f);
    std::vector<float> want(x.size()), got(x.size());
    portable.swiglu(x.data(), up.data(), want.data(), static_cast<uint32_t>(x.size()));
    k->swiglu(x.data(), up.data(), got.data(), static_cast<uint32_t>(x.size()));
    CHECK(same_bits(got, want));
  }
}

TEST("rope: same bits, both styles, partial rotation, far positions") {
  for (const Kernels* k : others()) {
    for (uint32_t position : {0u, 1u, 511u, 4097u, 999983u}) {
      for (uint32_t half : {1u, 5u, 16u, 24u, 64u}) {
        std::vector<float> inv_freq(half);
        for (uint32_t i = 0; i < half; ++i) inv_freq[i] = std::pow(10000.0f, -static_cast<float>(i) / half);
        std::vector<float> want(2 * half), got(2 * half);
        portable.rope_angles(position, inv_freq.data(), half, want.data());
        k->rope_angles(position, inv_freq.data(), half, got.data());
        CHECK(same_bits(got, want));
        for (RopeStyle style : {RopeStyle::kNeox, RopeStyle::kNorm}) {
          for (uint32_t rest : {0u, 3u}) {
            const uint32_t head_dim = 2 * half + rest;
            std::vector<float> x = normals(3 * head_dim), y = x;
            const std::vector<float> before = x;
            portable.rope(x.data(), want.data(), 3, head_dim, 2 * half, style);
            k->rope(y.data(), want.data(), 3, head_dim, 2 * half, style);
            CHECK(same_bits(y, x));
            for (uint32_t i = 0; i < rest; ++i) CHECK_EQ(x[head_dim - 1 - i], before[head_dim - 1 - i]);
          }
        }
      }
    }
  }
}

TEST("store_kv: same bytes over every kind of float") {
  for (const Kernels* k : others()) {
    std::vector<float> x = specials(61);
    for (uint32_t exponent = 0; exponent < 255; ++exponent) {
      for (uint32_t mantissa : {0u, 1u, 0xfffu, 0x1000u, 0x1001u, 0x2fffu, 0x3000u, 0x3001u, 0x7fffffu}) {
        x.push_back(std::bit_cast<float>(exponent << 23 | mantissa));
        x.push_back(-x.back());
      }
    }
    const uint32_t n = static_cast<uint32_t>(x.size());
    for (DType type : {DType::kF16, DType::kF32}) {
      std::vector<uint8_t> want(row_bytes(type, n)), got(row_bytes(type, n));
      portable.store_kv(x.data(), want.data(), n, type);
      k->store_kv(x.data(), got.data(), n, type);
      CHECK(want == got);
    }
  }
}

// One kv head's keys and values for `positions` positions, of which the last ends each allocation.
struct Stored {
  std::vector<uint8_t> keys, values;
  Stored(uint32_t positions, uint32_t head_dim, DType type)
      : keys(matrix_bytes(type, positions, head_dim)), values(row_bytes(type, positions * head_dim)) {
    for (uint32_t p = 0; p < positions; ++p)
      portable.store_key(normals(head_dim).data(), head_dim, p, type, keys.data());
    portable.store_kv(normals(positions * head_dim).data(), values.data(), positions * head_dim, type);
  }
};

// Rows [position, position + n) of q, which holds one row for each position from 0.
std::vector<float> attend(const Kernels& k, const KeysAndValues& kv, const std::vector<float>& q, uint32_t num_q,
                          uint32_t position, uint32_t n) {
  const size_t width = size_t{num_q} * kv.head_dim;
  std::vector<float> out(n * width), scratch(attend_scratch_floats(n, num_q, kv.head_dim), kNan);
  std::vector<const float*> q_rows;
  std::vector<float*> out_rows;
  for (uint32_t i = 0; i < n; ++i) {
    q_rows.push_back(q.data() + (position + i) * width);
    out_rows.push_back(out.data() + i * width);
  }
  k.attend(kv, q_rows.data(), num_q, n, position, out_rows.data(), scratch.data());
  return out;
}

TEST("store_key: same bytes, and each element where the tile layout has it") {
  std::vector<const Kernels*> tables = others();
  tables.push_back(&portable);
  for (const Kernels* k : tables) {
    for (DType type : {DType::kF16, DType::kF32}) {
      for (uint32_t head_dim : {1u, 15u, 16u, 33u, 128u}) {
        const uint32_t positions = 40;
        const size_t row = row_bytes(type, head_dim);
        std::vector<uint8_t> rows(positions * row), keys(matrix_bytes(type, positions, head_dim)), want(keys.size());
        for (uint32_t p = 0; p < positions; ++p) {
          const std::vector<float> x = specials(head_dim);
          portable.store_kv(x.data(), rows.data() + p * row, head_dim, type);
          k->store_key(x.data(), head_dim, p, type, keys.data());
        }
        pack_rows(type, positions, head_dim, 0, positions, rows.data(), want.data());
        CHECK(keys == want);
      }
    }
  }
}

TEST("attend: same bits over head sizes, windows and shared heads") {
  const uint32_t positions = 150;
  const auto check = [&](DType type, uint32_t head_dim, uint32_t num_q, const std::vector<uint32_t>& windows) {
    const Stored stored(positions, head_dim, type);
    const std::vector<float> q = normals(positions * num_q * head_dim);
    for (uint32_t window : windows) {
      const KeysAndValues kv = {head_dim, type, stored.keys.data(), stored.values.data(), window, 0.3f};
      for (auto [position, n] : {std::pair{0u, 1u}, {63u, 1u}, {149u, 1u}, {0u, 7u}, {60u, 9u}, {137u, 13u}}) {
        const std::vector<float> want = attend(portable, kv, q, num_q, position, n);
        for (const Kernels* k : others()) CHECK(same_bits(attend(*k, kv, q, num_q, position, n), want));
      }
    }
  };
  for (DType type : {DType::kF16, DType::kF32}) {
    for (uint32_t head_dim : {1u, 8u, 16u, 33u, 128u, 200u}) check(type, head_dim, 3, {0, 64});
    for (uint32_t num_q : {1u, 2u, 3u, 4u, 5u, 6u, 7u, 8u, 11u}) check(type, 24, num_q, {0, 1, 40, 64, 100});
  }
}

TEST("attend: a row's bits do not depend on how rows are cut, nor on the heads beside it") {
  std::vector<const Kernels*> tables = others();
  tables.push_back(&portable);
  for (const Kernels* k : tables) {
    for (DType type : {DType::kF16, DType::kF32}) {
      const uint32_t positions = 170, head_dim = 24;
      Stored stored(positions, head_dim, type);
      // A value of 0 with the sign that adding 0 would lose, and one that no earlier row may meet.
      const std::vector<float> minus_zero(head_dim, -0.0f), nan(head_dim, kNan);
      portable.store_kv(minus_zero.data(), stored.values.data(), head_dim, type);
      portable.store_kv(nan.data(), stored.values.data() + row_bytes(type, 165 * head_dim), head_dim, type);
      portable.store_key(nan.data(), head_dim, 165, type, stored.keys.data());
      for (uint32_t num_q : {1u, 3u, 8u}) {
        if (k == &portable && (num_q != 3 || type != DType::kF16)) continue;  // minutes under a sanitizer
        const std::vector<float> q = normals(positions * num_q * head_dim);
        for (uint32_t window : {0u, 3u, 64u}) {
          if (num_q != 3 && window == 3) continue;
          const KeysAndValues kv = {head_dim, type, stored.keys.data(), stored.values.data(), window, 0.3f};
          std::vector<float> one_by_one;
          for (uint32_t p = 0; p < positions; ++p) {
            const std::vector<float> row = attend(*k, kv, q, num_q, p, 1);
            one_by_one.insert(one_by_one.end(), row.begin(), row.end());
          }
          const size_t width = num_q * head_dim;
          for (uint32_t n = 1; n <= 40; n += 1 + n / 4) {
            for (uint32_t p = 0; p < positions; p += n) {
              const uint32_t rows = std::min(n, positions - p);
              const auto want = one_by_one.begin() + p * width;
              CHECK(same_bits(attend(*k, kv, q, num_q, p, rows), {want, want + rows * width}));
            }
          }
          CHECK(same_bits(attend(*k, kv, q, num_q, 0, positions), one_by_one));
          // One head alone, out of the last row before the NaN.
          const std::vector<float> head(q.begin() + 165 * width - head_dim, q.begin() + 165 * width);
          std::vector<float> alone(head_dim), scratch(attend_scratch_floats(1, 1, head_dim));
          const float* head_row = head.data();
          float* alone_row = alone.data();
          k->attend(kv, &head_row, 1, 1, 164, &alone_row, scratch.data());
          const auto end = one_by_one.begin() + 165 * width;
          CHECK(same_bits(alone, {end - head_dim, end}));
          for (auto i = one_by_one.begin(); i != end; ++i) CHECK(std::isfinite(*i));
        }
      }
    }
  }
}

TEST("route: same choice and bits; ties, NaN and infinities") {
  std::vector<const Kernels*> tables = others();
  tables.push_back(&portable);
  for (const Kernels* k : tables) {
    for (int trial = 0; trial < 300; ++trial) {
      const uint32_t experts = 1 + below(70), top_k = 1 + below(std::min(experts, 9u));
      std::vector<float> logits = normals(experts);
      if (trial % 3 == 1) {
        for (float& l : logits) l = static_cast<float>(below(4));  // many ties
      } else if (trial % 3 == 2) {
        for (float& l : logits) l = below(3) ? l : (below(2) ? kNan : -kInf);
      }
      std::vector<int32_t> ids(top_k), want_ids(top_k);
      std::vector<float> weights(top_k), want(top_k);
      const bool normalize = below(2);
      portable.route(logits.data(), experts, top_k, Scoring::kSoftmax, normalize, 1.5f, want_ids.data(), want.data());
      k->route(logits.data(), experts, top_k, Scoring::kSoftmax, normalize, 1.5f, ids.data(), weights.data());
      CHECK(ids == want_ids);
      CHECK(same_bits(weights, want));
      for (uint32_t i = 0; i < top_k; ++i) {
        CHECK(ids[i] >= 0 && static_cast<uint32_t>(ids[i]) < experts);
        CHECK(i == 0 || ids[i] > ids[i - 1]);
        // Nothing left out is better, or as good with a lower id.
        const auto value = [&](uint32_t e) { return std::isnan(logits[e]) ? -kInf : logits[e]; };
        for (uint32_t e = 0; e < experts; ++e) {
          if (std::find(ids.begin(), ids.end(), static_cast<int32_t>(e)) != ids.end()) continue;
          const uint32_t id = static_cast<uint32_t>(ids[i]);
          CHECK(value(e) < value(id) || (value(e) == value(id) && e > id));
        }
      }
    }
  }
}

TEST("sum_exp and log_prob: same bits; remainders, NaN and infinities") {
  const auto run = [](const Kernels& k, const std::vector<float>& logits, uint32_t pieces) {
    std::vector<float> out(2 * pieces + 1);
    const uint32_t n = static_cast<uint32_t>(logits.size());
    for (uint32_t i = 0; i < pieces; ++i) {
      const uint32_t begin = n * i / pieces, end = n * (i + 1) / pieces;
      k.sum_exp(logits.data() + begin, end - begin, &out[i], &out[pieces + i]);
    }
    out.back() = k.log_prob(logits[n / 2], &out[0], &out[pieces], pieces);
    return out;
  };
  for (uint32_t n : {1u, 15u, 16u, 17u, 64u, 255u, 256u, 1003u}) {
    for (int i = 0; i < 12; ++i) {
      std::vector<float> logits = i % 3 == 2 ? specials(n) : normals(n);
      if (i % 3 == 1)
        for (float& l : logits) l *= 40;
      for (uint32_t pieces : {1u, std::min(n, 5u), std::min(n, 37u)}) {
        const std::vector<float> want = run(portable, logits, pieces);
        for (const Kernels* k : others()) CHECK(same_bits(run(*k, logits, pieces), want));
        if (i % 3 == 2) continue;
        double sum = 0, most = *std::max_element(logits.begin(), logits.end());
        for (float l : logits) sum += std::exp(l - most);
        const double exact = logits[n / 2] - most - std::log(sum);
        CHECK(std::abs(want.back() - exact) <= 1e-6 + 1e-7 * std::abs(exact));
      }
    }
  }
  for (float broken : {kNan, kInf}) {
    std::vector<float> logits = normals(300);
    logits[200] = broken;
    for (const Kernels* k : available_kernels()) CHECK(std::isnan(run(*k, logits, 3).back()));
  }
}

TEST("pack_rows and unpack_row: round trip in pieces, zeros in the padding") {
  for (DType type : kTypes) {
    for (uint32_t rows : {1u, 16u, 31u, 48u, 77u}) {
      for (uint32_t cols : {32u, 1u, 17u, 96u}) {
        if (is_quantized(type) && cols % kQuantBlock != 0) continue;
        const size_t stride = row_bytes(type, cols);
        std::vector<uint8_t> src(rows * stride + 1);  // rows start at odd addresses
        for (uint8_t& b : src) b = static_cast<uint8_t>(rng()());
        AlignedBytes packed(matrix_bytes(type, rows, cols));
        std::memset(packed.data, 0xa5, packed.size);
        for (uint32_t begin = 0; begin < rows;) {
          const uint32_t n = std::min(rows - begin, 16 * (1 + below(3)));
          pack_rows(type, rows, cols, begin, n, src.data() + 1 + begin * stride, packed.data);
          begin += n;
        }
        const Matrix w = {type, rows, cols, packed.data};
        const Matrix padded = {type, num_tiles(rows) * kTileRows, cols, packed.data};
        std::vector<uint8_t> row(stride);
        for (uint32_t r = 0; r < padded.rows; ++r) {
          unpack_row(r < rows ? w : padded, r, row.data());
          const std::vector<uint8_t> want =
              r < rows ? std::vector<uint8_t>(src.begin() + 1 + r * stride, src.begin() + 1 + (r + 1) * stride)
                       : std::vector<uint8_t>(stride, 0);
          CHECK(row == want);
        }
      }
    }
  }
}

TEST("crc32c: known answers, pieces, the table twin") {
  CHECK_EQ(crc32c(0, "", 0), 0u);
  CHECK_EQ(crc32c(0, "123456789", 9), 0xe3069283u);
  const std::vector<uint8_t> zeros(32, 0), ones(32, 0xff);
  CHECK_EQ(crc32c(0, zeros.data(), 32), 0x8a9136aau);  // RFC 3720, B.4
  CHECK_EQ(crc32c(0, ones.data(), 32), 0x62a8ab43u);

  std::vector<uint8_t> data(100003);
  for (uint8_t& b : data) b = static_cast<uint8_t>(rng()());
  for (size_t n : {1u, 7u, 8u, 255u, 256u, 257u, 511u, 512u, 513u, 767u, 768u, 769u, 4096u, 12287u, 12288u, 12289u,
                   40001u, 100000u}) {
    const size_t offset = below(4);
    const uint8_t* p = data.data() + offset;
    const uint32_t want = crc32c_by_table(0, p, n);
    CHECK_EQ(crc32c(0, p, n), want);
    CHECK_EQ(crc32c_by_instruction(0, p, n), want);
    const size_t cut = below(static_cast<uint32_t>(n));
    CHECK_EQ(crc32c(crc32c(0, p, cut), p + cut, n - cut), want);
    CHECK_EQ(crc32c_by_table(crc32c_by_table(0, p, cut), p + cut, n - cut), want);
  }
  const uint32_t before = crc32c(0, data.data(), data.size());
  data[50000] ^= 0x10;
  CHECK(crc32c(0, data.data(), data.size()) != before);
}
