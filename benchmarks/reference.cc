#include "reference.h"

#include <cstring>
#include <string_view>

#include "kernels/kernels.h"

#if defined(__x86_64__)
#include "kernels/immintrin.h"
#endif

namespace headrace {
namespace {

uint64_t read_plain(const uint8_t* p, size_t n) {
  uint64_t sum[8] = {};
  for (size_t i = 0; i < n; i += 64) {
    uint64_t v[8];
    std::memcpy(v, p + i, 64);
    for (int j = 0; j < 8; ++j) sum[j] += v[j];
  }
  uint64_t all = 0;
  for (uint64_t s : sum) all += s;
  return all;
}

uint64_t float_products_plain(uint64_t rounds) {
  float a[16] = {}, b = 1.0f;
  asm volatile("" : "+m"(a), "+m"(b));
  for (uint64_t r = 0; r < rounds; ++r)
    for (int i = 0; i < 16; ++i) a[i] = __builtin_fmaf(a[i], b, b);
  asm volatile("" : : "m"(a));
  return rounds * 16;
}

#if defined(__x86_64__)

// 2 KB ahead: the best of 0, 1, 2, 4 KB here, alone or with a second prefetch further ahead into L2.
constexpr size_t kAhead = 2048;

__attribute__((target("avx512f"))) uint64_t read_avx512(const uint8_t* p, size_t n) {
  __m512i sum[4] = {};
  for (size_t i = 0; i < n; i += 256) {
    for (size_t j = 0; j < 4; ++j) {
      _mm_prefetch(p + i + 64 * j + kAhead, _MM_HINT_T0);
      sum[j] = _mm512_xor_si512(sum[j], _mm512_loadu_si512(p + i + 64 * j));
    }
  }
  const __m512i all = _mm512_xor_si512(_mm512_xor_si512(sum[0], sum[1]), _mm512_xor_si512(sum[2], sum[3]));
  return static_cast<uint64_t>(_mm512_reduce_add_epi64(all));
}

__attribute__((target("avx2"))) uint64_t read_avx2(const uint8_t* p, size_t n) {
  __m256i sum[8] = {};
  for (size_t i = 0; i < n; i += 256) {
    for (size_t j = 0; j < 8; ++j) {
      if (j % 2 == 0) _mm_prefetch(p + i + 32 * j + kAhead, _MM_HINT_T0);
      sum[j] = _mm256_xor_si256(sum[j], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + i + 32 * j)));
    }
  }
  for (size_t j = 1; j < 8; ++j) sum[0] = _mm256_xor_si256(sum[0], sum[j]);
  uint64_t parts[4];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(parts), sum[0]);
  return parts[0] ^ parts[1] ^ parts[2] ^ parts[3];
}

// Operands and sums are hidden from the compiler, which would otherwise see that all the sums are equal.
__attribute__((target("avx512f,avx512vnni"))) uint64_t int8_avx512(uint64_t rounds) {
  __m512i acc[16] = {}, a = _mm512_set1_epi8(1), b = a;
  for (auto& x : acc) asm volatile("" : "+v"(x));
  for (uint64_t r = 0; r < rounds; ++r) {
    asm volatile("" : "+v"(a), "+v"(b));
#pragma GCC unroll 16
    for (auto& x : acc) asm("vpdpbusd %2, %1, %0" : "+v"(x) : "v"(a), "v"(b));
  }
  for (auto& x : acc) asm volatile("" : : "v"(x));
  return rounds * 16 * 64;
}

__attribute__((target("avx512f"))) uint64_t float_avx512(uint64_t rounds) {
  __m512 acc[16] = {}, a = _mm512_set1_ps(1.0f), b = a;
  for (auto& x : acc) asm volatile("" : "+v"(x));
  for (uint64_t r = 0; r < rounds; ++r) {
    asm volatile("" : "+v"(a), "+v"(b));
#pragma GCC unroll 16
    for (auto& x : acc) asm("vfmadd231ps %2, %1, %0" : "+v"(x) : "v"(a), "v"(b));
  }
  for (auto& x : acc) asm volatile("" : : "v"(x));
  return rounds * 16 * 16;
}

__attribute__((target("avx2"))) uint64_t int8_avx2(uint64_t rounds) {
  __m256i acc[12] = {}, a = _mm256_set1_epi8(1), b = a;
  for (auto& x : acc) asm volatile("" : "+x"(x));
  for (uint64_t r = 0; r < rounds; ++r) {
    asm volatile("" : "+x"(a), "+x"(b));
#pragma GCC unroll 16
    for (auto& x : acc) x = _mm256_add_epi16(x, _mm256_maddubs_epi16(a, b));
  }
  for (auto& x : acc) asm volatile("" : : "x"(x));
  return rounds * 12 * 32;
}

__attribute__((target("avx2,fma"))) uint64_t float_avx2(uint64_t rounds) {
  __m256 acc[12] = {}, a = _mm256_set1_ps(1.0f), b = a;
  for (auto& x : acc) asm volatile("" : "+x"(x));
  for (uint64_t r = 0; r < rounds; ++r) {
    asm volatile("" : "+x"(a), "+x"(b));
#pragma GCC unroll 16
    for (auto& x : acc) asm("vfmadd231ps %2, %1, %0" : "+x"(x) : "x"(a), "x"(b));
  }
  for (auto& x : acc) asm volatile("" : : "x"(x));
  return rounds * 12 * 8;
}

#endif

bool uses(const char* isa) { return std::string_view(kernels().isa) == isa; }

// Reads n bytes as wide as the instruction set allows, with the prefetches that serve it best. n % 4096 == 0.
uint64_t read_stream(const uint8_t* p, size_t n) {
#if defined(__x86_64__)
  if (uses("avx512")) return read_avx512(p, n);
  if (uses("avx2")) return read_avx2(p, n);
#endif
  return read_plain(p, n);
}

// Products in registers only, nothing loaded: `rounds` rounds of independent chains. They return how many
// multiply-accumulates that was: int8 by vpdpbusd (vpmaddubsw where there is no VNNI), and float by FMA.
uint64_t int8_products(uint64_t rounds) {
#if defined(__x86_64__)
  if (uses("avx512")) return int8_avx512(rounds);
  if (uses("avx2")) return int8_avx2(rounds);
#endif
  return float_products_plain(rounds);
}

uint64_t float_products(uint64_t rounds) {
#if defined(__x86_64__)
  if (uses("avx512")) return float_avx512(rounds);
  if (uses("avx2")) return float_avx2(rounds);
#endif
  return float_products_plain(rounds);
}

constexpr uint64_t kRounds = 1'000'000;  // some 10 ms

}  // namespace

double stream_bytes_per_s(unsigned threads, const uint8_t* p, size_t n) {
  std::vector<uint64_t> sums(threads);
  const size_t share = n / threads / 4096 * 4096;
  const double seconds = timed(threads, [&](unsigned i) { sums[i] = read_stream(p + share * i, share); });
  asm volatile("" : : "r"(sums.data()) : "memory");
  return static_cast<double>(share * threads) / seconds;
}

double int8_macs_per_s(unsigned threads) {
  const uint64_t macs = int8_products(1) * kRounds;
  return static_cast<double>(macs * threads) / timed(threads, [](unsigned) { int8_products(kRounds); });
}

double float_macs_per_s(unsigned threads) {
  const uint64_t macs = float_products(1) * kRounds;
  return static_cast<double>(macs * threads) / timed(threads, [](unsigned) { float_products(kRounds); });
}

}  // namespace headrace
