// Matrix products against the memory they stream: for each weight type and number of tokens, GB/s of weights and the
// ratio to a plain read of the same bytes by the same threads, measured in turn. Medians.
//   micro [threads] [repeats]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <thread>
#include <vector>

#include "kernels/kernels.h"

using namespace headrace;

namespace {

constexpr uint32_t kCols = 2048;
constexpr size_t kWeightBytes = size_t{512} << 20;

double thread_cpu_s() {
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

double median(std::vector<double> v) {
  std::nth_element(v.begin(), v.begin() + v.size() / 2, v.end());
  return v[v.size() / 2];
}

// A sum that the compiler cannot drop, as wide as the baseline allows.
uint64_t read_all(const uint8_t* p, size_t n) {
  uint64_t sum[8] = {};
  for (size_t i = 0; i + 64 <= n; i += 64) {
    uint64_t v[8];
    std::memcpy(v, p + i, 64);
    for (int j = 0; j < 8; ++j) sum[j] += v[j];
  }
  uint64_t all = 0;
  for (uint64_t s : sum) all += s;
  return all;
}

}  // namespace

int main(int argc, char** argv) {
  const unsigned threads = argc > 1 ? static_cast<unsigned>(std::atoi(argv[1])) : 2;
  const int repeats = argc > 2 ? std::atoi(argv[2]) : 7;
  const Kernels& k = kernels();
  uint8_t* weights = static_cast<uint8_t*>(std::aligned_alloc(64, kWeightBytes));
  for (size_t i = 0; i < kWeightBytes; i += 4) {
    const uint32_t v = static_cast<uint32_t>(i * 2654435761u) & 0x3fff3fff;  // halves and floats of ordinary size
    std::memcpy(weights + i, &v, 4);
  }
  std::printf("%s, %u threads, %zu MiB of weights, %u columns\n", k.isa, threads, kWeightBytes >> 20, kCols);
  std::printf("%-5s %6s %10s %10s %8s %8s\n", "type", "tokens", "read GB/s", "GB/s", "ratio", "GMAC/s");

  const struct {
    DType type;
    const char* name;
  } types[] = {{DType::kQ4_0, "Q4_0"},
               {DType::kQ8_0, "Q8_0"},
               {DType::kF16, "F16"},
               {DType::kBF16, "BF16"},
               {DType::kF32, "F32"}};
  volatile uint64_t sink = 0;
  for (const auto& t : types) {
    const uint32_t tiles = static_cast<uint32_t>(kWeightBytes / tile_bytes(t.type, kCols));
    const size_t bytes = tiles * tile_bytes(t.type, kCols);
    const Matrix w = {t.type, tiles * kTileRows, kCols, weights};
    for (uint32_t n : {1u, 2u, 3u, 4u, 6u, 8u, 16u}) {
      // Rows of their own, as in a pass: one shared row would stay in the L1 cache.
      std::vector<float> floats(size_t{n} * kCols), out(size_t{n} * w.rows);
      std::vector<uint8_t> q8(n * q8_row_bytes(kCols));
      std::vector<const void*> x;
      std::vector<float*> y;
      for (uint32_t i = 0; i < n; ++i) {
        float* row = floats.data() + size_t{i} * kCols;
        uint8_t* q8_row = q8.data() + i * q8_row_bytes(kCols);
        for (uint32_t c = 0; c < kCols; ++c) row[c] = static_cast<float>((c + i) % 17) - 8.0f;
        k.quantize(row, kCols, 0, kCols / kQuantBlock, q8_row);
        x.push_back(is_quantized(t.type) ? static_cast<const void*>(q8_row) : row);
        y.push_back(out.data() + size_t{i} * w.rows);
      }

      std::vector<double> read_s, product_s, ratio;
      for (int r = 0; r < repeats; ++r) {
        read_s.push_back(timed(
            threads, [&](unsigned i) { sink = sink + read_all(weights + bytes / threads * i, bytes / threads); }));
        product_s.push_back(timed(threads, [&](unsigned i) {
          k.matmul(w, x.data(), n, y.data(), tiles * i / threads, tiles * (i + 1) / threads);
        }));
        ratio.push_back(read_s.back() / product_s.back());
      }
      const double product = median(product_s);
      std::printf("%-5s %6u %10.1f %10.1f %8.2f %8.0f\n", t.name, n, bytes / median(read_s) / 1e9,
                  bytes / product / 1e9, median(ratio), 1e-9 * n * kCols * w.rows / product);
    }
  }
  std::free(weights);
}
