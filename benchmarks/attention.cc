// Attention with an F16 cache. Few rows (decode, verification): GB/s of keys and values, each counted once a pass,
// beside a streaming read of the same bytes. Many rows (prefill): GFLOP/s of the products with keys that rows see,
// beside a loop of fused multiply-adds. References are measured in turn with the kernel; medians.
//   attention [threads] [repeats]
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "kernels/kernels.h"
#include "reference.h"
#include "support/pages.h"

using namespace headrace;

namespace {

constexpr uint32_t kHeadDim = 128;
constexpr size_t kCacheBytes = size_t{1} << 30;  // well beyond the last cache
constexpr uint32_t kQueries = 128;               // of one kernel call, as the executor cuts a pass

struct Cache {
  uint8_t* data = static_cast<uint8_t*>(std::aligned_alloc(kHugePage, kCacheBytes));
  Cache() {
    prefer_huge_pages(data, kCacheBytes);          // as the engine's cache lies
    for (size_t i = 0; i < kCacheBytes; i += 2) {  // halves between -2 and 2
      const uint16_t v = static_cast<uint16_t>((i * 2654435761u) >> 7) & 0xbfff;
      std::memcpy(data + i, &v, 2);
    }
  }
  ~Cache() { std::free(data); }
};

// One kv head after the other: keys, then values, of `context` positions each.
struct Heads {
  const Cache& cache;
  uint32_t context, per_kv;

  size_t half_bytes() const { return row_bytes(DType::kF16, size_t{context} * kHeadDim); }
  uint32_t count() const { return static_cast<uint32_t>(kCacheBytes / (2 * half_bytes())); }
  KeysAndValues head(uint32_t h) const {
    const uint8_t* keys = cache.data + h * 2 * half_bytes();
    return {kHeadDim, DType::kF16, keys, keys + half_bytes(), 0, 0.0884f};
  }
};

// What one thread needs to attend with n rows of one head.
struct Rows {
  std::vector<float> q, out, scratch;
  std::vector<const float*> q_rows;
  std::vector<float*> out_rows;
  uint32_t n, per_kv;

  Rows(uint32_t n, uint32_t per_kv)
      : q(size_t{n} * per_kv * kHeadDim),
        out(q.size()),
        scratch(attend_scratch_floats(n, per_kv, kHeadDim) + 16),
        n(n),
        per_kv(per_kv) {
    for (size_t i = 0; i < q.size(); ++i) q[i] = static_cast<float>(i * 2654435761u % 997) / 500 - 1;
    for (uint32_t i = 0; i < n; ++i) {
      q_rows.push_back(q.data() + size_t{i} * per_kv * kHeadDim);
      out_rows.push_back(out.data() + size_t{i} * per_kv * kHeadDim);
    }
  }
  void attend(const Kernels& k, const KeysAndValues& kv, uint32_t position) {
    const uintptr_t aligned = (reinterpret_cast<uintptr_t>(scratch.data()) + 63) / 64 * 64;
    k.attend(kv, q_rows.data(), per_kv, n, position, out_rows.data(), reinterpret_cast<float*>(aligned));
  }
};

void few_rows(const Kernels& k, const Heads& heads, uint32_t n, unsigned threads, int repeats) {
  const size_t bytes = heads.count() * 2 * heads.half_bytes();
  std::vector<double> read, attention, ratio;
  for (int r = 0; r < repeats; ++r) {
    read.push_back(stream_bytes_per_s(threads, heads.cache.data, bytes));
    attention.push_back(bytes / timed(threads, [&](unsigned i) {
                          Rows mine(n, heads.per_kv);
                          for (uint32_t h = heads.count() * i / threads; h < heads.count() * (i + 1) / threads; ++h)
                            mine.attend(k, heads.head(h), heads.context - n);
                        }));
    ratio.push_back(attention.back() / read.back());
  }
  std::printf("%6u rows %2u heads/kv context %5u %9.1f GB/s of read %9.1f  ratio %5.2f\n", n, heads.per_kv,
              heads.context, median(attention) / 1e9, median(read) / 1e9, median(ratio));
}

void many_rows(const Kernels& k, const Heads& heads, uint32_t n, unsigned threads, int repeats) {
  const uint32_t position = heads.context - n, step = kQueries / heads.per_kv;
  uint64_t products = 0;  // of one kv head
  for (uint32_t i = 0; i < n; ++i) products += uint64_t{position + i + 1} * heads.per_kv * kHeadDim * 2;
  const uint32_t num_heads = std::max<uint32_t>(1, static_cast<uint32_t>(2'000'000'000 / products));  // a thread's
  std::vector<double> peak, attention, ratio;
  for (int r = 0; r < repeats; ++r) {
    peak.push_back(2 * float_macs_per_s(threads));
    attention.push_back(2e0 * products * num_heads * threads / timed(threads, [&](unsigned i) {
                          Rows mine(step, heads.per_kv);
                          for (uint32_t h = 0; h < num_heads; ++h)
                            for (uint32_t p = position; p < heads.context; p += step)
                              mine.attend(k, heads.head((i * num_heads + h) % heads.count()), p);
                        }));
    ratio.push_back(attention.back() / peak.back());
  }
  std::printf("%6u rows %2u heads/kv context %5u %9.1f GFLOP/s of    %9.1f  ratio %5.2f\n", n, heads.per_kv,
              heads.context, median(attention) / 1e9, median(peak) / 1e9, median(ratio));
}

}  // namespace

int main(int argc, char** argv) {
  const unsigned threads = argc > 1 ? static_cast<unsigned>(std::atoi(argv[1])) : 2;
  const int repeats = argc > 2 ? std::atoi(argv[2]) : 7;
  const Kernels& k = kernels();
  const Cache cache;
  std::printf("%s, %u threads, head_dim %u, %zu MiB of keys and values\n", k.isa, threads, kHeadDim, kCacheBytes >> 20);
  for (uint32_t per_kv : {1u, 8u}) {
    for (uint32_t context : {512u, 4096u})
      for (uint32_t n : {1u, 2u, 4u, 8u, 16u}) few_rows(k, {cache, context, per_kv}, n, threads, repeats);
    for (uint32_t context : {512u, 2048u, 4096u}) many_rows(k, {cache, context, per_kv}, 512, threads, repeats);
  }
}
