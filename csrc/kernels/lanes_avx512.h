// Sixteen lanes in AVX-512 (F, BW, VL, DQ, VNNI). See kernels-inl.h for what a lanes header provides.
#pragma once

#include <cstdint>

#include "kernels/immintrin.h"

namespace headrace {
namespace {

struct Floats {
  __m512 v;
};
struct Ints {
  __m512i v;
};
struct Bytes {
  __m512i v;
};

constexpr uint32_t kLiveSums = 28;

inline __mmask16 first_lanes(uint32_t n) { return static_cast<__mmask16>((1u << n) - 1); }

// ---- Floats

inline Floats set1(float a) { return {_mm512_set1_ps(a)}; }
inline Floats load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Floats load_n(const float* p, uint32_t n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
inline void store(float* p, Floats a) { _mm512_storeu_ps(p, a.v); }
inline void store_n(float* p, Floats a, uint32_t n) { _mm512_mask_storeu_ps(p, first_lanes(n), a.v); }

inline Floats add(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Floats sub(Floats a, Floats b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Floats mul(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Floats div(Floats a, Floats b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Floats max(Floats a, Floats b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Floats min(Floats a, Floats b) { return {_mm512_min_ps(a.v, b.v)}; }

inline float sum_lanes(Floats a) {
  const __m256 s8 = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
  const __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
  return _mm_cvtss_f32(_mm_add_ss(s2, _mm_movehdup_ps(s2)));
}

// The same tree for sixteen vectors at once: each step adds halves of two vectors side by side.
inline Floats sum_lanes16(const Floats (&a)[16]) {
  __m512 s2[2];
  for (int i = 0; i < 2; ++i) {
    __m512 s4[2];
    for (int j = 0; j < 2; ++j) {
      const int first = 2 * i + j;
      __m512 s8[2];
      for (int k = 0; k < 2; ++k) {
        const __m512 x = a[first + 8 * k].v, y = a[first + 8 * k + 4].v;
        s8[k] = _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xee));
      }
      s4[j] = _mm512_add_ps(_mm512_shuffle_f32x4(s8[0], s8[1], 0x88), _mm512_shuffle_f32x4(s8[0], s8[1], 0xdd));
    }
    s2[i] = _mm512_add_ps(_mm512_shuffle_ps(s4[0], s4[1], 0x44), _mm512_shuffle_ps(s4[0], s4[1], 0xee));
  }
  return {_mm512_add_ps(_mm512_shuffle_ps(s2[0], s2[1], 0x88), _mm512_shuffle_ps(s2[0], s2[1], 0xdd))};
}

inline float max_lanes(Floats a) {
  const __m256 m8 = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 m4 = _mm_max_ps(_mm256_castps256_ps128(m8), _mm256_extractf128_ps(m8, 1));
  const __m128 m2 = _mm_max_ps(m4, _mm_movehl_ps(m4, m4));
  return _mm_cvtss_f32(_mm_max_ss(m2, _mm_movehdup_ps(m2)));
}

// ---- Ints: 32-bit, wrapping

inline Ints bits(Floats a) { return {_mm512_castps_si512(a.v)}; }
inline Floats from_bits(Ints a) { return {_mm512_castsi512_ps(a.v)}; }
inline Ints set1_int(int32_t a) { return {_mm512_set1_epi32(a)}; }
inline Ints add(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline Ints sub(Ints a, Ints b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline Ints bit_and(Ints a, Ints b) { return {_mm512_and_si512(a.v, b.v)}; }
inline Ints max(Ints a, Ints b) { return {_mm512_max_epi32(a.v, b.v)}; }
template <int kBits>
inline Ints shift_left(Ints a) {
  return {_mm512_slli_epi32(a.v, kBits)};
}
template <int kBits>
inline Ints shift_right(Ints a) {
  return {_mm512_srai_epi32(a.v, kBits)};
}
inline int32_t sum_lanes(Ints a) { return _mm512_reduce_add_epi32(a.v); }
inline int32_t max_lanes(Ints a) { return _mm512_reduce_max_epi32(a.v); }
inline Floats to_floats(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline Ints round_to_ints(Floats a) { return {_mm512_cvtps_epi32(a.v)}; }
inline void store_int8(int8_t* p, Ints a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v));
}

// ---- Bytes: sixteen groups of four

inline Bytes load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store_bytes(uint8_t* p, Bytes a) { _mm512_storeu_si512(p, a.v); }
inline Bytes low_nibbles(Bytes a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
inline Bytes high_nibbles(Bytes a) { return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))}; }
inline Bytes flip_sign(Bytes a) { return {_mm512_xor_si512(a.v, _mm512_set1_epi8(-128))}; }

template <uint32_t kMax>
class Dot {
 public:
  static constexpr uint32_t kTokens = 14;

  Dot() = default;
  explicit Dot(int32_t start) : sum_(set1_int(start)) {}
  // GCC 12 does not fold the broadcast into vpdpbusd's memory operand by itself; in assembly it is one instruction.
  void add4(Bytes w, const int8_t* x) {
    struct Group {
      int8_t v[4];
    };
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum_.v) : "v"(w.v), "m"(*reinterpret_cast<const Group*>(x)));
  }
  Ints sum() const { return sum_; }

 private:
  Ints sum_;
};

// ---- Stored element types

struct F32 {
  static constexpr uint32_t kBytes = 4;
  static Floats load(const uint8_t* p) { return {_mm512_loadu_ps(p)}; }
  static Floats load_n(const uint8_t* p, uint32_t n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
  static void store_n(uint8_t* p, Floats a, uint32_t n) { _mm512_mask_storeu_ps(p, first_lanes(n), a.v); }
};

struct F16 {
  static constexpr uint32_t kBytes = 2;
  static Floats load(const uint8_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
  }
  static Floats load_n(const uint8_t* p, uint32_t n) {
    return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(n), p))};
  }
  static void store_n(uint8_t* p, Floats a, uint32_t n) {
    _mm256_mask_storeu_epi16(p, first_lanes(n), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
};

struct BF16 {
  static constexpr uint32_t kBytes = 2;
  static Floats load(const uint8_t* p) {
    const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
  }
};

inline void prefetch_near(const uint8_t* p) { _mm_prefetch(p, _MM_HINT_T0); }
inline void prefetch_far(const uint8_t* p) { _mm_prefetch(p, _MM_HINT_T1); }

}  // namespace
}  // namespace headrace
