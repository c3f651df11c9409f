// Sixteen lanes in NEON with the dot product extension, as four quarters. See kernels-inl.h for what a lanes header
// provides.
#pragma once

#include <arm_neon.h>

#include <cstdint>

namespace headrace {
namespace {

struct Floats {
  float32x4_t v[4];
};
struct Ints {
  int32x4_t v[4];
};
struct Bytes {
  uint8x16_t v[4];
};

constexpr uint32_t kLiveSums = 4;

// Without a loop: GCC 12 then keeps the quarters in registers.
template <class Result, class F>
inline Result each(F f) {
  return {{f(0), f(1), f(2), f(3)}};
}

// ---- Floats

inline Floats set1(float a) {
  return each<Floats>([&](int) { return vdupq_n_f32(a); });
}
inline Floats load(const float* p) {
  return each<Floats>([&](int i) { return vld1q_f32(p + 4 * i); });
}
inline Floats load_n(const float* p, uint32_t n) {
  float lanes[16] = {};
  __builtin_memcpy(lanes, p, n * sizeof(float));
  return load(lanes);
}
inline void store(float* p, Floats a) {
  for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.v[i]);
}
inline void store_n(float* p, Floats a, uint32_t n) {
  float lanes[16];
  store(lanes, a);
  __builtin_memcpy(p, lanes, n * sizeof(float));
}

inline Floats add(Floats a, Floats b) {
  return each<Floats>([&](int i) { return vaddq_f32(a.v[i], b.v[i]); });
}
inline Floats sub(Floats a, Floats b) {
  return each<Floats>([&](int i) { return vsubq_f32(a.v[i], b.v[i]); });
}
inline Floats mul(Floats a, Floats b) {
  return each<Floats>([&](int i) { return vmulq_f32(a.v[i], b.v[i]); });
}
inline Floats div(Floats a, Floats b) {
  return each<Floats>([&](int i) { return vdivq_f32(a.v[i], b.v[i]); });
}
inline Floats fma(Floats a, Floats b, Floats c) {
  return each<Floats>([&](int i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); });
}
// Not fmax and fmin: those prefer numbers to NaN, or NaN to numbers, whichever operand it is.
inline float32x4_t max(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline float32x4_t min(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
inline Floats max(Floats a, Floats b) {
  return each<Floats>([&](int i) { return max(a.v[i], b.v[i]); });
}
inline Floats min(Floats a, Floats b) {
  return each<Floats>([&](int i) { return min(a.v[i], b.v[i]); });
}

// The tree's first two steps, which leave four lanes, and its third for two vectors side by side.
inline float32x4_t sum_to_4(Floats a) { return vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3])); }
inline float32x4_t sum_to_2(float32x4_t a, float32x4_t b) {
  const float64x2_t x = vreinterpretq_f64_f32(a), y = vreinterpretq_f64_f32(b);
  return vaddq_f32(vreinterpretq_f32_f64(vzip1q_f64(x, y)), vreinterpretq_f32_f64(vzip2q_f64(x, y)));
}
inline float sum_lanes(Floats a) {
  const float32x4_t s4 = sum_to_4(a);
  return vpadds_f32(vadd_f32(vget_low_f32(s4), vget_high_f32(s4)));
}
inline Floats sum_lanes16(const Floats (&a)[16]) {
  return each<Floats>([&](int i) {
    const Floats* four = a + 4 * i;
    return vpaddq_f32(sum_to_2(sum_to_4(four[0]), sum_to_4(four[1])), sum_to_2(sum_to_4(four[2]), sum_to_4(four[3])));
  });
}

inline float max_lanes(Floats a) {
  const float32x4_t m4 = max(max(a.v[0], a.v[2]), max(a.v[1], a.v[3]));
  const float32x4_t m2 = max(m4, vextq_f32(m4, m4, 2));
  return vgetq_lane_f32(max(m2, vextq_f32(m2, m2, 1)), 0);
}

// ---- Ints: 32-bit, wrapping

inline Ints bits(Floats a) {
  return each<Ints>([&](int i) { return vreinterpretq_s32_f32(a.v[i]); });
}
inline Floats from_bits(Ints a) {
  return each<Floats>([&](int i) { return vreinterpretq_f32_s32(a.v[i]); });
}
inline Ints set1_int(int32_t a) {
  return each<Ints>([&](int) { return vdupq_n_s32(a); });
}
inline Ints add(Ints a, Ints b) {
  return each<Ints>([&](int i) { return vaddq_s32(a.v[i], b.v[i]); });
}
inline Ints sub(Ints a, Ints b) {
  return each<Ints>([&](int i) { return vsubq_s32(a.v[i], b.v[i]); });
}
inline Ints bit_and(Ints a, Ints b) {
  return each<Ints>([&](int i) { return vandq_s32(a.v[i], b.v[i]); });
}
inline Ints max(Ints a, Ints b) {
  return each<Ints>([&](int i) { return vmaxq_s32(a.v[i], b.v[i]); });
}
template <int kBits>
inline Ints shift_left(Ints a) {
  return each<Ints>([&](int i) { return vshlq_n_s32(a.v[i], kBits); });
}
template <int kBits>
inline Ints shift_right(Ints a) {
  return each<Ints>([&](int i) { return vshrq_n_s32(a.v[i], kBits); });
}
inline int32_t sum_lanes(Ints a) { return vaddvq_s32(vaddq_s32(vaddq_s32(a.v[0], a.v[1]), vaddq_s32(a.v[2], a.v[3]))); }
inline int32_t max_lanes(Ints a) { return vmaxvq_s32(vmaxq_s32(vmaxq_s32(a.v[0], a.v[1]), vmaxq_s32(a.v[2], a.v[3]))); }
inline Floats to_floats(Ints a) {
  return each<Floats>([&](int i) { return vcvtq_f32_s32(a.v[i]); });
}
// The conversion saturates, which is right below, and makes a NaN 0.
inline Ints round_to_ints(Floats a) {
  return each<Ints>([&](int i) {
    const uint32x4_t fits = vcltq_f32(a.v[i], vdupq_n_f32(0x1p31f));
    return vbslq_s32(fits, vcvtnq_s32_f32(a.v[i]), vdupq_n_s32(INT32_MIN));
  });
}
inline void store_int8(int8_t* p, Ints a) {
  const int16x8_t lo = vmovn_high_s32(vmovn_s32(a.v[0]), a.v[1]), hi = vmovn_high_s32(vmovn_s32(a.v[2]), a.v[3]);
  vst1q_s8(p, vmovn_high_s16(vmovn_s16(lo), hi));
}

// ---- Bytes: sixteen groups of four

inline Bytes load_bytes(const uint8_t* p) {
  return each<Bytes>([&](int i) { return vld1q_u8(p + 16 * i); });
}
inline void store_bytes(uint8_t* p, Bytes a) {
  for (int i = 0; i < 4; ++i) vst1q_u8(p + 16 * i, a.v[i]);
}
inline Bytes low_nibbles(Bytes a) {
  return each<Bytes>([&](int i) { return vandq_u8(a.v[i], vdupq_n_u8(15)); });
}
inline Bytes high_nibbles(Bytes a) {
  return each<Bytes>([&](int i) { return vshrq_n_u8(a.v[i], 4); });
}
inline Bytes flip_sign(Bytes a) {
  return each<Bytes>([&](int i) { return veorq_u8(a.v[i], vdupq_n_u8(0x80)); });
}

// sdot is signed times signed. Up to 127 an unsigned byte is the same signed byte; a larger one is taken less 128, and
// 128 times the sum of the x is added in the end.
template <uint32_t kMax>
class Dot {
  static constexpr bool kLess128 = kMax > 127;

 public:
  static constexpr uint32_t kTokens = 4;

  Dot() = default;
  explicit Dot(int32_t start) : sum_(set1_int(start)), x_sum_(vdupq_n_s32(0)) {}
  void add4(Bytes w, const int8_t* x) {
    int32_t group;
    __builtin_memcpy(&group, x, sizeof group);
    const int8x16_t x4 = vreinterpretq_s8_s32(vdupq_n_s32(group));
    if constexpr (kLess128) {
      w = flip_sign(w);
      x_sum_ = vdotq_s32(x_sum_, x4, vdupq_n_s8(1));
    }
    sum_ = each<Ints>([&](int i) { return vdotq_s32(sum_.v[i], vreinterpretq_s8_u8(w.v[i]), x4); });
  }
  Ints sum() const {
    if constexpr (!kLess128) return sum_;
    return each<Ints>([&](int i) { return vaddq_s32(sum_.v[i], vshlq_n_s32(x_sum_, 7)); });
  }

 private:
  Ints sum_;
  int32x4_t x_sum_;
};

// ---- Stored element types

struct F32 {
  static constexpr uint32_t kBytes = 4;
  static Floats load(const uint8_t* p) {
    return each<Floats>([&](int i) { return vreinterpretq_f32_u8(vld1q_u8(p + 16 * i)); });
  }
  static Floats load_n(const uint8_t* p, uint32_t n) {
    uint8_t lanes[64] = {};
    __builtin_memcpy(lanes, p, n * kBytes);
    return load(lanes);
  }
  static void store_n(uint8_t* p, Floats a, uint32_t n) { __builtin_memcpy(p, a.v, n * kBytes); }
};

struct F16 {
  static constexpr uint32_t kBytes = 2;
  static Floats load(const uint8_t* p) {
    const float16x8_t lo = vreinterpretq_f16_u8(vld1q_u8(p)), hi = vreinterpretq_f16_u8(vld1q_u8(p + 16));
    return {
        {vcvt_f32_f16(vget_low_f16(lo)), vcvt_high_f32_f16(lo), vcvt_f32_f16(vget_low_f16(hi)), vcvt_high_f32_f16(hi)}};
  }
  static Floats load_n(const uint8_t* p, uint32_t n) {
    uint8_t h[32] = {};
    __builtin_memcpy(h, p, n * kBytes);
    return load(h);
  }
  static void store_n(uint8_t* p, Floats a, uint32_t n) {
    const float16x8_t h[2] = {vcvt_high_f16_f32(vcvt_f16_f32(a.v[0]), a.v[1]),
                              vcvt_high_f16_f32(vcvt_f16_f32(a.v[2]), a.v[3])};
    __builtin_memcpy(p, h, n * kBytes);
  }
};

struct BF16 {
  static constexpr uint32_t kBytes = 2;
  static Floats load(const uint8_t* p) {
    const uint16x8_t lo = vreinterpretq_u16_u8(vld1q_u8(p)), hi = vreinterpretq_u16_u8(vld1q_u8(p + 16));
    const uint16x8_t zeros = vdupq_n_u16(0);
    return {{vreinterpretq_f32_u16(vzip1q_u16(zeros, lo)), vreinterpretq_f32_u16(vzip2q_u16(zeros, lo)),
             vreinterpretq_f32_u16(vzip1q_u16(zeros, hi)), vreinterpretq_f32_u16(vzip2q_u16(zeros, hi))}};
  }
};

inline void prefetch_near(const uint8_t* p) { __builtin_prefetch(p, 0, 3); }
inline void prefetch_far(const uint8_t* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace
}  // namespace headrace
