// What the benchmarks compare with, measured in the same run: a streaming read and a loop of fused multiply-adds, both
// as wide as the processor allows, and the clock that all are timed by.
#pragma once

#include <algorithm>
#include <cstdint>
#include <ctime>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace headrace::benchmark {

inline double thread_cpu_s() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// Mean processor seconds of `threads` calls of work(i) at the same time: what else runs on the machine takes memory
// bandwidth from them, but its turns on the processor do not count.
template <class Work>
double timed(unsigned threads, Work work) {
  std::vector<double> seconds(threads);
  const auto call = [&](unsigned i) {
    const double start = thread_cpu_s();
    work(i);
    seconds[i] = thread_cpu_s() - start;
  };
  std::vector<std::thread> others;
  for (unsigned i = 1; i < threads; ++i) others.emplace_back(call, i);
  call(0);
  for (auto& t : others) t.join();
  double sum = 0;
  for (double s : seconds) sum += s;
  return sum / threads;
}

inline double median(std::vector<double> v) {
  std::nth_element(v.begin(), v.begin() + v.size() / 2, v.end());
  return v[v.size() / 2];
}

#if defined(__x86_64__)

// Reads n bytes (a multiple of 256, 64-byte aligned) once. Far prefetches cross the pages that hardware's do not.
__attribute__((target("avx512f"))) inline uint64_t read_512(const uint8_t* p, size_t n) {
  __m512i sum[4] = {};
  for (size_t i = 0; i < n; i += 256) {
    for (int j = 0; j < 4; ++j) {
      const char* at = reinterpret_cast<const char*>(p + i + 64 * j);
      _mm_prefetch(at + (16 << 10), _MM_HINT_T1);
      _mm_prefetch(at + 2304, _MM_HINT_T0);
      sum[j] = _mm512_add_epi64(sum[j], _mm512_load_si512(at));
    }
  }
  return static_cast<uint64_t>(
      _mm512_reduce_add_epi64(_mm512_add_epi64(_mm512_add_epi64(sum[0], sum[1]), _mm512_add_epi64(sum[2], sum[3]))));
}

__attribute__((target("avx2"))) inline uint64_t read_256(const uint8_t* p, size_t n) {
  __m256i sum[8] = {};
  for (size_t i = 0; i < n; i += 256) {
    for (int j = 0; j < 8; ++j) {
      const char* at = reinterpret_cast<const char*>(p + i + 32 * j);
      _mm_prefetch(at + (16 << 10), _MM_HINT_T1);
      _mm_prefetch(at + 2304, _MM_HINT_T0);
      sum[j] = _mm256_add_epi64(sum[j], _mm256_load_si256(reinterpret_cast<const __m256i*>(at)));
    }
  }
  for (int j = 1; j < 8; ++j) sum[0] = _mm256_add_epi64(sum[0], sum[j]);
  return static_cast<uint64_t>(_mm256_extract_epi64(sum[0], 0) + _mm256_extract_epi64(sum[0], 1) +
                               _mm256_extract_epi64(sum[0], 2) + _mm256_extract_epi64(sum[0], 3));
}

// 16 chains of `steps` fused multiply-adds; returns their sum.
__attribute__((target("avx512f"))) inline float fma_512(uint64_t steps) {
  __m512 sum[16], a = _mm512_set1_ps(0.5f), b = _mm512_set1_ps(1.0f);
  for (__m512& s : sum) s = b;
  for (uint64_t i = 0; i < steps; ++i) {
    for (__m512& s : sum) s = _mm512_fmadd_ps(s, a, b);
    asm volatile("" : "+v"(a));
  }
  for (int i = 1; i < 16; ++i) sum[0] = _mm512_add_ps(sum[0], sum[i]);
  return _mm512_reduce_add_ps(sum[0]);
}

__attribute__((target("avx2,fma"))) inline float fma_256(uint64_t steps) {
  __m256 sum[12], a = _mm256_set1_ps(0.5f), b = _mm256_set1_ps(1.0f);
  for (__m256& s : sum) s = b;
  for (uint64_t i = 0; i < steps; ++i) {
    for (__m256& s : sum) s = _mm256_fmadd_ps(s, a, b);
    asm volatile("" : "+x"(a));
  }
  for (int i = 1; i < 12; ++i) sum[0] = _mm256_add_ps(sum[0], sum[i]);
  return _mm256_cvtss_f32(sum[0]);
}

#endif

// Seconds that `threads` threads take to read n bytes once, each its share.
inline double read_s(unsigned threads, const uint8_t* data, size_t n) {
  volatile uint64_t sink = 0;
  const size_t share = n / threads / 256 * 256;
  return timed(threads, [&](unsigned i) {
    const uint8_t* p = data + i * share;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) {
      sink = sink + read_512(p, share);
      return;
    }
    if (__builtin_cpu_supports("avx2")) {
      sink = sink + read_256(p, share);
      return;
    }
#endif
    uint64_t sum = 0;
    for (size_t at = 0; at < share; at += 8) sum += *reinterpret_cast<const uint64_t*>(p + at);
    sink = sink + sum;
  });
}

// Float multiply-adds a second of `threads` threads, counted as two operations each; 0 where there is no loop for it.
inline double fma_flops(unsigned threads) {
  volatile float sink = 0;
  double lanes = 0;
  constexpr uint64_t kSteps = 4'000'000;
  const double seconds = timed(threads, [&](unsigned) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) {
      sink = sink + fma_512(kSteps);
      return;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) sink = sink + fma_256(kSteps);
#endif
  });
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) {
    lanes = 16 * 16;
  } else if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    lanes = 12 * 8;
  }
#endif
  return 2 * lanes * kSteps * threads / seconds;
}

}  // namespace headrace::benchmark
