// Matrix products beside what the machine can do: a streaming read, int8 products and float products in registers,
// measured in turn in the same run. Medians.
//   micro [threads] [repeats]       every type: few tokens over weights far larger than any cache (GB/s and share of
//   the
//                                   read), many tokens (GMAC/s and share of the products)
//   micro reference [threads]       only the three references, as a JSON object a line: one, and another for each line
//                                   of standard input
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <vector>

#include "kernels/kernels.h"
#include "reference.h"
#include "support/pages.h"

using namespace headrace;

namespace {

constexpr uint32_t kCols = 2048;
constexpr size_t kWeightBytes = size_t{1} << 30;

// Ordinary small numbers in every type: scales and floats near 1, nothing subnormal.
void fill(DType type, uint8_t* p, size_t n) {
  uint32_t seed = 1;
  for (size_t i = 0; i + 4 <= n; i += 4) {
    seed = seed * 1664525u + 1013904223u;
    uint32_t v = seed;
    if (type == DType::kF32) v = (v & 0x807fffffu) | 0x3f000000u;
    if (type == DType::kBF16) v = (v & 0x807f807fu) | 0x3f003f00u;
    if (type == DType::kF16) v = (v & 0x83ff83ffu) | 0x38003800u;
    std::memcpy(p + i, &v, 4);
  }
  if (!is_quantized(type)) return;
  const size_t block = tile_bytes(type, kQuantBlock);
  const uint16_t scale = 0x2c00;  // 1/16
  for (size_t at = 0; at + block <= n; at += block)
    for (size_t i = 0; i < kTileRows; ++i) std::memcpy(p + at + 2 * i, &scale, 2);
}

// n activation rows of their own, as in a pass: one shared row would stay in the L1 cache.
struct Rows {
  std::vector<float> floats, out;
  std::vector<uint8_t> q8;
  std::vector<const void*> x;
  std::vector<float*> y;

  Rows(const Matrix& w, uint32_t n)
      : floats(size_t{n} * w.cols), out(size_t{n} * w.rows), q8(n * q8_row_bytes(w.cols)), x(n), y(n) {
    for (uint32_t i = 0; i < n; ++i) {
      float* row = floats.data() + size_t{i} * w.cols;
      uint8_t* q8_row = q8.data() + i * q8_row_bytes(w.cols);
      for (uint32_t c = 0; c < w.cols; ++c) row[c] = static_cast<float>((c + i) % 17) - 8.0f;
      kernels().quantize(row, w.cols, 0, w.cols / kQuantBlock, q8_row);
      x[i] = is_quantized(w.type) ? static_cast<const void*>(q8_row) : row;
      y[i] = out.data() + size_t{i} * w.rows;
    }
  }
};

// Every thread its share of the tiles, `times` times over.
double product_s(unsigned threads, const Matrix& w, Rows& rows, uint32_t n, int times) {
  const uint32_t tiles = num_tiles(w.rows);
  return timed(threads,
               [&](unsigned i) {
                 for (int r = 0; r < times; ++r)
                   kernels().matmul(w, rows.x.data(), n, rows.y.data(), tiles * i / threads, tiles * (i + 1) / threads);
               }) /
         times;
}

}  // namespace

int main(int argc, char** argv) {
  const bool only_reference = argc > 1 && std::string_view(argv[1]) == "reference";
  const int first = only_reference ? 2 : 1;
  const unsigned threads = argc > first ? static_cast<unsigned>(std::atoi(argv[first])) : 2;
  const int repeats = argc > first + 1 ? std::atoi(argv[first + 1]) : 5;
  if (threads < 1 || threads > 1024 || repeats < 1 || argc > first + 2) {
    std::fprintf(stderr, "usage: micro [reference] [threads] [repeats]\n");
    return 2;
  }
  uint8_t* weights = static_cast<uint8_t*>(std::aligned_alloc(kHugePage, kWeightBytes + kHugePage));
  prefer_huge_pages(weights, kWeightBytes + kHugePage);  // as the engine's weights lie
  std::memset(weights, 1, kWeightBytes);
  if (only_reference) {
    for (int line = 0; line != EOF;) {
      std::printf(
          "{\"isa\": \"%s\", \"threads\": %u, \"stream_bytes_per_s\": %.4g, \"int8_macs_per_s\": %.4g, "
          "\"float_macs_per_s\": %.4g}\n",
          kernels().isa, threads, stream_bytes_per_s(threads, weights, kWeightBytes), int8_macs_per_s(threads),
          float_macs_per_s(threads));
      std::fflush(stdout);
      while ((line = std::getchar()) != '\n' && line != EOF) {
      }
    }
    return 0;
  }

  const struct {
    DType type;
    const char* name;
  } types[] = {{DType::kQ4_0, "Q4_0"},
               {DType::kQ8_0, "Q8_0"},
               {DType::kF16, "F16"},
               {DType::kBF16, "BF16"},
               {DType::kF32, "F32"}};
  std::printf("%s, %u threads, %u columns\n", kernels().isa, threads, kCols);
  std::printf("%-5s %6s %10s %10s %8s %8s %8s\n", "type", "tokens", "read GB/s", "GB/s", "of read", "GMAC/s",
              "of peak");
  for (const auto& t : types) {
    fill(t.type, weights, kWeightBytes);
    for (uint32_t n : {1u, 2u, 3u, 4u, 5u, 6u, 8u, 12u, 16u, 64u, 512u}) {
      const bool many = n > 16;  // many tokens: a layer's worth of weights, from cache as far as it goes
      const uint32_t all = static_cast<uint32_t>(kWeightBytes / tile_bytes(t.type, kCols));
      const Matrix w = {t.type, many ? 2048u : all * kTileRows, kCols, weights};
      const size_t bytes = matrix_bytes(t.type, w.rows, w.cols);
      Rows rows(w, n);
      std::vector<double> read, product, of_read, of_peak;
      for (int r = 0; r < repeats; ++r) {
        read.push_back(stream_bytes_per_s(threads, weights, kWeightBytes));
        product.push_back(product_s(threads, w, rows, n, many ? 1 + static_cast<int>(2048 / n) : 1));
        const double peak = is_quantized(t.type) ? int8_macs_per_s(threads) : float_macs_per_s(threads);
        of_read.push_back(bytes / product.back() / read.back());
        of_peak.push_back(1.0 * n * w.rows * w.cols / product.back() / peak);
      }
      const double s = median(product);
      std::printf("%-5s %6u %10.1f %10.1f %8.2f %8.0f %8.2f\n", t.name, n, median(read) / 1e9, bytes / s / 1e9,
                  median(of_read), 1e-9 * n * w.rows * w.cols / s, median(of_peak));
      std::fflush(stdout);
    }
  }
  std::free(weights);
}
