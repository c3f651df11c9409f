// Sixteen lanes in plain C++: the twin that defines the bits. See kernels-inl.h for what a lanes header provides.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/half.h"

namespace headrace {
namespace {

struct Floats {
  float v[16];
};
struct Ints {
  int32_t v[16];
};
struct Bytes {
  uint8_t v[64];
};

constexpr uint32_t kLiveSums = 16;

template <class Result, class F>
inline Result each(F f) {
  Result r;
  for (int i = 0; i < 16; ++i) r.v[i] = f(i);
  return r;
}

// ---- Floats

inline Floats set1(float a) {
  return each<Floats>([&](int) { return a; });
}
inline Floats load(const float* p) {
  Floats r;
  std::memcpy(r.v, p, sizeof r.v);
  return r;
}
inline Floats load_n(const float* p, uint32_t n) {
  Floats r = {};
  std::memcpy(r.v, p, n * sizeof(float));
  return r;
}
inline void store(float* p, const Floats& a) { std::memcpy(p, a.v, sizeof a.v); }
inline void store_n(float* p, const Floats& a, uint32_t n) { std::memcpy(p, a.v, n * sizeof(float)); }

inline Floats add(const Floats& a, const Floats& b) {
  return each<Floats>([&](int i) { return a.v[i] + b.v[i]; });
}
inline Floats sub(const Floats& a, const Floats& b) {
  return each<Floats>([&](int i) { return a.v[i] - b.v[i]; });
}
inline Floats mul(const Floats& a, const Floats& b) {
  return each<Floats>([&](int i) { return a.v[i] * b.v[i]; });
}
inline Floats div(const Floats& a, const Floats& b) {
  return each<Floats>([&](int i) { return a.v[i] / b.v[i]; });
}
inline Floats fma(const Floats& a, const Floats& b, const Floats& c) {
  return each<Floats>([&](int i) { return __builtin_fmaf(a.v[i], b.v[i], c.v[i]); });
}
inline Floats max(const Floats& a, const Floats& b) {
  return each<Floats>([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline Floats min(const Floats& a, const Floats& b) {
  return each<Floats>([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}

inline float sum_lanes(Floats a) {
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) a.v[i] = a.v[i] + a.v[i + half];
  return a.v[0];
}
inline Floats sum_lanes16(const Floats (&a)[16]) {
  return each<Floats>([&](int i) { return sum_lanes(a[i]); });
}
inline float max_lanes(Floats a) {
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) a.v[i] = a.v[i] > a.v[i + half] ? a.v[i] : a.v[i + half];
  return a.v[0];
}

// ---- Ints: 32-bit, wrapping

inline Ints bits(const Floats& a) { return std::bit_cast<Ints>(a); }
inline Floats from_bits(const Ints& a) { return std::bit_cast<Floats>(a); }
inline Ints set1_int(int32_t a) {
  return each<Ints>([&](int) { return a; });
}
inline Ints add(const Ints& a, const Ints& b) {
  return each<Ints>(
      [&](int i) { return static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) + static_cast<uint32_t>(b.v[i])); });
}
inline Ints sub(const Ints& a, const Ints& b) {
  return each<Ints>(
      [&](int i) { return static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) - static_cast<uint32_t>(b.v[i])); });
}
inline Ints bit_and(const Ints& a, const Ints& b) {
  return each<Ints>([&](int i) { return a.v[i] & b.v[i]; });
}
inline Ints max(const Ints& a, const Ints& b) {
  return each<Ints>([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
template <int kBits>
inline Ints shift_left(const Ints& a) {
  return each<Ints>([&](int i) { return static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) << kBits); });
}
template <int kBits>
inline Ints shift_right(const Ints& a) {
  return each<Ints>([&](int i) { return a.v[i] >> kBits; });
}
inline int32_t sum_lanes(const Ints& a) {
  int32_t sum = 0;
  for (int32_t v : a.v) sum += v;
  return sum;
}
inline int32_t max_lanes(const Ints& a) {
  int32_t m = a.v[0];
  for (int32_t v : a.v) m = v > m ? v : m;
  return m;
}
inline Floats to_floats(const Ints& a) {
  return each<Floats>([&](int i) { return static_cast<float>(a.v[i]); });
}
inline Ints round_to_ints(const Floats& a) {
  return each<Ints>([&](int i) {
    return a.v[i] > -0x1p31f && a.v[i] < 0x1p31f ? static_cast<int32_t>(std::rintf(a.v[i])) : INT32_MIN;
  });
}
inline void store_int8(int8_t* p, const Ints& a) {
  for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(a.v[i]);
}

// ---- Bytes: sixteen groups of four

inline Bytes load_bytes(const uint8_t* p) {
  Bytes r;
  std::memcpy(r.v, p, sizeof r.v);
  return r;
}
inline void store_bytes(uint8_t* p, const Bytes& a) { std::memcpy(p, a.v, sizeof a.v); }
inline Bytes low_nibbles(Bytes a) {
  for (uint8_t& v : a.v) v &= 15;
  return a;
}
inline Bytes high_nibbles(Bytes a) {
  for (uint8_t& v : a.v) v >>= 4;
  return a;
}
inline Bytes flip_sign(Bytes a) {
  for (uint8_t& v : a.v) v ^= 0x80;
  return a;
}
template <uint32_t kMax>
class Dot {
 public:
  static constexpr uint32_t kTokens = 4;

  Dot() = default;
  explicit Dot(int32_t start) : sum_(set1_int(start)) {}
  void add4(const Bytes& w, const int8_t* x) {
    for (int i = 0; i < 16; ++i)
      for (int j = 0; j < 4; ++j) sum_.v[i] += w.v[4 * i + j] * x[j];
  }
  Ints sum() const { return sum_; }

 private:
  Ints sum_;
};

// ---- Stored element types

struct F32 {
  static constexpr uint32_t kBytes = 4;
  static Floats load(const uint8_t* p) { return load_n(p, 16); }
  static Floats load_n(const uint8_t* p, uint32_t n) {
    Floats r = {};
    std::memcpy(r.v, p, n * kBytes);
    return r;
  }
  static void store_n(uint8_t* p, const Floats& a, uint32_t n) { std::memcpy(p, a.v, n * kBytes); }
};

struct F16 {
  static constexpr uint32_t kBytes = 2;
  static Floats load(const uint8_t* p) { return load_n(p, 16); }
  static Floats load_n(const uint8_t* p, uint32_t n) {
    uint16_t h[16] = {};
    std::memcpy(h, p, n * kBytes);
    return each<Floats>([&](int i) { return float_from_f16(h[i]); });
  }
  static void store_n(uint8_t* p, const Floats& a, uint32_t n) {
    uint16_t h[16];
    for (int i = 0; i < 16; ++i) h[i] = f16_from_float(a.v[i]);
    std::memcpy(p, h, n * kBytes);
  }
};

struct BF16 {
  static constexpr uint32_t kBytes = 2;
  static Floats load(const uint8_t* p) {
    uint16_t h[16];
    std::memcpy(h, p, sizeof h);
    return each<Floats>([&](int i) { return float_from_bf16(h[i]); });
  }
};

inline void prefetch_near(const uint8_t*) {}
inline void prefetch_far(const uint8_t*) {}

}  // namespace
}  // namespace headrace
