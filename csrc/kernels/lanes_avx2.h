// Sixteen lanes in AVX2, FMA and F16C, as two halves of eight. See kernels-inl.h for what a lanes header provides.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace headrace {
namespace {

struct Floats {
  __m256 lo, hi;
};
struct Ints {
  __m256i lo, hi;
};
struct Bytes {
  __m256i lo, hi;
};

constexpr uint32_t kLiveSums = 4;

// Masks of the first n of sixteen lanes.
inline Ints first_lanes(uint32_t n) {
  const __m256i count = _mm256_set1_epi32(static_cast<int32_t>(n));
  return {_mm256_cmpgt_epi32(count, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)),
          _mm256_cmpgt_epi32(count, _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15))};
}

// ---- Floats

inline Floats set1(float a) { return {_mm256_set1_ps(a), _mm256_set1_ps(a)}; }
inline Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline Floats load_n(const float* p, uint32_t n) {
  const Ints mask = first_lanes(n);
  return {_mm256_maskload_ps(p, mask.lo), _mm256_maskload_ps(p + 8, mask.hi)};
}
inline void store(float* p, Floats a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline void store_n(float* p, Floats a, uint32_t n) {
  const Ints mask = first_lanes(n);
  _mm256_maskstore_ps(p, mask.lo, a.lo);
  _mm256_maskstore_ps(p + 8, mask.hi, a.hi);
}

inline Floats add(Floats a, Floats b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline Floats sub(Floats a, Floats b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline Floats mul(Floats a, Floats b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline Floats div(Floats a, Floats b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline Floats fma(Floats a, Floats b, Floats c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline Floats max(Floats a, Floats b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline Floats min(Floats a, Floats b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }

inline float sum_lanes(Floats a) {
  const __m256 s8 = _mm256_add_ps(a.lo, a.hi);
  const __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
  const __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
  return _mm_cvtss_f32(_mm_add_ss(s2, _mm_movehdup_ps(s2)));
}

// The same tree for eight vectors at once: each step adds halves of two vectors side by side.
inline __m256 sum_lanes8(const Floats* a) {
  __m256 s2[2];
  for (int i = 0; i < 2; ++i) {
    __m256 s4[2];
    for (int j = 0; j < 2; ++j) {
      const int first = 2 * i + j;
      const __m256 x = _mm256_add_ps(a[first].lo, a[first].hi), y = _mm256_add_ps(a[first + 4].lo, a[first + 4].hi);
      s4[j] = _mm256_add_ps(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31));
    }
    s2[i] = _mm256_add_ps(_mm256_shuffle_ps(s4[0], s4[1], 0x44), _mm256_shuffle_ps(s4[0], s4[1], 0xee));
  }
  return _mm256_add_ps(_mm256_shuffle_ps(s2[0], s2[1], 0x88), _mm256_shuffle_ps(s2[0], s2[1], 0xdd));
}
inline Floats sum_lanes16(const Floats (&a)[16]) { return {sum_lanes8(a), sum_lanes8(a + 8)}; }

inline float max_lanes(Floats a) {
  const __m256 m8 = _mm256_max_ps(a.lo, a.hi);
  const __m128 m4 = _mm_max_ps(_mm256_castps256_ps128(m8), _mm256_extractf128_ps(m8, 1));
  const __m128 m2 = _mm_max_ps(m4, _mm_movehl_ps(m4, m4));
  return _mm_cvtss_f32(_mm_max_ss(m2, _mm_movehdup_ps(m2)));
}

// ---- Ints: 32-bit, wrapping

inline Ints bits(Floats a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
inline Floats from_bits(Ints a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
inline Ints set1_int(int32_t a) { return {_mm256_set1_epi32(a), _mm256_set1_epi32(a)}; }
inline Ints add(Ints a, Ints b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
inline Ints sub(Ints a, Ints b) { return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }
inline Ints bit_and(Ints a, Ints b) { return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
inline Ints max(Ints a, Ints b) { return {_mm256_max_epi32(a.lo, b.lo), _mm256_max_epi32(a.hi, b.hi)}; }
template <int kBits>
inline Ints shift_left(Ints a) {
  return {_mm256_slli_epi32(a.lo, kBits), _mm256_slli_epi32(a.hi, kBits)};
}
template <int kBits>
inline Ints shift_right(Ints a) {
  return {_mm256_srai_epi32(a.lo, kBits), _mm256_srai_epi32(a.hi, kBits)};
}
inline int32_t sum_lanes(Ints a) {
  const __m256i s8 = _mm256_add_epi32(a.lo, a.hi);
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(s8), _mm256_extracti128_si256(s8, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}
inline int32_t max_lanes(Ints a) {
  const __m256i m8 = _mm256_max_epi32(a.lo, a.hi);
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(m8), _mm256_extracti128_si256(m8, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1)));
}
inline Floats to_floats(Ints a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
inline Ints round_to_ints(Floats a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
inline void store_int8(int8_t* p, Ints a) {
  // Packing goes by 128-bit lanes: a's quarters come out in the order 0, 2, 1, 3.
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}

// ---- Bytes: sixteen groups of four

inline Bytes load_bytes(const uint8_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
}
inline void store_bytes(uint8_t* p, Bytes a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.lo);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32), a.hi);
}
inline __m256i low_nibbles(__m256i a) { return _mm256_and_si256(a, _mm256_set1_epi8(15)); }
inline __m256i high_nibbles(__m256i a) { return low_nibbles(_mm256_srli_epi16(a, 4)); }
inline Bytes low_nibbles(Bytes a) { return {low_nibbles(a.lo), low_nibbles(a.hi)}; }
inline Bytes high_nibbles(Bytes a) { return {high_nibbles(a.lo), high_nibbles(a.hi)}; }
inline Bytes flip_sign(Bytes a) {
  const __m256i sign = _mm256_set1_epi8(-128);
  return {_mm256_xor_si256(a.lo, sign), _mm256_xor_si256(a.hi, sign)};
}

// vpmaddubsw adds two products into 16 bits and would saturate with whole bytes. With nibbles a block of 32 columns
// fits: 16 products of at most 15 * 128 are 30720. So bytes are taken as two planes of nibbles.
template <uint32_t kMax>
class Dot {
  static constexpr uint32_t kPlanes = kMax < 16 ? 1 : 2;

 public:
  static constexpr uint32_t kTokens = 4 / kPlanes;

  Dot() = default;
  explicit Dot(int32_t start) : start_(start) {
    for (uint32_t i = 0; i < kPlanes; ++i) plane_[i] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  }
  void add4(Bytes w, const int8_t* x) {
    int32_t group;
    __builtin_memcpy(&group, x, sizeof group);
    const __m256i x4 = _mm256_set1_epi32(group);
    if constexpr (kPlanes == 1) {
      add_nibbles(plane_[0], w, x4);
    } else {
      add_nibbles(plane_[0], low_nibbles(w), x4);
      add_nibbles(plane_[1], high_nibbles(w), x4);
    }
  }
  Ints sum() const {
    Ints s = set1_int(start_);
    for (uint32_t i = 0; i < kPlanes; ++i) {
      const __m256i value = _mm256_set1_epi16(i == 0 ? 1 : 16);
      s = add(s, {_mm256_madd_epi16(plane_[i].lo, value), _mm256_madd_epi16(plane_[i].hi, value)});
    }
    return s;
  }

 private:
  static void add_nibbles(Ints& to, Bytes w, __m256i x4) {
    // In assembly, or GCC makes a tree of a block's additions and spills all the products.
    asm("vpaddw %1, %0, %0" : "+x"(to.lo) : "x"(_mm256_maddubs_epi16(w.lo, x4)));
    asm("vpaddw %1, %0, %0" : "+x"(to.hi) : "x"(_mm256_maddubs_epi16(w.hi, x4)));
  }
  int32_t start_;
  Ints plane_[kPlanes];  // 16-bit sums
};

// ---- Stored element types

struct F32 {
  static constexpr uint32_t kBytes = 4;
  static Floats load(const uint8_t* p) { return headrace::load(reinterpret_cast<const float*>(p)); }
  static Floats load_n(const uint8_t* p, uint32_t n) { return headrace::load_n(reinterpret_cast<const float*>(p), n); }
  static void store_n(uint8_t* p, Floats a, uint32_t n) { headrace::store_n(reinterpret_cast<float*>(p), a, n); }
};

struct F16 {
  static constexpr uint32_t kBytes = 2;
  static Floats load(const uint8_t* p) {
    const __m128i* h = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(h)), _mm256_cvtph_ps(_mm_loadu_si128(h + 1))};
  }
  static Floats load_n(const uint8_t* p, uint32_t n) {
    uint8_t h[32] = {};
    __builtin_memcpy(h, p, n * kBytes);
    return load(h);
  }
  static void store_n(uint8_t* p, Floats a, uint32_t n) {
    constexpr int kRound = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    __m128i h[2] = {_mm256_cvtps_ph(a.lo, kRound), _mm256_cvtps_ph(a.hi, kRound)};
    __builtin_memcpy(p, h, n * kBytes);
  }
};

struct BF16 {
  static constexpr uint32_t kBytes = 2;
  static Floats load(const uint8_t* p) {
    const __m128i* h = reinterpret_cast<const __m128i*>(p);
    return {widen(_mm_loadu_si128(h)), widen(_mm_loadu_si128(h + 1))};
  }

 private:
  static __m256 widen(__m128i h) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)); }
};

inline void prefetch_near(const uint8_t* p) { _mm_prefetch(p, _MM_HINT_T0); }
inline void prefetch_far(const uint8_t* p) { _mm_prefetch(p, _MM_HINT_T1); }

}  // namespace
}  // namespace headrace
